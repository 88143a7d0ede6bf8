"""FedAvg and FedALA against a plain federated loop.

The loop has whole modules, `torch.optim.SGD`, one client after another, and the paper's ALA. It
knows nothing of lanes, stacked parameters or cached features. It shares only
`fedala.lanes.randomness.draw` with the package, so that both see the same batches, ALA samples and
participants. `Simulation` must give the same results with any number of lanes.
"""

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import PaperALA
from torch import Tensor, nn

from fedala.lanes.parameters import model_state
from fedala.lanes.randomness import draw
from fedala.lanes.task import Task
from fedala.methods import make
from fedala.models import cnn
from fedala.records import PersonalModel
from fedala.simulation import Simulation

BATCH, LR, ROUNDS, SEED = 5, 0.05, 3, 3
ETA, SHARE, CAP, THRESHOLD = 2.0, 0.6, 14, 0.01
SIZES = (13, 0, 3, 22, 5, 1, 10, 9)
"""Training samples: none, less than a batch, one or two whole batches, several and a remainder."""
TESTS = (4, 2, 0, 7, 3, 5, 1, 6)


class Small(nn.Module):
    """A foreign model with all that is difficult in lanes.

    It has running statistics, dropout, and a log-softmax at the end. Dropout has p = 0, so that
    training is the same on both sides. The BatchNorm shows an evaluation in training mode.
    """

    def __init__(self, affine: bool = True, frozen: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = (
            nn.Conv2d(1, 4, 3).requires_grad_(not frozen),
            nn.BatchNorm2d(4, momentum=0.3, affine=affine),
        )
        self.hidden, self.drop, self.out = nn.Linear(36, 8), nn.Dropout(0.0), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(1)
        return self.out(self.drop(self.hidden(x).relu())).log_softmax(1)


UPPER = ("out.weight", "out.bias", "hidden.weight", "hidden.bias")
MODELS = {
    "small": (Small, (1, 8, 8), UPPER),
    "cnn": (
        lambda: cnn((1, 16, 16), 4),
        (1, 16, 16),
        ("fc2.weight", "fc2.bias", "fc1.weight", "fc1.bias"),
    ),
    "buffers without parameters": (lambda: Small(affine=False), (1, 8, 8), UPPER),
    "frozen": (lambda: Small(frozen=True), (1, 8, 8), UPPER),
}
"""How it is built, its images, and the names of its upper two layers, output first."""


@dataclass(frozen=True)
class Case:
    method: str
    model: str
    shuffle: bool
    join_ratio: float
    layers: int = 1
    seed: int = SEED
    epochs: int = 1
    dtype: torch.dtype = torch.float64


@functools.cache
def images(
    shape: tuple[int, int, int],
) -> tuple[Tensor, Tensor, list[np.ndarray], list[np.ndarray]]:
    """Return byte images whose class shows, their labels, and each client's rows.

    Clients hold few of the classes.
    """
    random = np.random.default_rng(0)
    owner = np.repeat(np.arange(len(SIZES)), np.add(SIZES, TESTS))
    y = (owner + random.integers(2, size=len(owner))) % 4
    x = random.integers(0, 120, size=(len(y), *shape)) + 40 * y[:, None, None, None] * (
        np.indices(shape).sum(0) % 3 == 1
    )
    shuffled = [random.permutation(np.flatnonzero(owner == client)) for client in range(len(SIZES))]
    train = [rows[:size] for rows, size in zip(shuffled, SIZES, strict=True)]
    test = [rows[size:] for rows, size in zip(shuffled, SIZES, strict=True)]
    return torch.from_numpy(x).to(torch.uint8), torch.from_numpy(y), train, test


def first_model(case: Case) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        return MODELS[case.model][0]().to(case.dtype)


# --- the plain loop -------------------------------------------------------------------------------


@dataclass
class Client:
    model: nn.Module
    ala: PaperALA


@dataclass
class Outcome:
    server: dict[str, Tensor]
    personal: dict[int, dict[str, Tensor]]
    history: list[tuple[float, float, float]]
    """Each evaluation: accuracy over all clients and over the participants, loss over all."""
    ala_epochs: list[float]
    """Each evaluation: mean over the participants."""
    absent: set[int] = field(default_factory=set)
    """Clients that never took part."""


class PlainLoop:
    def __init__(self, case: Case) -> None:
        self.case = case
        x, self.y, self.train_rows, self.test_rows = images(MODELS[case.model][1])
        self.x = (x.to(case.dtype) / 255 - 0.5) / 0.5
        self.server = first_model(case)
        self.clients = {
            i: Client(copy.deepcopy(self.server), self.make_ala(i)) for i in range(len(SIZES))
        }

    def make_ala(self, i: int) -> PaperALA:
        options = {"eta": ETA, "share": SHARE, "max_epochs": CAP, "threshold": THRESHOLD}
        options |= {"client": i, "seed": self.case.seed, "batch_size": BATCH}
        names = MODELS[self.case.model][2][: 2 * self.case.layers]
        return PaperALA(self.x, self.y, self.train_rows[i], names, **options)

    def run(self) -> Outcome:
        history, ala_epochs, personal, absent = [], [], {}, set(range(len(SIZES)))
        for round in range(1, ROUNDS + 2):
            joined = self.draw_participants(round)
            absent -= set(joined)
            trained, epochs, scores = {}, [], {}
            for i in range(len(SIZES)):
                if i not in joined:
                    scores[i] = self.evaluate(
                        self.server if self.case.method == "fedavg" else self.clients[i].model, i
                    )
                    personal[i] = copy.deepcopy(self.clients[i].model)
                    continue
                start, learned = self.initialise(i, round)
                epochs.append(learned)
                scores[i] = self.evaluate(start, i)
                personal[i] = copy.deepcopy(start)
                if round <= ROUNDS:
                    trained[i] = self.clients[i].model = self.fit(start, i, round)
            correct, loss, count = np.sum(list(scores.values()), axis=0)
            correct_, _, count_ = np.sum([scores[i] for i in joined], axis=0)
            history.append((correct / count, correct_ / count_, loss / count))
            ala_epochs.append(float(np.mean(epochs)))
            if round <= ROUNDS:
                self.aggregate(trained)
        states = {i: dict(model.state_dict()) for i, model in personal.items()}
        return Outcome(dict(self.server.state_dict()), states, history, ala_epochs, absent)

    def draw_participants(self, round: int) -> list[int]:
        if self.case.join_ratio == 1:
            return list(range(len(SIZES)))
        size = max(1, round_half_up(self.case.join_ratio * len(SIZES)))
        return (
            draw(self.case.seed, "participants", round=round)
            .choice(len(SIZES), size, replace=False)
            .tolist()
        )

    def initialise(self, i: int, round: int) -> tuple[nn.Module, int]:
        """Return the model that the client trains from, and how many epochs ALA took for it."""
        client = self.clients[i]
        if self.case.method == "fedavg":
            return copy.deepcopy(self.server), 0
        start = client.ala(self.server, client.model, self.server, round=round)
        return start, client.ala.epochs

    def fit(self, start: nn.Module, i: int, round: int) -> nn.Module:
        model = copy.deepcopy(start).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for epoch in range(self.case.epochs):
            rows = self.train_rows[i]
            if self.case.shuffle:
                rows = rows[
                    draw(self.case.seed, "batches", client=i, round=round, epoch=epoch).permutation(
                        len(rows)
                    )
                ]
            for first in range(0, len(rows), BATCH):
                batch = rows[first : first + BATCH]
                if len(batch) < BATCH <= len(rows):
                    continue
                optimizer.zero_grad()
                F.cross_entropy(model(self.x[batch]), self.y[batch]).backward()
                optimizer.step()
        return model

    def evaluate(self, model: nn.Module, i: int) -> tuple[float, float, int]:
        rows = self.test_rows[i]
        if not len(rows):
            return 0, 0, 0
        with torch.no_grad():
            output = copy.deepcopy(model).eval()(self.x[rows])
        loss = F.cross_entropy(output, self.y[rows], reduction="sum")
        return (output.argmax(1) == self.y[rows]).sum().item(), loss.item(), len(rows)

    def aggregate(self, trained: dict[int, nn.Module]) -> None:
        total = sum(SIZES[i] for i in trained)
        states = {i: model.state_dict() for i, model in trained.items()}
        average = self.server.state_dict()
        for name, value in average.items():
            if value.is_floating_point():
                average[name] = sum(state[name] * (SIZES[i] / total) for i, state in states.items())
        self.server.load_state_dict(average)


def round_half_up(value: float) -> int:
    return int(value + 0.5)


@functools.cache
def expected(case: Case) -> Outcome:
    return PlainLoop(case).run()


# --- the package ----------------------------------------------------------------------------------


def task(case: Case) -> Task:
    build, shape, _ = MODELS[case.model]
    x, y, train, test = images(shape)
    with torch.device("meta"):
        skeleton = build()
    options = {"batch_size": BATCH, "lr": LR, "epochs": case.epochs, "shuffle": case.shuffle}
    options["precision"] = str(case.dtype).removeprefix("torch.")
    return Task(skeleton, x, y, train, test, **options)


def simulate(*cases: Case, lanes: int | None) -> list[Outcome]:
    """Return the package's outcomes for cases that differ in their seed only."""
    case = cases[0]
    ala = {
        "eta": ETA,
        "sample": SHARE,
        "max_epochs": CAP,
        "threshold": THRESHOLD,
        "layers": case.layers,
    }
    settings = (
        {f"fedala.{name}": value for name, value in ala.items()} if case.method == "fedala" else {}
    )
    by_seed = {case.seed: case for case in cases}
    models: dict[tuple[int, int | None], dict[str, Tensor]] = {}

    def keep(personal: PersonalModel) -> None:
        models[personal.seed, personal.client] = {
            name: value[0].clone() for name, value in personal.model.items()
        }

    simulation = Simulation(
        make(case.method, settings),
        task(case),
        lambda seed: model_state(first_model(by_seed[seed])),
        seeds=list(by_seed),
        rounds=ROUNDS,
        join_ratio=case.join_ratio,
        lanes=lanes,
    )
    rows = [evaluation.row for evaluation in simulation.run(keep)]
    outcomes = []
    for seed in by_seed:
        own = [row for row in rows if row.seed == seed]
        history = [(row.accuracy, row.accuracy_joined, row.loss) for row in own]
        personal = {
            client: model
            for (s, client), model in models.items()
            if s == seed and client is not None
        }
        epochs = [row.metrics.get("ala_epochs", 0.0) for row in own]
        outcomes.append(Outcome(models[seed, None], personal, history, epochs))
    return outcomes


def assert_models_agree(
    found: dict[str, Tensor], wanted: dict[str, Tensor], who: Any, tolerance: float
) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        if value.is_floating_point():  # counters of batches are not averaged, and mean nothing
            torch.testing.assert_close(
                found[name],
                value,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name: f"{who}, {n}: {m}",
            )


def assert_agree(found: Outcome, wanted: Outcome, case: Case) -> None:
    tolerance = 1e-10 if case.dtype is torch.float64 else 2e-4
    assert found.ala_epochs == wanted.ala_epochs
    np.testing.assert_allclose(found.history, wanted.history, rtol=tolerance)
    assert_models_agree(found.server, wanted.server, "the global model", tolerance)
    if case.method == "fedala":
        assert set(found.personal) | wanted.absent == set(wanted.personal)
        for client, model in found.personal.items():
            assert_models_agree(model, wanted.personal[client], f"client {client}", tolerance)


CASES = {
    f"{method}-{model}-{'shuffled' if shuffle else 'in order'}-{ratio}": Case(
        method, model, shuffle, ratio, layers
    )
    for method in ("fedavg", "fedala")
    for model, layers in (("small", 1), ("cnn", 2))
    for shuffle in (True, False)
    for ratio in (1.0, 0.5)
}


@pytest.mark.parametrize("lanes", [1, 3, None], ids=["one lane", "three lanes", "all lanes"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_simulation_is_the_plain_loop(case, lanes):
    [found] = simulate(case, lanes=lanes)
    assert_agree(found, expected(case), case)


@pytest.mark.parametrize("lanes", [1, None], ids=["one lane", "all lanes"])
@pytest.mark.parametrize("model", ["small", "cnn"])
def test_in_single_precision_it_is_the_plain_loop_up_to_rounding(model, lanes):
    case = Case("fedala", model, shuffle=True, join_ratio=1.0, dtype=torch.float32)
    [found] = simulate(case, lanes=lanes)
    assert_agree(found, expected(case), case)


@pytest.mark.parametrize("lanes", [1, None], ids=["one lane", "all lanes"])
@pytest.mark.parametrize("model", ["buffers without parameters", "frozen"])
def test_a_model_of_the_users_own_is_trained_as_it_is(model, lanes):
    """Statistics without parameters travel. Parameters that require no gradient do not learn."""
    case = Case("fedala", model, shuffle=False, join_ratio=1.0)
    [found] = simulate(case, lanes=lanes)
    assert_agree(found, expected(case), case)


def test_a_client_that_never_took_part_ends_with_the_initial_model():
    """Evaluation counts it with Θ⁰ (the accuracies above), so this is its personal model."""
    case = CASES["fedala-small-shuffled-0.5"]
    wanted = expected(case)
    assert wanted.absent
    [found] = simulate(case, lanes=None)
    assert set(found.personal) == set(range(len(SIZES)))
    for client in wanted.absent:
        assert_models_agree(
            found.personal[client], first_model(case).state_dict(), f"client {client}", 0
        )


@pytest.mark.parametrize("lanes", [1, 5, None], ids=["one lane", "five lanes", "all lanes"])
def test_runs_side_by_side_are_the_runs_alone(lanes):
    """Two seeds, two local epochs, and at ρ < 1 other participants in each run."""
    cases = [
        Case("fedala", "small", shuffle=True, join_ratio=0.5, seed=seed, epochs=2, layers=2)
        for seed in (3, 4)
    ]
    for case, found in zip(cases, simulate(*cases, lanes=lanes), strict=True):
        assert_agree(found, expected(case), case)


def test_the_comparison_is_about_something():
    """ALA learns in the cases above: epochs vary, W leaves 1, and FedALA is not FedAvg."""
    case = CASES["fedala-cnn-shuffled-1.0"]
    loop = PlainLoop(case)
    outcome = loop.run()
    assert outcome.ala_epochs[0] == 0
    assert 11 <= outcome.ala_epochs[1] * len(SIZES) / (len(SIZES) - 1) <= CAP
    weights = torch.cat(
        [w.flatten() for client in loop.clients.values() for w in client.ala.weights.values()]
    )
    assert weights.min() == 0
    assert ((weights > 0) & (weights < 1)).any()
    fedavg = expected(CASES["fedavg-cnn-shuffled-1.0"])
    assert any((outcome.server[n] - fedavg.server[n]).abs().max() > 1e-3 for n in outcome.server)
