"""Any architecture: ALA does what the authors' code does, and all lanes do what one lane does."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lanes.architectures import ARCHITECTURES, CLASSES
from oracles import learn_like_the_authors
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedala import ALA
from fedala.lanes.attention import plain_attention
from fedala.lanes.layer_units import units_of
from fedala.lanes.layers import layers_of
from fedala.lanes.outputs import scores_of
from fedala.lanes.parameters import model_state
from fedala.lanes.recurrent import unroll_recurrence
from fedala.lanes.task import Task
from fedala.methods import make
from fedala.simulation import Simulation

SIZES = (7, 4, 5)


@pytest.fixture(autouse=True)
def _quiet_libraries():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="(transformers|peft).*")
        warnings.filterwarnings("ignore", "There is a performance drop")  # vmap's slow rules
        yield


def build(name: str, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ARCHITECTURES[name][0]().double().eval()
        for parameter in model.parameters():  # apart, and none at zero
            if parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def samples(name: str, count: int) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = ARCHITECTURES[name][1](count)
        y = torch.randint(CLASSES, (count,))
    return x.double() if x.is_floating_point() else x, y


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def cross_entropy(output, y: Tensor) -> Tensor:
    """A loss of the user's own: it gets the whole output."""
    return F.cross_entropy(scores_of(output), y)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ala_gives_the_same_as_the_authors_code(name):
    x, y = samples(name, 6)
    local, received = build(name, 1), build(name, 2)
    if any(not p.requires_grad for p in local.parameters()):  # what never trains is the same
        for mine, theirs in zip(local.parameters(), received.parameters(), strict=True):
            if not mine.requires_grad:
                theirs.data.copy_(mine.data)
    ala = ALA(1, eta=2.0, sample=1.0, batch_size=4, max_epochs=2)
    before = state(local)
    governed = ala.governs(local, x[:2])
    assert all(torch.equal(value, before[n]) for n, value in local.state_dict().items())
    assert {unit for unit, names in units_of(local).items() if set(names) & set(governed)} == (
        ARCHITECTURES[name][2]
    )
    with plain_attention(local):
        expected, weights, losses = learn_like_the_authors(
            local, received, x, y, governed, loss=cross_entropy, eta=2.0, epochs=2
        )
    report = ala.initialize(local, received, (x, y))
    assert report.losses == pytest.approx(losses, rel=1e-9)
    assert list(ala.weights) == list(weights)
    for key, value in state(local).items():
        torch.testing.assert_close(value, expected.state_dict()[key], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_lanes_give_what_one_lane_gives(name):
    one, together = (run_two_rounds(name, lanes) for lanes in (1, None))
    for (rows, model), (other_rows, other_model) in zip(one, together, strict=True):
        assert rows == pytest.approx(other_rows, rel=1e-9)
        for key, value in model.items():
            torch.testing.assert_close(value, other_model[key], rtol=1e-7, atol=1e-9, msg=key)


#: Architectures that run one lane after another: vmap refuses them.
NOT_STACKED = {"gpt", "spectral norm"}
#: Those that run FedRep, too.
WITH_FEDREP = {"head before body", "two heads", "tied weights", "lstm", "lora"}


def run_two_rounds(name: str, lanes: int | None) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Return accuracy and loss after each round, and the global model."""
    total = 2 * sum(SIZES)
    x, y = samples(name, total)
    ends = np.cumsum([0, *SIZES, *SIZES])
    parts = [np.arange(a, b) for a, b in pairwise(ends)]
    results = []
    for method in ("fedala", "fedrep")[: 1 + (name in WITH_FEDREP)]:
        task = Task(
            build(name, 0), x, y, parts[:3], parts[3:], batch_size=4, lr=0.1, precision="float64"
        )
        said: list[str] = []
        simulation = Simulation(
            make(method, {"fedala.max_epochs": "2"} if method == "fedala" else {}),
            task,
            lambda seed: {n: v.clone() for n, v in model_state(build(name, seed)).items()},
            seeds=[0],
            rounds=2,
            lanes=lanes,
            on_message=said.append,
        )
        rows = [r for e in simulation.run() for r in (e.row.accuracy, e.row.loss)]
        if lanes is None:
            assert bool(said) == (name in NOT_STACKED), said
        results.append((rows, simulation.methods[0].global_model(simulation.servers[0])))
    return results


def test_blocks_count_as_one_layer_and_flat_models_layer_by_layer():
    def modules(name: str) -> list[set[str]]:
        model = build(name, 0)
        ALA().governs(model, samples(name, 2)[0])
        units = units_of(model)
        return [
            {unit for unit, names in units.items() if set(names) & set(layer)}
            for layer in layers_of(model)
        ]

    assert modules("resnet") == [{"4"}, {"1"}, {"0"}]
    assert modules("transformer") == [
        {"fc"},
        {"encoder.layers.1"},
        {"encoder.layers.0"},
        {"embedding"},
    ]
    assert modules("cnn") == [{"4"}, {"0"}]
    assert modules("densenet") == [{"fc"}, {"layers.2"}, {"layers.1"}, {"layers.0"}]
    assert modules("mixture of experts") == [{"fc"}, {"experts.0.0", "experts.1.0", "gate"}]
    assert modules("one cell several times") == [{"fc"}, {"cell"}, {"first"}]
    assert modules("unused parameter") == [{"head"}, {"body.2"}, {"body.0", "unused"}]


class _Fragile(torch.autograd.Function):
    """Its backward pass refuses lanes."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        if gradient.dim() > 2:
            raise RuntimeError("no lanes here")
        return gradient

    @staticmethod
    def vmap(info, in_dims, x: Tensor) -> tuple[Tensor, int]:
        return _Fragile.apply(x), in_dims[0]


class FragileInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return _Fragile.apply(self.fc(x)) if self.training else self.fc(x)


def test_a_model_whose_backward_pass_refuses_lanes_runs_one_lane_after_another():
    x, y = samples("mlp", 8)
    task = Task(FragileInTraining(), x, y, [np.arange(8)], precision="float64")
    assert not task.uses_vmap


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_an_unrolled_recurrence_is_torchs_own(kind):
    lanes = [kind(3, 4, num_layers=2, bidirectional=True).double() for _ in range(2)]
    x = torch.randn(2, 5, 6, 3, dtype=torch.float64)  # lane, time, sample, number
    stacked = {
        name: torch.stack([dict(lane.named_parameters())[name] for lane in lanes])
        for name, _ in lanes[0].named_parameters()
    }
    with unroll_recurrence(lanes[0]):
        outputs, ends = vmap(lambda state, x: functional_call(lanes[0], state, (x,)))(stacked, x)
    for lane, (model, own) in enumerate(zip(lanes, x, strict=True)):
        expected, last = model(own)
        torch.testing.assert_close(outputs[lane], expected, rtol=1e-10, atol=1e-12)
        for found, value in zip(
            *((end if isinstance(end, tuple) else (end,)) for end in (ends, last)), strict=True
        ):
            torch.testing.assert_close(found[lane], value, rtol=1e-10, atol=1e-12)


def test_torchs_switch_for_fused_attention_comes_back():
    model = build("transformer", 0)
    for before in (False, True):
        torch.backends.mha.set_fastpath_enabled(before)
        with plain_attention(model), plain_attention(model):
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() == before
