"""Optimisers and schedules in lanes against torch.optim on a plain module."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import EACH_KIND, Net, assert_close, evaluate, ragged_task, simulate, start_of
from torch import nn

from fedala.errors import UserError
from fedala.lanes import Cohort, Optimizer, Schedule
from fedala.lanes.parameters import model_state
from fedala.lanes.samples import TrainingLength
from fedala.lanes.trees import join, take
from fedala.methods import make
from fedala.simulation import Simulation

SIZES = [40, 23, 23, 9, 3]
OPTIMIZERS = {
    "sgd": Optimizer(),
    "decay": Optimizer(weight_decay=0.1),
    "momentum": Optimizer(momentum=0.9),
    "nesterov": Optimizer(momentum=0.8, nesterov=True, weight_decay=0.05),
    "clip": Optimizer(clip=0.3),
    "clip-momentum": Optimizer(momentum=0.9, clip=0.3),
    "adam": Optimizer("adam", momentum=0.9, weight_decay=0.1),
    "adam-plain": Optimizer("adam", momentum=0.9),
    "adamw": Optimizer("adamw", momentum=0.85, weight_decay=0.1, beta2=0.95),
    "adamw-clip": Optimizer("adamw", momentum=0.9, weight_decay=0.01, clip=0.2),
}


class Smooth(nn.Module):
    """A model without normalisation.

    A bias below a normalisation has no gradient but rounding, which Adam turns into steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.out = nn.Linear(48, 3)

    def forward(self, x):
        return self.out(self.conv(x).tanh().flatten(1))


def make_torch_optimizer(model: nn.Module, own: Optimizer, lr: float) -> torch.optim.Optimizer:
    """Make torch's own optimiser with the same options."""
    if own.kind == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr, own.momentum, 0.0, own.weight_decay, own.nesterov
        )
    kind = torch.optim.Adam if own.kind == "adam" else torch.optim.AdamW
    betas = own.momentum, own.beta2
    return kind(model.parameters(), lr, betas, own.epsilon, own.weight_decay)


def train_plainly(task, client, model, own, order, optimizer=None):
    """Train a module with torch.optim on a client's batches, and return its state."""
    optimizer = optimizer or make_torch_optimizer(model, own, task.recipe.lr)
    model.train()
    for rows in order:
        optimizer.zero_grad()
        F.cross_entropy(model(task.x[rows]), task.y[rows]).backward()
        if own.clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), own.clip)
        optimizer.step()
    return model_state(model)


def list_batches(cohort, lane, epochs):
    """Return a lane's batches of four, in the cohort's order; a shorter one only if it is first."""
    batches = []
    rows = cohort.task.parts["train"][cohort.clients[lane]]
    for epoch in range(epochs):
        shuffled = cohort.shuffle(lane, rows, "batches", epoch)
        full = [shuffled[i : i + 4] for i in range(0, len(rows) - 3, 4)]
        batches += full or [shuffled]
    return batches


def stack_models(task):
    start = start_of(task, type(task.model))
    return join([start(seed) for seed in range(len(SIZES))])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lanes_equal_torch_optim_over_fifty_steps(name):
    """Five epochs: the first client takes fifty steps, the last five."""
    own = OPTIMIZERS[name]
    task = ragged_task(SIZES, model=Smooth(), optimizer=own, epochs=5, lr=0.02)
    params = stack_models(task)
    cohort = Cohort(task, range(len(SIZES)), [7] * len(SIZES))
    trained = cohort.fit(params)
    for lane in range(len(SIZES)):
        model = Smooth().double()
        model.load_state_dict({key: value[lane] for key, value in params.items()})
        batches = list_batches(cohort, lane, 5)
        assert lane or len(batches) == 50
        expected = train_plainly(task, lane, model, own, batches)
        assert_close(take(trained, slice(lane, lane + 1)), expected, 1e-10)


@pytest.mark.parametrize("name", ["nesterov", "adamw-clip"])
def test_one_lane_equals_many(name):
    task = ragged_task(SIZES, model=Smooth(), optimizer=OPTIMIZERS[name], epochs=2)
    params = stack_models(task)
    together = Cohort(task, range(len(SIZES)), [7] * len(SIZES)).fit(params)
    for lane in range(len(SIZES)):
        part = slice(lane, lane + 1)
        alone = Cohort(task, [lane], [7]).fit(take(params, part))
        assert_close(take(together, part), alone, 1e-10)


def test_lanes_with_numbers_of_their_own_equal_each_alone():
    task = ragged_task(SIZES, optimizer=OPTIMIZERS["momentum"], epochs=2)
    own = [
        Optimizer(momentum=0.1 * lane, weight_decay=0.02 * lane, clip=0.5 if lane else math.inf)
        for lane in range(len(SIZES))
    ]
    recipes = [
        replace(task.recipe, lr=0.05 * (lane + 1), optimizer=one) for lane, one in enumerate(own)
    ]
    params = stack_models(task)
    task.rule = type(task.rule).of(own)
    together = Cohort(task, range(len(SIZES)), [7] * len(SIZES), recipes=recipes).fit(params)
    for lane, recipe in enumerate(recipes):
        part = slice(lane, lane + 1)
        alone = ragged_task(SIZES, optimizer=own[lane], lr=recipe.lr, epochs=2)
        expected = Cohort(alone, [lane], [7]).fit(take(params, part))
        assert_close(take(together, part), expected, 1e-10)


SCHEDULES = {
    "constant": (Schedule(), lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
    "step": (
        Schedule("step", decay=0.3, every=4),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.3),
    ),
    "cosine": (Schedule("cosine"), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 12)),
    "exponential": (
        Schedule("exponential", decay=0.9),
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # the scheduler steps without the optimiser
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_torchs(name):
    schedule, make_scheduler = SCHEDULES[name]
    optimizer = torch.optim.SGD(Net().parameters(), 0.4)
    scheduler = make_scheduler(optimizer)
    task = ragged_task([4], schedule=schedule, lr=0.4)
    for round in range(1, 13):
        [rate] = Cohort(task, [0], [0], round=round, rounds=12).lr.tolist()
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        scheduler.step()


def test_a_warm_up_rises_and_the_schedule_starts_after_it():
    schedule = Schedule("cosine", warmup=4)
    factors = [schedule.factor(round, 10) for round in range(1, 11)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:] == [(1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)]


def test_the_last_evaluation_has_the_rate_of_the_last_round_of_a_cosine():
    """Methods that fine-tune for an evaluation do so after the last round, too."""
    schedule = Schedule("cosine", warmup=1)
    assert schedule.factor(6, 5) == schedule.factor(5, 5) > 0


@pytest.mark.parametrize("steps", [1, 3, 7, 25])
def test_local_steps_are_as_many_for_every_client(steps):
    """A client takes its batches in order, and begins another epoch when they are used up."""
    task = ragged_task([*SIZES, 0], local_steps=steps)
    taken: dict[int, list[list[int]]] = {lane: [] for lane in range(len(SIZES) + 1)}
    length, lengths = TrainingLength(1, steps), [*SIZES, 0]
    cohort = Cohort(task, range(6), [7] * 6)
    for epoch in range(length.count_epochs(lengths, 4)):
        rows = [
            cohort.shuffle(lane, task.parts["train"][lane], "batches", epoch) for lane in range(6)
        ]
        for lanes, columns in length.iterate_steps(lengths, 4, epoch):
            for lane in range(lanes.start, lanes.stop):
                taken[lane].append(rows[lane][columns].tolist())
    for lane in range(len(SIZES)):
        expected = [batch.tolist() for batch in list_batches(cohort, lane, 26)[:steps]]
        assert taken[lane] == expected
    assert taken[len(SIZES)] == []
    assert cohort.local_steps() == [steps] * len(SIZES) + [0]


def test_training_by_steps_equals_torch_optim():
    own = OPTIMIZERS["momentum"]
    task = ragged_task(SIZES, optimizer=own, local_steps=13, lr=0.02)
    params = stack_models(task)
    cohort = Cohort(task, range(len(SIZES)), [7] * len(SIZES))
    trained = cohort.fit(params)
    for lane in range(len(SIZES)):
        model = Net().double()
        model.load_state_dict({key: value[lane] for key, value in params.items()})
        batches = list_batches(cohort, lane, 13)[:13]
        expected = train_plainly(task, lane, model, own, batches)
        assert_close(take(trained, slice(lane, lane + 1)), expected, 1e-10)


def test_a_full_batch_is_all_of_a_clients_samples():
    task = ragged_task(SIZES, batch_size=0, epochs=2, shuffle=False)
    params = stack_models(task)
    trained = Cohort(task, range(len(SIZES)), [7] * len(SIZES)).fit(params)
    for lane in range(len(SIZES)):
        model = Net().double()
        model.load_state_dict({key: value[lane] for key, value in params.items()})
        rows = task.parts["train"][lane]
        expected = train_plainly(task, lane, model, Optimizer(), [rows, rows])
        assert_close(take(trained, slice(lane, lane + 1)), expected, 1e-10)


# --- optimisers in methods -----------------------------------------------------------------------

KEPT = Optimizer("adam", momentum=0.9)


def test_a_fresh_optimizer_forgets_and_a_kept_one_remembers():
    """Local training alone, so that three rounds are one long training with torch.optim."""
    for keeps in (False, True):
        task = ragged_task([8], model=Smooth(), optimizer=KEPT, keeps_optimizer=keeps, lr=0.02)
        start = start_of(task, Smooth)
        simulation = Simulation(make("local"), task, start, rounds=3)
        list(simulation.run())
        model = Smooth().double()
        model.load_state_dict({key: value[0] for key, value in start(0).items()})
        optimizer = None
        for round in range(1, 4):
            if optimizer is None or not keeps:
                optimizer = make_torch_optimizer(model, KEPT, 0.02)
            batches = list_batches(Cohort(task, [0], [0], round=round), 0, 1)
            expected = train_plainly(task, 0, model, KEPT, batches, optimizer)
        local = simulation.clients.get((0, 0))["local"]
        assert_close(local, expected, 1e-10)


@pytest.mark.parametrize("method", EACH_KIND)
def test_every_method_takes_every_optimizer_or_refuses_it(method):
    """Momentum that is kept, in one lane after another and in all lanes at once."""
    results = []
    for lanes in (1, None):
        task = ragged_task([9, 5, 4], optimizer=OPTIMIZERS["nesterov"], keeps_optimizer=True)
        if method.startswith(("partialfed", "scaffold")):
            with pytest.raises(UserError, match="cannot train with momentum or Adam"):
                evaluate(method, task, rounds=2, lanes=lanes)
            task = ragged_task([9, 5, 4], optimizer=Optimizer(weight_decay=0.1, clip=0.5))
        simulation, rows, models = simulate(method, task, rounds=2, lanes=lanes)
        results.append((rows, models))
        if task.rule.keeps_slots:
            slots = simulation.clients.get((0, 0))["optimizer"]
            assert all(np.abs(v.numpy()).max() > 0 for s in slots.values() for v in first(s))
    plain = simulate(method, ragged_task([9, 5, 4]), rounds=2)[1]
    assert results[0][0][-1].loss != plain[-1].loss
    for key, model in results[0][1].items():
        assert_close(model, results[1][1][key], 1e-10)


def first(slots):
    """Return the largest tensors of some slots, one for each."""
    return [next(iter(slot.values())) for slot in slots.values() if isinstance(slot, dict)]


@pytest.mark.parametrize("method", ["fedavg", "per-fedavg", "pfedme", "fedphp", "apple"])
def test_adamw_changes_every_kind_of_step(method):
    rows = [
        simulate(method, ragged_task([9, 5], optimizer=own, lr=0.01), rounds=2)[1][-1].loss
        for own in (Optimizer(), Optimizer("adamw", momentum=0.9), Optimizer(clip=1e-3))
    ]
    assert len(set(rows)) == 3
    assert all(math.isfinite(loss) for loss in rows)


def test_options_that_do_not_go_together_are_refused():
    for wrong in (
        lambda: Optimizer(nesterov=True),
        lambda: Optimizer("adam", momentum=0.9, nesterov=True),
        lambda: Optimizer("lion"),
        lambda: Schedule("sawtooth"),
    ):
        with pytest.raises(UserError):
            wrong()


def test_slots_do_not_leak_into_a_methods_state():
    task = ragged_task([8, 4], optimizer=KEPT, keeps_optimizer=True)
    method = make("ditto")
    simulation, _, _ = simulate("ditto", task, rounds=1)
    state = simulation.clients.get((0, 0))
    assert state.keys() == {*method.init_client(task, start_of(task)(0)), "optimizer"}
    assert state["optimizer"].keys() == {"personal", "local"}
    assert copy.copy(state["optimizer"]["local"]["steps"]).tolist() == [2.0]
