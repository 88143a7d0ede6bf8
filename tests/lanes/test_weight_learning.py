"""ALA's weight learning on a device that captures steps, against the plain one.

The device is made up: `tape.py` stands for its graphs. `tests/cuda` has the same on a GPU.
"""

import pytest
import torch
import torch.nn.functional as F
from ala_rounds import KINDS, LANES, SIZES, Learning, compare
from small import Net
from tape import TapedGpu, use_tapes
from torch import Tensor, nn

from fedala import ALA, UserError
from fedala.lanes import task as lanes_task
from fedala.lanes.trees import leaves

TWO_LAYERS = KINDS["two layers"]


@pytest.fixture(autouse=True)
def tapes(monkeypatch):
    use_tapes(monkeypatch)


def learn(model, governed, captures=True, **options):
    learning = Learning(model, governed, **options)
    if captures:
        learning.task.backend = TapedGpu(learning.task.device)
    return learning


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_shared", [False, True], ids=["own messages", "one message"])
def test_captured_weight_learning_is_the_plain_one(kind, is_shared):
    """An initial stage whose lanes end one by one, and two later rounds."""
    options = {"is_shared": is_shared, "max_epochs": 13, "threshold": 0.02}
    learnings = [learn(*KINDS[kind], captures, **options) for captures in (True, False)]
    for one in learnings:
        one.state["trained"][1] = True
    first, *later = compare(*learnings, 1e-10)
    assert len(set(first.epochs.tolist())) > 2
    assert [outcome.epochs.tolist() for outcome in later] == [[1] * (LANES - 1) + [0]] * 2
    assert learnings[0].task.backend._captured


@pytest.mark.parametrize(
    "settings",
    [
        {"eta": torch.linspace(0.5, 3, LANES, dtype=torch.float64)},
        {"min_epochs": 3},
        {"freeze": True},
        {"sample": 1.0},
    ],
    ids=["a rate for each lane", "three epochs", "frozen", "all samples"],
)
def test_captured_weight_learning_with_other_settings(settings):
    both = (learn(*TWO_LAYERS, captures, max_epochs=5, **settings) for captures in (True, False))
    compare(*both, 1e-10)


def test_lanes_that_do_not_learn_stay_as_they_are():
    """Before the host knows who learns, all lanes take the first epoch. It must not count."""
    learnings = [learn(*TWO_LAYERS, captures, max_epochs=3) for captures in (True, False)]
    for one in learnings:
        received = one.start(2 * LANES + 2)
        for name, value in one.local.items():
            value[2] = received[name][0]  # equal models
        one.local["fc2.weight"][4, 0, 0] = float("nan")
        one.task.x[torch.as_tensor(one.task.parts["train"][1])] = float("inf")
    [first, later] = compare(*learnings, 1e-10, rounds=(2, 3))
    assert first.epochs.tolist() == [3, 0, 0, 3, 0, 3, 3, 0]
    assert first.faults.tolist() == [0, 2, 0, 0, 1, 0, 0, 0]
    assert first.losses[[2, 4]].isnan().all()
    assert later.epochs.tolist() == [1, 0, 3, 1, 0, 1, 1, 0]
    for value in learnings[0].state["weights"].values():
        assert (value[[1, 4]] == 1).all()


@pytest.mark.parametrize("settings", [{}, {"min_epochs": 2}], ids=["one epoch", "two epochs"])
def test_the_host_reads_losses_only_if_they_decide_something(settings, monkeypatch):
    """It waits to hear who learns after the first epoch's steps. One lane never learns."""
    learning, reads = learn(*TWO_LAYERS, max_epochs=2, **settings), []

    def make_equal(round):
        for name, value in learning.start(LANES * round + 2).items():
            learning.local[name][2] = value[0]

    make_equal(2)
    learning.do_round(2)
    make_equal(3)
    for name in ("tolist", "item", "__bool__", "__float__", "__int__", "__index__"):
        original = getattr(Tensor, name)

        def read(self, *arguments, original=original):
            reads.append(self)
            return original(self, *arguments)

        monkeypatch.setattr(Tensor, name, read)
    log = learning.task.backend.log
    log.clear()
    learning.do_round(3)
    epoch = [*["replay"] * (int(0.8 * max(SIZES)) // 4), "wait"]
    assert log[: len(epoch)] == epoch
    assert log.count("wait") == (2 if settings else 1)
    assert len(reads) == (2 if settings else 0)


def test_rounds_replay_the_same_steps_and_keep_no_features():
    learning = learn(*TWO_LAYERS, max_epochs=1, sample=1.0)
    learning.do_round(2)
    [steps] = learning.task.backend._captured.values()
    graphs = dict(steps.graphs)
    full = {sum(n >= 4 * (i + 1) for n in SIZES) for i in range(max(SIZES) // 4)}
    assert sorted((first, end) for first, end, _ in graphs) == [(0, n) for n in sorted(full)]
    for round in (3, 4):
        learning.do_round(round)
    assert learning.task.backend._captured == {next(iter(learning.task.backend._captured)): steps}
    assert steps.graphs == graphs
    assert [leaf.shape[:2] for _, leaf in leaves(steps.batch)] == [(LANES - 1, 4)] * 2


def test_a_loss_without_the_governed_parameters_is_refused():
    class Detached(Net):
        def forward(self, x):
            return super().forward(x).detach()

    learning = learn(Detached, ("out",))
    with pytest.raises(UserError, match=r"does not depend on the parameters that should learn"):
        learning.do_round(2)


def test_ala_in_another_training_loop_captures_nothing(monkeypatch):
    """Its task lasts for one round, and its loss may read numbers."""
    made = []

    def make_backend(device):
        made.append(TapedGpu(device))
        return made[-1]

    def loss(output, target):
        seen.append(target.tolist())
        return F.cross_entropy(output, target)

    def fail(*arguments):
        raise AssertionError("a step was captured")

    monkeypatch.setattr(lanes_task, "backend_for", make_backend)
    monkeypatch.setattr(TapedGpu, "capture_steps", fail)
    local, received = (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)) for _ in range(2))
    ala, data, seen = ALA(2, max_epochs=2), (torch.randn(25, 4), torch.arange(25) % 3), []
    assert ala.initialize(local, received, data, loss=loss).epochs == 2
    assert len(seen) == 4
    assert ala.initialize(local, local, data, loss=loss).skipped
    assert len(seen) == 4
    assert len(made) == 2
