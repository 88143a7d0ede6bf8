"""Models of features, windows and sequences: references of torch, lanes, cuts, and what fits."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import assert_close
from torch import nn

from fedala import UserError
from fedala.data import Dataset
from fedala.lanes.cohort import Cohort
from fedala.lanes.layers import Cut, layers_of
from fedala.lanes.parameters import model_state
from fedala.lanes.task import Task
from fedala.methods import make
from fedala.models import build_model, cnn1d, lstm, mlp, token_lstm
from fedala.models.lstm import Recurrence
from fedala.simulation import Simulation

SIZES = [7, 5, 4, 1]
TARGETS = {
    "classes": torch.arange(17) % 3,
    "labels": (torch.arange(51).view(17, 3) % 4 == 0).float(),
    "numbers": torch.linspace(-1, 1, 51).view(17, 3),
}


def normal(*shape):
    return torch.from_numpy(np.random.default_rng(0).normal(size=shape))


def tokens(length=6, vocabulary=9):
    ids = np.random.default_rng(0).integers(vocabulary, size=(17, length)).astype(np.int32)
    ids[:, -2:] = 0
    return torch.from_numpy(ids)


CASES = {
    "mlp": (lambda: mlp(5, 3, 8), normal(17, 5)),
    "mlp of windows": (lambda: mlp(12, 3, 8), normal(17, 3, 4)),
    "cnn1d": (lambda: cnn1d((2, 9), 3), normal(17, 2, 9)),
    "lstm": (lambda: lstm(2, 3, 4), normal(17, 6, 2)),
    "token lstm": (lambda: token_lstm(9, 3, 4, 5), tokens()),
}


def make_task(case, y=TARGETS["classes"]):
    build, x = CASES[case]
    rows = np.split(np.arange(17), np.cumsum(SIZES)[:-1])
    with torch.device("meta"):
        model = build()
    y = y.double() if y.is_floating_point() else y
    loss = {torch.int64: F.cross_entropy}.get(y.dtype, F.mse_loss)
    options = {"batch_size": 3, "lr": 0.1, "precision": "float64", "loss": loss, "epochs": 2}
    return Task(model, x, y, rows, rows, **options)


def start_of(case):
    def start(seed):
        torch.manual_seed(seed)
        return {name: value.double() for name, value in model_state(CASES[case][0]()).items()}

    return start


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_lanes_are_single_clients(case, targets):
    found = []
    for lanes in (None, 1):
        models = {}
        simulation = Simulation(
            make("fedala", {"fedala.layers": 1}),
            make_task(case, TARGETS[targets]),
            start_of(case),
            rounds=2,
            lanes=lanes,
        )
        rows = list(simulation.run(lambda p, m=models: m.update({p.client: p.model})))
        assert rows[-1].row.loss != rows[0].row.loss
        found.append(models)
    assert set(found[0]) == {None, 0, 1, 2, 3}
    for client, model in found[1].items():
        assert_close(found[0][client], model, 1e-10)


@pytest.mark.parametrize("case", CASES)
def test_every_cut_gives_the_whole(case):
    build, x = CASES[case]
    torch.manual_seed(0)
    model = build().double()
    state, whole = dict(model.state_dict()), model(x)
    depth = len(layers_of(model))
    assert depth == len(model.stages())
    assert {name for layer in layers_of(model) for name in layer} == set(state)
    for p in range(depth + 1):
        cut = Cut(model, p)
        assert cut.p == p
        torch.testing.assert_close(cut.upper(state, cut.lower(state, x)), whole, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_recurrence_is_that_of_torch(dtype, tolerance):
    torch.manual_seed(0)
    own, reference = Recurrence(3, 5).to(dtype), nn.LSTM(3, 5, batch_first=True).to(dtype)
    reference.load_state_dict(own.state_dict())
    x = normal(4, 7, 3).to(dtype)
    weights = normal(4, 7, 5).to(dtype)
    outputs = own(x), reference(x)[0]
    assert (outputs[0] - outputs[1]).abs().max() < tolerance
    gradients = [
        torch.autograd.grad((output * weights).sum(), list(module.parameters()))
        for output, module in zip(outputs, (own, reference), strict=True)
    ]
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() < 10 * tolerance


def test_the_initial_weights_are_drawn_as_torch_draws_them():
    states = []
    for kind in (lambda: Recurrence(3, 5), lambda: nn.LSTM(3, 5, batch_first=True)):
        torch.manual_seed(3)
        states.append(kind().state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_states_at_padding_and_unknown_words_do_not_count():
    torch.manual_seed(0)
    model = token_lstm(9, 3, 4, 5).double()
    short, long = torch.tensor([[3, 1, 7]]), torch.tensor([[3, 1, 7, 0, 0, 0]])
    assert_close({"": model(short)}, {"": model(long)}, 1e-12)
    states, _ = torch_lstm(model)(model.embedding(short))
    assert_close({"": model(short)}, {"": model.fc(states.amax(1))}, 1e-12)
    assert torch.isfinite(model(torch.zeros(1, 4, dtype=torch.int32))).all()


def torch_lstm(model):
    reference = nn.LSTM(5, 4, batch_first=True).double()
    reference.load_state_dict(model.lstm.state_dict())
    return reference


def test_row_0_of_the_embedding_never_learns_in_any_lane():
    start = {
        name: value.repeat(4, *[1] * (value.ndim - 1))
        for name, value in start_of("token lstm")(0).items()
    }
    trained = Cohort(make_task("token lstm"), [0, 1, 2, 3], [0] * 4).fit(start)
    assert (trained["embedding.weight"][:, 0] == 0).all()
    assert (trained["embedding.weight"][:, 1:] != start["embedding.weight"][:, 1:]).any()


def dataset(name, x, **options):
    return Dataset(name, x, torch.tensor([0, 1, 2, 0]), 3, **options)


TABLE = dataset("measurements", torch.zeros(4, 6))
WINDOWS = dataset("steps", torch.zeros(4, 3, 20))
SEQUENCES = dataset("walks", torch.zeros(4, 20, 5))
IMAGES = dataset("pictures", torch.zeros(4, 3, 20, 24, dtype=torch.uint8))
TEXTS = dataset("letters", torch.ones(4, 200, dtype=torch.int32), vocabulary=9)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("mlp", TABLE), ("mlp", WINDOWS), ("mlp", IMAGES), ("cnn1d", WINDOWS),
        ("cnn1d", SEQUENCES), ("lstm", SEQUENCES), ("lstm", WINDOWS), ("lstm", TEXTS),
    ],
)  # fmt: skip
def test_a_model_is_built_to_fit_its_data(model, data):
    x = data.x if data.vocabulary else data.x.float()
    assert build_model(model, data)(x).shape == (4, 3)


@pytest.mark.parametrize(
    ("model", "data", "sentence"),
    [
        ("cnn1d", TABLE, "cnn1d reads windows.*measurements has none: use mlp"),
        ("lstm", TABLE, "lstm reads sequences.*use mlp"),
        ("lstm", IMAGES, "lstm reads sequences.*use cnn or resnet18 or mlp"),
        ("mlp", TEXTS, "mlp reads numbers.*use fasttext or lstm"),
        ("cnn", WINDOWS, "cnn reads images.*use cnn1d or lstm or mlp"),
        ("cnn", SEQUENCES, "cnn reads images.*use lstm or cnn1d or mlp"),
        ("cnn1d", dataset("short", torch.zeros(4, 3, 3)), "at least 4 steps.*channels of 3"),
    ],
)
def test_a_model_that_cannot_read_the_data_is_refused(model, data, sentence):
    with pytest.raises(UserError, match=sentence):
        build_model(model, data)
