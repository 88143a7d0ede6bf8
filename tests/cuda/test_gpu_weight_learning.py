"""ALA's weight learning with captured steps against eager ones. Without a GPU, it is skipped."""

import warnings

import pytest
import torch
from ala_rounds import (
    KINDS,
    LANES,
    SIZES,
    WORD_MODELS,
    Learning,
    WordLearning,
    compare,
    small_cnn,
)

from fedala.lanes.trees import leaves

pytestmark = pytest.mark.gpu

FLOAT32, FLOAT64 = 1e-5, 1e-10


def learn(kind, captures=True, dtype=torch.float32, **options):
    learning = Learning(*KINDS[kind], device="cuda", dtype=dtype, **options)
    learning.task.backend.captures_steps = captures
    # The kernel for a last linear layer replays no steps. Other tests compare it.
    learning.task.backend.find_weight_learner = lambda problem: None
    return learning


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_shared", [False, True], ids=["own messages", "one message"])
def test_captured_weight_learning_is_the_eager_one(kind, is_shared):
    """An initial stage of four epochs, which one lane has behind it, and three later rounds."""
    options = {"is_shared": is_shared, "max_epochs": 4}
    both = [learn(kind, captures, **options) for captures in (True, False)]
    for one in both:
        one.state["trained"][1] = True
    first, *later = compare(*both, FLOAT32, rounds=(2, 3, 4, 5))
    assert first.epochs.tolist() == [4, 1, 4, 4, 4, 4, 4, 0]
    assert [outcome.epochs.tolist() for outcome in later] == [[1] * (LANES - 1) + [0]] * 3
    assert both[0].task.backend._captured
    assert not both[1].task.backend._captured


@pytest.mark.parametrize("kind", ["two layers", "a client's own head above"])
def test_lanes_whose_initial_stages_end_one_by_one(kind):
    """In double precision, so that rounding does not decide when a loss has settled."""
    options = {"dtype": torch.float64, "max_epochs": 13, "threshold": 0.02}
    first, *_ = compare(*(learn(kind, captures, **options) for captures in (True, False)), FLOAT64)
    assert len(set(first.epochs.tolist())) > 2


@pytest.mark.parametrize(
    "settings",
    [
        {"eta": torch.linspace(0.5, 3, LANES, dtype=torch.float64)},
        {"min_epochs": 3},
        {"freeze": True},
    ],
    ids=["a rate for each lane", "three epochs", "frozen"],
)
def test_other_settings(settings):
    if "eta" in settings:
        settings = {"eta": settings["eta"].cuda()}
    both = (learn("two layers", one, max_epochs=5, **settings) for one in (True, False))
    compare(*both, FLOAT32)


@pytest.mark.parametrize("kind", WORD_MODELS)
def test_rows_of_a_table_of_words_are_learned_as_the_whole(monkeypatch, kind):
    """Captured steps on rows against eager ones on whole tables."""
    both = []
    for by_rows in (True, False):
        learning = WordLearning(
            monkeypatch, kind, by_rows, device="cuda", dtype=torch.float32, eta=30.0, max_epochs=4
        )
        learning.task.backend.captures_steps = by_rows
        both.append(learning)
    compare(*both, 10 * FLOAT32)
    assert both[0].task.backend._captured


def test_a_lane_that_is_not_finite_disturbs_no_other():
    both = [learn("two layers", captures, max_epochs=3) for captures in (True, False)]
    for one in both:
        received = one.start(2 * LANES + 2)
        for name, value in one.local.items():
            value[2] = received[name][0]  # equal models
        one.local["fc2.weight"][4, 0, 0] = float("nan")
        one.task.x[torch.as_tensor(one.task.parts["train"][1])] = float("inf")
    first, later = compare(*both, FLOAT32, rounds=(2, 3))
    assert first.epochs.tolist() == [3, 0, 0, 3, 0, 3, 3, 0]
    assert first.faults.tolist() == [0, 2, 0, 0, 1, 0, 0, 0]
    assert later.epochs.tolist() == [1, 0, 3, 1, 0, 1, 1, 0]


def test_rounds_replay_the_same_graphs_with_the_same_bits_and_keep_no_features():
    """The initial stage is one epoch, so all rounds have the same groups of lanes."""
    results, learnings = [], []
    for _ in range(2):
        learning = learn("two layers", max_epochs=1, sample=1.0)
        results.append([learning.do_round(round)[0] for round in (2, 3)])
        learnings.append(learning)
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    backend = learnings[0].task.backend
    [steps] = backend._captured.values()
    graphs = dict(steps.graphs)
    full = {sum(n >= 4 * (i + 1) for n in SIZES) for i in range(max(SIZES) // 4)}
    assert sorted((first, end) for first, end, _ in graphs) == [(0, n) for n in sorted(full)]
    learnings[0].do_round(4)
    assert [*backend._captured.values()] == [steps]
    assert steps.graphs == graphs
    assert [leaf.shape[:2] for _, leaf in leaves(steps.batch)] == [(LANES - 1, 4)] * 2


@pytest.mark.parametrize("kind", [kind for kind, (model, _) in KINDS.items() if model is small_cnn])
def test_an_ordinary_round_does_not_wait_for_the_device(kind):
    """Torch raises an error if the host waits, but for the copy that was begun before."""
    learning = learn(kind, max_epochs=2)
    for round in (2, 3):
        learning.do_round(round)
    cohort = learning.make_cohort(4)
    try:
        with warnings.catch_warnings(action="ignore"):  # that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        _, outcome = learning.initialize(cohort)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert outcome.epochs.tolist() == [1] * (LANES - 1) + [0]
