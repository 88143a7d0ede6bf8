"""W of a large table of words changes in the rows that a batch reads, as if it were taken whole."""

import pytest
import torch
from ala_rounds import LANES, WORD_MODELS, WORD_ROWS, WordLearning, compare
from tape import TapedGpu, use_tapes

from fedala.lanes import row_gradients, weight_steps


@pytest.fixture
def taken_rows(monkeypatch):
    """Return the rows that W was learned in, step by step."""
    taken, descend = [], weight_steps._descend_rows

    def watch(gradient, table, weights, *others):
        taken.append(gradient.find_rows(weights).tolist())
        descend(gradient, table, weights, *others)

    monkeypatch.setattr(weight_steps, "_descend_rows", watch)
    return taken


def learn(monkeypatch, kind, by_rows, captures=False, **options):
    use_tapes(monkeypatch)
    learning = WordLearning(monkeypatch, kind, by_rows, **options)
    if captures:
        learning.task.backend = TapedGpu(learning.task.device)
    return learning


@pytest.mark.parametrize(
    ("kind", "captures"),
    [
        *((kind, False) for kind in WORD_MODELS),
        ("words one by one", True),  # means have shapes that depend on the batch, but for a GPU's
        ("two look-ups", True),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [{"eta": 300.0}, {"eta": torch.linspace(1, 500, LANES, dtype=torch.float64)}],
    ids=["one rate", "a rate for each lane"],
)
def test_rows_are_learned_as_the_whole_table(monkeypatch, taken_rows, kind, settings, captures):
    options = {"max_epochs": 5, **settings}
    whole = learn(monkeypatch, kind, by_rows=False, **options)
    rows = learn(monkeypatch, kind, True, captures, **options)
    compare(rows, whole, 1e-12)
    weights = rows.state["weights"]["embedding.weight"]
    assert (weights == 0).any()
    assert ((weights > 0) & (weights < 1)).any()
    is_sparse = kind != "a table with another use"
    assert bool(taken_rows) == is_sparse
    assert bool((weights[:, WORD_ROWS // 2 :] == 1).all()) == is_sparse  # no text has these words


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_step_by_hand(lanes):
    """ŵ = w + (g − w)·W; word 2 comes twice, so its gradients, 3 and 4, are added and clipped once.

    W: 1 − 0.1·(3 + 4)·0.5 = 0.65 for word 2, 1 − 0.1·20·(−0.5) = 2 → 1 for word 0. Clipped after
    each word, −40 and 47 would give 0 and not 0.65.
    """
    local = torch.zeros(lanes, 4, 1)
    update = torch.tensor([-0.5, 1, 0.5, 1]).view(1, 4, 1).repeat(lanes, 1, 1)
    for values in ([3.0, 20.0, 4.0], [-40.0, 20.0, 47.0]):
        gradient = row_gradients.RowGradient(
            ("table",),
            torch.tensor([[2, 0, 2]]).repeat(lanes, 1),
            torch.tensor(values).view(1, 3, 1).repeat(lanes, 1, 1),
            torch.Size([lanes, 4, 1]),
        )
        state = weight_steps.begin_learning(
            {"table": torch.ones_like(local)}, {"table": local}, {"table": update}, ["table"]
        )
        table, weights = state["tables"]["table"], state["weights"]["table"]
        weight_steps._descend_rows(gradient, table, weights, local, update, 0.1)
        expected = torch.tensor([1, 1, 0.65, 1])
        for lane in range(lanes):
            torch.testing.assert_close(weights[lane, :, 0], expected)
            torch.testing.assert_close(table["blend"][lane, :, 0], update[lane, :, 0] * expected)
        assert (table["gradient"] == 0).all()
