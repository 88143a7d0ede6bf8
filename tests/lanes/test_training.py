"""Learning rates as tensors: one for each lane, another in every round, and one captured step."""

import numpy as np
import pytest
import torch
from small import assert_close, ragged_task, start_of
from torch import nn

from fedala.cuda import backend as cuda_backend
from fedala.lanes import Cohort, Recipe, UpdateRule, optimizers
from fedala.lanes.late_gradients import LateGradient
from fedala.lanes.layers import call
from fedala.lanes.optimizers import pull
from fedala.lanes.row_gradients import RowGradient
from fedala.lanes.training import EagerRunner, FitStep
from fedala.lanes.trees import join, take

#: Full batches of four, shorter ones, two clients of one size, none.
SIZES = [22, 17, 13, 13, 8, 5, 3, 0]
LANES = len(SIZES)


def stack_models(task, first=0):
    start = start_of(task)
    return join([start(first + lane) for lane in range(LANES)])


def schedule(lane, round):
    """Return a rate that differs between all lanes and all rounds."""
    return 0.3 / (round + lane)


@pytest.mark.parametrize(
    "options",
    [{}, {"epochs": 3}, {"names": ("out.weight", "out.bias")}, {"batch_size": 2}],
    ids=["plain", "three epochs", "head only", "other batches"],
)
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_rates_by_lane_are_each_lanes_own_rate(options, mu):
    task = ragged_task(SIZES)
    anchor, together = stack_models(task, 50), stack_models(task)
    alone = [take(together, slice(lane, lane + 1)) for lane in range(LANES)]
    for round in (1, 2, 3):
        rates = torch.tensor([schedule(lane, round) for lane in range(LANES)], dtype=task.dtype)
        cohort = Cohort(task, range(LANES), [7] * LANES, round=round)
        proximal = (mu, anchor) if mu else None
        together = cohort.fit(together, lr=rates, proximal=proximal, **options)
        for lane in range(LANES):
            own = Cohort(task, [lane], [7], round=round)
            if mu:
                proximal = (mu, take(anchor, slice(lane, lane + 1)))
            alone[lane] = own.fit(
                alone[lane], lr=schedule(lane, round), proximal=proximal, **options
            )
            assert_close(take(together, slice(lane, lane + 1)), alone[lane], 1e-10)
    moved = (together["out.weight"] - stack_models(task)["out.weight"]).abs().amax((1, 2))
    assert (moved[:-1] > 1e-3).all()
    assert moved[-1] == 0


def test_a_rate_for_all_lanes_is_the_tasks_rate_to_the_bit():
    task = ragged_task(SIZES, lr=0.05)
    cohort, params = Cohort(task, range(LANES), [7] * LANES), stack_models(task)
    expected = cohort.fit(params)
    rates = torch.full((LANES,), 0.05, dtype=task.dtype)
    for lr in (0.05, cohort.lr, rates):
        assert_close(cohort.fit(params, lr=lr), expected, 0)


# --- captured steps ------------------------------------------------------------------------------


class FakeCapturedSteps:
    """Stands for the graphs of one kind of training."""

    made: list["FakeCapturedSteps"]

    def __init__(self, task, size, lanes, state, fixed):
        self.task, self.lanes = task, lanes
        self.made.append(self)


class FakeCapturedRunner(EagerRunner):
    """Takes the steps of a captured training as plain PyTorch."""

    def __init__(self, captured, state, fixed, lanes, read_batch):
        super().__init__(captured.task, state, fixed, lanes, read_batch=read_batch)


@pytest.fixture
def captured(monkeypatch):
    """Yield a task with the backend of a GPU, and the list of what that backend has captured."""
    monkeypatch.setattr(FakeCapturedSteps, "made", [], raising=False)
    monkeypatch.setattr(cuda_backend, "CapturedSteps", FakeCapturedSteps)
    monkeypatch.setattr(cuda_backend, "CapturedRunner", FakeCapturedRunner)
    task = ragged_task(SIZES)
    task.backend = object.__new__(cuda_backend.CudaBackend)
    task.backend._captured = {}
    task.backend.device = -1  # torch.cuda.device(-1) changes nothing, and needs no GPU
    return task, FakeCapturedSteps.made


def train(task, round=1, lanes=LANES, **options):
    cohort = Cohort(task, range(lanes), [7] * lanes, round=round)
    params = take(stack_models(task), slice(0, lanes))
    plain = ragged_task(SIZES)
    plain.recipe = task.recipe
    trained = cohort.fit(params, **options)
    expected = Cohort(plain, range(lanes), [7] * lanes, round=round).fit(params, **options)
    assert_close(trained, expected, 0)


def test_a_capture_does_not_depend_on_the_value_of_the_rate(captured):
    task, made = captured
    for round, lr in enumerate((0.1, 0.05, 0.2), 1):
        train(task, round, lr=lr)
        task.recipe = Recipe(lr / 2)
        train(task, round)
        train(task, round, lr=torch.full((1,), lr, dtype=task.dtype).expand(LANES))
    assert len(made) == 1
    # A rate for each lane is other memory, and one further capture for all its values.
    for round in (1, 2, 3):
        rates = [schedule(lane, round) for lane in range(LANES)]
        train(task, round, lr=torch.tensor(rates, dtype=task.dtype))
    assert len(made) == 2


def test_a_capture_serves_fewer_lanes_and_is_made_again_for_more(captured):
    task, made = captured
    for lanes, expected in ((3, [3]), (2, [3]), (5, [3, 5]), (4, [3, 5]), (LANES, [3, 5, LANES])):
        train(task, lanes=lanes, lr=0.1 / lanes)
        assert [steps.lanes for steps in made] == expected
    assert len(task.backend._captured) == 1


def test_another_kind_of_training_is_another_capture(captured):
    task, made = captured
    anchor = stack_models(task, 50)
    kinds = [
        {},
        {"batch_size": 2},
        {"names": ("out.weight", "out.bias")},
        {"proximal": (0.5, anchor)},
        {"proximal": (0.25, anchor)},
    ]
    for number, options in enumerate(kinds, 1):
        for lr in (0.1, 0.2):
            train(task, lr=lr, **options)
        assert len(made) == number


def stay_near(task, model, fixed, x, y):
    """Return loss + μ/2·‖w − anchor‖² of one lane."""
    loss = task.loss(task.loss.select(call(task.model, model, x)), y)
    apart = [(model[name] - fixed["anchor"][name]).square().sum() for name in task.trainable]
    return loss + fixed["mu"] / 2 * sum(apart)


@pytest.mark.parametrize("lanes", [1, 3])
def test_an_objective_replaces_the_loss(lanes):
    """The proximal term as an objective of one lane, with another μ in every lane."""
    task = ragged_task([8, 7, 5])
    cohort = Cohort(task, range(lanes), [0] * lanes)
    params, anchor = (join([start_of(task)(first + n) for n in range(lanes)]) for first in (0, 5))
    mu = torch.tensor([2.0, 0.5, 0.25], dtype=torch.float64)[:lanes]
    found = cohort.fit(params, objective=stay_near, fixed={"anchor": anchor, "mu": mu})
    assert_close(found, cohort.fit(params, proximal=(mu, anchor)), 1e-14)


def test_equal_steps_are_one_key():
    plain, momentum = UpdateRule(), UpdateRule(has_momentum=True)
    steps = [FitStep(plain, ("a",)), FitStep(UpdateRule(), ("a",)), FitStep(momentum, ("a",))]
    assert len(set(steps)) == 2


def test_nothing_is_fused_if_all_gradients_are_rows(monkeypatch):
    """FedRep on an embedding and a head does that: the body's gradients are all rows."""

    def refuse_nothing(targets, gradients, lr):
        assert targets

    monkeypatch.setattr(optimizers, "descend_fused", refuse_nothing)
    table = torch.zeros(2, 5, 3)
    rows = RowGradient(("table",), torch.tensor([[1, 2], [3, 4]]), torch.ones(2, 2, 3), table.shape)
    optimizers.descend({"table": table}, {"table": rows}, torch.full((1,), 0.5).expand(2))
    assert table.sum() == -0.5 * 2 * 2 * 3


def test_rows_may_be_one_array():
    """Lanes of equal length as a matrix give what a list of its lines gives."""
    task = ragged_task([8, 8])
    params = join([start_of(task)(0)] * 2)
    rows = [task.parts["train"][lane][:6] for lane in range(2)]
    listed = Cohort(task, [0, 1], [0, 0]).fit(params, rows=rows)
    assert_close(Cohort(task, [0, 1], [0, 0]).fit(params, rows=np.stack(rows)), listed, 0)


class Late(LateGradient):
    """The gradient of two parameters: one for the first, two for the second."""

    names = ("weight", "bias")

    def densify(self):
        return [torch.ones(2, 3), torch.full((2, 4), 2.0)]

    def add_to(self, targets, factors):
        for target, gradient in zip(targets, self.densify(), strict=True):
            target.add_(gradient * factors[:, None])


@pytest.mark.parametrize("given", ["both", "one", "other one replaced"])
def test_a_late_gradient_adds_to_those_parameters_only_that_have_it(given):
    """A weight that is used elsewhere, too, has a gradient of its own, which includes the late."""
    params = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2, 4)}
    late = Late()
    gradients = {"weight": late, "bias": late}
    if given == "one":
        del gradients["bias"]
    elif given == "other one replaced":
        gradients["weight"] = torch.full((2, 3), 5.0)
    optimizers.descend(params, gradients, torch.tensor([0.5, 1.0]))
    slope = 5 if given == "other one replaced" else 1
    assert params["weight"][:, 0].tolist() == [-0.5 * slope, -1.0 * slope]
    assert params["bias"][:, 0].tolist() == ([0, 0] if given == "one" else [-1, -2])


class Shared(nn.Module):
    """Two parameters that are added to each other, and one that is summed up."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.zeros(2, 3))
        self.c = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x[:, 0, :2, 0] @ (self.a + self.b) + self.c.sum()


@pytest.mark.parametrize("lanes", [1, 2])
def test_gradients_that_torch_shares_are_changed_apart(lanes):
    """A proximal term is added in place: twice to one and the same tensor would be wrong."""
    task = ragged_task([8, 8], model=Shared())
    start = start_of(task, Shared)(0)
    params = join([start] * lanes)
    anchor = {name: value - 1 for name, value in params.items()}
    rows = torch.tensor([[0, 1], [2, 3]])[:lanes]
    x, y = task.inputs(rows), task.targets(rows)
    _, plain = task.gradients(params, x, y)
    _, pulled = task.gradients(params, x, y)
    pull(params, pulled, anchor, 2.0)
    for name in ("a", "b", "c"):
        assert torch.allclose(pulled[name], plain[name] + 2.0, rtol=0, atol=1e-12), name
