"""A method may have more parameters than the model: they come with the last layer."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from plain import module
from small import Net, assert_close, evaluate, ragged_task, same_rows, start_of
from torch import Tensor, nn

import fedala
from fedala.errors import UserError
from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.lanes.heads import Head, extend_model, extend_task
from fedala.lanes.layers import layers_of, upper
from fedala.methods import Method, catalogue, register, registry
from fedala.models import mlp

DATA = (np.random.default_rng(0).normal(size=(120, 4)).astype("float32"), np.arange(120) % 3)


class TwoHeads(Head):
    """A personal head on top of the shared one, a gate, and a buffer."""

    def __init__(self, last: nn.Linear) -> None:
        super().__init__(last)
        self.personal = nn.Linear(last.in_features, last.out_features)
        self.gate = nn.Parameter(last.weight.detach().mean(1))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * torch.sigmoid(self.gate) * self.personal(x)


OWN = ("personal.weight", "personal.bias", "gate", "scale")


@dataclass(frozen=True)
class Twin(Method):
    """What the head adds stays with its client. All else is averaged."""

    name = "twin"
    title = "Twin"
    summary = "a second head of each client's own"
    head: ClassVar[type[Head]] = TwoHeads

    def shared_part(self, task: Task, model: Params) -> Params:
        return {name: value for name, value in model.items() if not name.endswith(OWN)}

    def ala_parameters(self, model: nn.Module, layers: int | str) -> tuple[str, ...]:
        shared = [name for name, _ in model.named_parameters() if not name.endswith(OWN)]
        return upper(model, layers, shared)

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}

    def initialize(self, cohort: Cohort, received: Message, state: State) -> tuple[Params, State]:
        return {**state["local"], **received.model}, state

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        trained = cohort.fit(initialized)
        return Message(self.shared_part(cohort.task, trained)), {"local": trained}


@pytest.fixture(scope="module", autouse=True)
def register_twin():
    before = dict(registry._classes())
    register(Twin)
    yield
    registry._classes().clear()
    registry._classes().update(before)
    catalogue.cache_clear()


def test_the_models_own_parameters_keep_names_values_and_place():
    task = ragged_task([5, 9])
    extended, start = extend_task(task, start_of(task), TwoHeads, "Twin")
    before, after = start_of(task)(3), start(3)
    new = {"out.personal.weight", "out.personal.bias", "out.gate", "out.scale"}
    assert after.keys() == before.keys() | new
    assert_close(before, {name: after[name] for name in before}, 0)
    assert torch.equal(after["out.gate"], before["out.weight"].mean(2))
    assert set(extended.layers[0]) == {"out.weight", "out.bias"} | new
    assert extended.layers[1:] == task.layers[1:]
    assert not torch.equal(start(4)["out.personal.weight"], after["out.personal.weight"])
    assert extend_task(extended, start, TwoHeads, "Twin") == (extended, start)
    assert_close(start(3), after, 0)
    assert isinstance(task.model.out, nn.Linear)
    assert type(task.model.out) is nn.Linear, "the given task has been changed"


def test_the_head_computes_what_it_says():
    task = ragged_task([5])
    extended, start = extend_task(task, start_of(task), TwoHeads, "Twin")
    state, rows = start(0), torch.arange(5)
    model = module(extended, state).eval()
    with extended.use_mode(training=False), torch.no_grad():
        [output] = extended.outputs(state, extended.inputs(rows)[None])
        features = nn.Sequential(model.conv, model.norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        features = model.hidden(features(task.x[rows])).relu()
        w, b = state["out.weight"][0], state["out.bias"][0]
        v, c = state["out.personal.weight"][0], state["out.personal.bias"][0]
        gate = 1 / (1 + torch.exp(-state["out.gate"][0]))
        expected = features @ w.T + b + gate * (features @ v.T + c)
    assert torch.allclose(output, expected, atol=1e-12)


@pytest.mark.parametrize("name", ["twin", "twin+ala"])
def test_lanes_are_independent(name):
    task = ragged_task([5, 14, 9, 3, 0])
    one, all_lanes = (evaluate(name, task, rounds=3, lanes=lanes) for lanes in (1, None))
    same_rows([e.row for e in one[1]], [e.row for e in all_lanes[1]], 1e-10)
    for key in one[2]:
        assert_close(one[2][key], all_lanes[2][key], 1e-10)
    heads = [one[2][0, client]["out.personal.weight"] for client in range(4)]
    assert all(not torch.equal(heads[0], other) for other in heads[1:])
    assert torch.equal(one[2][0, 0]["conv.weight"], one[2][0, 1]["conv.weight"])


class Own(nn.Module):
    """A module that registers its last layer first."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(6, 3)
        self.bottom = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.bottom(x).relu())


@pytest.mark.parametrize("model", [None, Own], ids=["built-in", "own"])
def test_runs_save_resume_load_and_predict(model, tmp_path):
    options = {"method": "twin", "clients": 3, "partition": "iid", "lr": 0.1, "seeds": 1}
    given = {"dataset": DATA, **({"model": model} if model else {})}
    whole = fedala.run(**options, **given, rounds=4, out=tmp_path / "whole")
    fedala.run(**options, **given, rounds=2, out=tmp_path / "half")
    resumed = fedala.run(resume=tmp_path / "half", rounds=4, **given)
    assert [row.loss for row in whole.history] == [row.loss for row in resumed.history]
    trained = fedala.load(tmp_path / "whole", **({"model": model} if model else {}))
    loaded = trained.personal(1)
    last = "top" if model else layers_of(mlp())[0][0].partition(".")[0]
    assert isinstance(loaded.get_submodule(last), TwoHeads)
    assert trained.predict(DATA[0][:5], client=1).shape == (5,)
    # What the head adds stays with the clients, so the global model is the user's own.
    whole_model = trained.global_model()
    assert type(whole_model.get_submodule(last)) is nn.Linear
    scores = trained.evaluate(DATA)
    assert [one.client for one in scores.models] == [0, 1, 2, None]
    alone = fedala.load(tmp_path / "whole", **({"model": model} if model else {}))
    assert [alone.evaluate(DATA, client=k).models[0].score for k in range(3)] == [
        one.score for one in scores.models[:3]
    ]
    expected = (trained.predict(DATA[0], is_global=True) == DATA[1]).mean()
    assert scores.models[3].score == pytest.approx(expected)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


def test_a_last_layer_that_is_not_linear_is_refused(tmp_path):
    sentence = "Twin adds parameters to the last layer, which must be an nn.Linear"
    with pytest.raises(UserError, match=sentence):
        fedala.run(method="twin", dataset=DATA, clients=3, model=Scaled, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="this model's is Conv2d"):
        extend_model(nn.Sequential(nn.Conv2d(1, 3, 3)), TwoHeads, "Twin")
    with pytest.raises(UserError, match="this model is a single nn"):
        extend_model(nn.Linear(4, 3), TwoHeads, "Twin")


def test_a_linear_layer_with_modules_inside_counts_as_one_layer():
    net = extend_model(Net(), TwoHeads, "Twin")
    net.__dict__.pop("_fedala_layers")
    assert len(layers_of(net)) == len(layers_of(Net()))
