"""Weight learning on a plain head: the gradient written out, against autograd's."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from ala.common import normal, twins
from ala_rounds import LANES, Learning, compare, small_cnn
from torch import nn

from fedala import ALA
from fedala.lanes.layers import Layered
from fedala.lanes.losses import IGNORED_LABEL, CrossEntropy
from fedala.lanes.weight_learning import Problem
from fedala.lanes.weight_steps import HeadStep, WeightStep


class ByAutograd(Learning):
    def initialize(self, cohort):
        with patch.object(Problem, "is_plain_head", False):
            return super().initialize(cohort)


@pytest.fixture
def steps(monkeypatch):
    """The kinds of steps that were taken."""
    taken = set()
    for kind in (HeadStep, WeightStep):

        def watch(step, *arguments, before=kind.__call__):
            taken.add(type(step))
            return before(step, *arguments)

        monkeypatch.setattr(kind, "__call__", watch)
    return taken


@pytest.mark.parametrize(
    "settings",
    [
        {"max_epochs": 13, "threshold": 0.02},
        {"eta": torch.linspace(0.5, 3, LANES, dtype=torch.float64), "max_epochs": 3},
        {"is_shared": True, "min_epochs": 2, "max_epochs": 3},
    ],
    ids=["an initial stage", "a rate for each lane", "one message"],
)
def test_the_formula_gives_what_autograd_gives(steps, settings):
    one, other = (kind(small_cnn, ("fc2",), **settings) for kind in (Learning, ByAutograd))
    compare(one, other, 1e-12)
    assert steps == {HeadStep, WeightStep}
    assert (one.state["weights"]["fc2.weight"] < 1).any()


def test_samples_without_a_label_do_not_count():
    """As in torch's cross-entropy. A batch that has no other samples has no loss."""
    both = [kind(small_cnn, ("fc2",), max_epochs=3) for kind in (Learning, ByAutograd)]
    for one in both:
        one.task.y[::3] = IGNORED_LABEL
        one.task.y[torch.as_tensor(one.task.parts["train"][6])] = IGNORED_LABEL
    [outcome] = compare(*both, 1e-12, rounds=(2,))
    assert outcome.faults[6] == 2
    assert 0 in outcome.faults


class OwnLinear(nn.Linear):
    pass


def hooked(name):
    head = nn.Linear(4, 3)
    getattr(head, f"register_{name}")(lambda *_: None)
    return head


class Ending(nn.Module):
    """A model that does something after its last layer."""

    def __init__(self, head, end):
        super().__init__()
        self.body, self.head, self.end = nn.Linear(2, 4), head, end

    def forward(self, x):
        return self.end(self.head(self.body(x).relu()))


@pytest.mark.parametrize(
    ("head", "end", "loss", "kind"),
    [
        (nn.Linear(4, 3), nn.Identity(), F.cross_entropy, HeadStep),
        (nn.Linear(4, 3), nn.Identity(), CrossEntropy(smoothing=0.1), WeightStep),
        (nn.Linear(4, 3), nn.Identity(), CrossEntropy(weights=(1.0, 2.0, 3.0)), WeightStep),
        (nn.Linear(4, 3), nn.Identity(), lambda o, y: F.cross_entropy(2 * o, y), WeightStep),
        (nn.Linear(4, 3, bias=False), nn.Identity(), F.cross_entropy, WeightStep),
        (OwnLinear(4, 3), nn.Identity(), F.cross_entropy, WeightStep),
        (nn.Linear(4, 3), nn.Tanh(), F.cross_entropy, WeightStep),
        (nn.Conv1d(4, 3, 1), nn.Identity(), F.cross_entropy, WeightStep),
        (hooked("forward_hook"), nn.Identity(), F.cross_entropy, WeightStep),
        (hooked("forward_pre_hook"), nn.Identity(), F.cross_entropy, WeightStep),
    ],
)
def test_other_heads_and_losses_learn_by_autograd(steps, head, end, loss, kind):
    if isinstance(head, nn.Conv1d):
        head = nn.Sequential(nn.Unflatten(1, (4, 1)), head, nn.Flatten())
    local, received = twins(lambda: copy.deepcopy(Ending(head, end)))
    report = ALA(max_epochs=2).initialize(
        local, received, (normal(9, 2), torch.arange(9) % 3), loss=loss
    )
    assert report.epochs == 2
    assert steps == {kind}


@pytest.mark.parametrize(("factor", "kind"), [(None, HeadStep), (0.1, WeightStep)])
def test_what_a_layered_model_does_around_its_last_layer_counts(steps, factor, kind):
    class Scaled(Layered):
        layers = (("head",), ("body",))

        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

        def stages(self):
            def scale(x):
                return factor * self.head(x)

            return lambda x: self.body(x).relu(), scale if factor else self.head

    local, received = twins(Scaled)
    ALA(max_epochs=2).initialize(local, received, (normal(9, 2), torch.arange(9) % 3))
    assert steps == {kind}


def test_features_that_are_not_rows_learn_by_autograd(steps):
    """A score for each position: [sample, class, position], from features [sample, position, 4]."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.body(x).relu())

    def loss(output, y):
        return F.cross_entropy(output.mT, y)

    local, received = twins(Tagger)
    y = torch.arange(18).view(9, 2) % 3
    ALA(max_epochs=2).initialize(local, received, (normal(9, 2, 2), y), loss=loss)
    assert steps == {WeightStep}
