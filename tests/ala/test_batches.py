"""Batches that are dicts: ALA finds inputs and targets, and equals ALA on pairs."""

import copy
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from ala.common import FINE, X, Y, assert_same, entries, learn_on, mlp, twins
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fedala import ALA, UserError


def make_rows(**columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def make_arrow(**columns):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict(
        {name: value.tolist() for name, value in columns.items()}
    ).with_format("torch")


SAME_DICTS = {
    "image": lambda: DataLoader(make_rows(img=X, label=Y), batch_size=7, shuffle=True),
    "target-first": lambda: DataLoader(make_rows(labels=Y, anything=X), batch_size=7),
    "fine-label": lambda: DataLoader(make_rows(img=X, fine_label=Y), batch_size=7),
    "label-before-fine-label": lambda: DataLoader(
        make_rows(img=X, fine_label=1 - Y, coarse_label=0 * Y, label=Y)
    ),
    "argument-by-name": lambda: DataLoader(make_rows(input=X, index=Y, label=Y), batch_size=7),
    "user-dict": lambda: DataLoader(
        make_rows(img=X, label=Y), collate_fn=lambda rows: UserDict(default_collate(rows))
    ),
    "arrays": lambda: {"img": X, "label": Y},
    "arrow": lambda: make_arrow(img=X, label=Y),
    "arrow-loader": lambda: DataLoader(make_arrow(img=X, label=Y), batch_size=7, shuffle=True),
}


@pytest.mark.parametrize("kind", SAME_DICTS)
def test_dicts_equal_pairs(kind):
    precision = FINE if "arrow" not in kind else {"rtol": 1e-4, "atol": 1e-5}  # float32 columns
    assert_same(learn_on(SAME_DICTS[kind](), sample=0.6), learn_on((X, Y), sample=0.6), **precision)


def test_split_reads_any_batch():
    loader = DataLoader(make_rows(image=X, number=torch.arange(25), digit=Y), batch_size=7)
    results = []
    for data, split in (
        (loader, lambda batch: (batch["image"], batch["digit"])),
        ((X, Y), None),
    ):
        local, received = twins(mlp)
        ALA(layers=2, max_epochs=2).initialize(local, received, data, split=split)
        results.append(local)
    assert_same(*results, **FINE)


def test_a_split_may_give_the_targets_to_the_model():
    """As for a language model whose batches have no labels."""
    pair = {"values": X, "mask": MASK}, Y + 1
    rows = make_rows(values=X, mask=MASK, number=Y + 1)
    local, received = twins(WithLoss)
    ALA(max_epochs=2).initialize(
        local,
        received,
        DataLoader(rows),
        split=lambda b: (
            {"values": b["values"], "mask": b["mask"], "labels": b["number"]},
            b["number"],
        ),
    )
    loss = lambda output, y: F.cross_entropy(output["logits"], y - 1)  # noqa: E731
    assert_same(local, learn_with_loss(pair, loss), **FINE)


class WithLoss(nn.Module):
    """Computes its own loss, as a model of transformers does: here the labels count from 1."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, values, mask=None, labels=None):
        hidden = self.body(values).tanh()
        logits = self.head(hidden if mask is None else hidden * mask)
        loss = None if labels is None else F.cross_entropy(logits, labels - 1)
        return {"loss": loss, "logits": logits}


MASK = (torch.arange(25 * 5).reshape(25, 5) % 3 > 0).double()


def learn_with_loss(data, loss=None):
    local, received = twins(WithLoss)
    ALA(max_epochs=2).initialize(local, received, data, loss)
    return entries(local)


def test_a_model_that_takes_the_targets_computes_its_own_loss():
    rows = make_rows(values=X, mask=MASK, index=Y, labels=Y + 1)
    own = learn_with_loss(DataLoader(rows, batch_size=7))
    by_hand = learn_with_loss(
        ({"values": X, "mask": MASK}, Y + 1),
        lambda output, y: F.cross_entropy(output["logits"], y - 1),
    )
    assert_same(own, by_hand, **FINE)


def test_a_loss_that_is_given_replaces_that_of_the_model():
    rows = make_rows(values=X, mask=MASK, labels=Y + 1)
    given = learn_with_loss(rows_loader := DataLoader(rows), lambda out, y: out["logits"].sum() + 0)
    pair = learn_with_loss(({"values": X, "mask": MASK}, Y), lambda out, y: out["logits"].sum() + 0)
    assert_same(given, pair, **FINE)
    assert not torch.equal(given["head.weight"], learn_with_loss(rows_loader)["head.weight"])


def test_a_model_that_takes_targets_but_returns_no_loss_is_refused():
    class Silent(WithLoss):
        def forward(self, values, labels=None):
            return super().forward(values)["logits"]

    with pytest.raises(UserError, match="no loss: give ALA a loss"):
        ALA().initialize(*twins(Silent), DataLoader(make_rows(values=X, labels=Y)))


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (make_rows(img=X, kind=Y), r"has none: it has img, kind\. .*split=lambda"),
        (make_rows(img=X, a_label=Y, b_label=Y), "several: a_label, b_label"),
        (make_rows(a=X, b=X, label=Y), r"has a, b, and the model's forward takes input"),
    ],
    ids=["no-target", "two-targets", "two-inputs"],
)
def test_a_dict_that_is_not_clear_is_refused(rows, sentence):
    with pytest.raises(UserError, match=sentence):
        ALA().initialize(*twins(mlp), DataLoader(rows))


# --- a part of the model --------------------------------------------------------------------------

BODY = ("0.weight", "0.bias", "2.weight", "2.bias")


def make_body_pair():
    """Return two models that differ in the body only."""
    local, received = twins(mlp)
    received[4].load_state_dict(local[4].state_dict())
    return local, received


def test_a_batch_of_three_tensors_asks_which_are_the_targets():
    local, received = twins(mlp)
    loader = DataLoader(TensorDataset(X, X, Y), batch_size=7)
    says = r"has 3 tensors: .*split=lambda batch: \(\(batch\[0\], batch\[1\]\), batch\[2\]\)"
    with pytest.raises(UserError, match=says):
        ALA().initialize(local, received, loader)


def test_the_upper_layers_of_the_shared_part_are_blended():
    local, received = make_body_pair()
    expected = copy.deepcopy(local)
    ala, by_name = ALA(max_epochs=2), ALA(layers=[r"2\."], max_epochs=2)
    report = ala.initialize(local, received, (X, Y), shared=BODY)
    by_name.initialize(expected, received, (X, Y))
    assert tuple(ala.weights) == ("2.weight", "2.bias")
    assert report.weight_mean < 1
    assert_same(local, expected, **FINE)


@pytest.mark.parametrize(
    ("layers", "shared", "sentence"),
    [
        (3, BODY, "between 0 and 2, the number of layers that learn and are shared, not 3"),
        (["4"], BODY, r"takes 4\.weight, 4\.bias, which is not: choose among 0\.weight"),
        (1, (), "between 0 and 0"),
    ],
    ids=["too-many", "pattern", "nothing"],
)
def test_layers_that_are_not_shared_are_refused(layers, shared, sentence):
    with pytest.raises(UserError, match=sentence):
        ALA(layers=layers).initialize(*make_body_pair(), (X, Y), shared=shared)


def test_a_shared_layer_that_does_not_learn_does_not_count():
    local, received = make_body_pair()
    for model in (local, received):
        model[2].requires_grad_(False)
    ala = ALA(max_epochs=1)
    ala.initialize(local, received, (X, Y), shared=BODY)
    assert tuple(ala.weights) == ("0.weight", "0.bias")
