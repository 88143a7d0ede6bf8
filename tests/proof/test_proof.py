"""Methods to come: the public interface carries them in about forty lines each.

Each method is registered for this file only.
"""

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from methods.test_methods import SIZES, assert_lanes_are_independent, same_evaluations
from plain import batches, cross_entropy, lane, mean, module
from proof.fedadam import FedAdam
from proof.pfedhn import PFedHN
from small import Net, assert_close, evaluate, ragged_task, start_of

import fedala
from fedala.io import tensor_files
from fedala.lanes import Cohort, Message, Params, State, Task, Uploads
from fedala.lanes.trees import leaves
from fedala.methods import Method, ServerRound, catalogue, make, register, registry
from fedala.simulation import Simulation

PROOFS = (FedAdam, PFedHN)
NAMES = [cls.name for cls in PROOFS]
WITH_ALA = [f"{cls.name}+ala" for cls in PROOFS if not cls.refuses_ala]
#: Each method with the shares of clients that join a round; with both ALA and absent clients, one.
CASES = [
    *((name, ratio) for name in NAMES for ratio in (1.0, 0.5)),
    *((name, 1.0) for name in WITH_ALA),
]


@pytest.fixture(scope="module")
def register_method():
    """Yield a function that registers a method until the end of this file."""
    before = dict(registry._classes())
    yield register
    registry._classes().clear()
    registry._classes().update(before)
    catalogue.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def register_proofs(register_method):
    for cls in PROOFS:
        register_method(cls)


# --- what every method must hold -----------------------------------------------------------------


@pytest.mark.parametrize(("name", "join_ratio"), CASES)
def test_lanes_are_independent(name, join_ratio):
    assert_lanes_are_independent(name, join_ratio)


@pytest.mark.parametrize(("name", "join_ratio"), CASES)
def test_it_resumes_from_its_state(name, join_ratio, tmp_path):
    """A new simulation takes servers and clients in the middle, through files, to the same end."""
    task = ragged_task(SIZES)
    options = {"rounds": 3, "join_ratio": join_ratio, "seeds": (3, 4)}
    whole, evaluations, models = evaluate(name, task, **options)
    first, second = (Simulation(make(name), task, start_of(task), **options) for _ in range(2))
    for round in (1, 2):
        first.step(round, train=True)
    tensor_files.save(tmp_path / "state.safetensors", first.state(), {})
    state, _ = tensor_files.load(tmp_path / "state.safetensors")
    second.restore(2, state)
    for i, (key, client) in enumerate(first.clients.items()):
        path = tmp_path / f"client-{i}.safetensors"
        tensor_files.save(path, client, {})
        second.clients.scatter([key], tensor_files.load(path)[0])
    found = {}
    rest = list(second.run(lambda p: found.update({(p.seed, p.client): p.model})))
    same_evaluations(rest, [one for one in evaluations if one.row.round >= 2], 0)
    for (path, a), (other, b) in zip(leaves(whole.servers), leaves(second.servers), strict=True):
        assert path == other
        assert torch.equal(a, b)
    assert found.keys() == models.keys()
    for key in models:
        assert_close(found[key], models[key], 0)


@pytest.mark.parametrize(("name", "join_ratio"), CASES)
def test_a_federation_equals_the_simulation(name, join_ratio, tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")
    from flower.inprocess import RUN, build_federation, run_in_process
    from safetensors.torch import load_file

    options = {"method": name, "precision": "float64", "join_ratio": join_ratio, "rounds": 3}
    grid, federated = run_in_process(tmp_path, **options)
    here = fedala.run(dataset=build_federation(), model=Net, lanes="1", **{**RUN, **options})
    assert len(federated.history) == len(here.history) == 4
    for a, b in zip(federated.history, here.history, strict=True):
        cells, expected = a.columns(), b.columns()
        assert cells.pop("asked") == cells.pop("answered")  # columns of a federation alone
        assert cells.keys() == expected.keys()
        for key in cells.keys() - {"seconds"}:
            assert cells[key] == pytest.approx(expected[key], abs=1e-10, nan_ok=True), key
    files = {None: next((tmp_path / "runs").glob("*/models/[!b]*/*/global.*"), None)}
    for client in range(3):
        files[client] = next((tmp_path / "state").rglob(f"client-{client:05d}/model.*"), None)
    saved = {client: load_file(path) for client, path in files.items() if path}
    assert saved
    for client, model in saved.items():
        assert_close(model, here.models[RUN["seed"], client], 1e-10)
    arrays = [message.content["arrays"] for message in [*grid.sent, *grid.replies]
              if "arrays" in message.content]  # fmt: skip
    has_extra = any(key.startswith("+extra/") for record in arrays for key in record)
    assert has_extra == name.startswith("prototypes")


def count(params, names=None):
    return sum(value.numel() for name, value in params.items() if names is None or name in names)


def test_what_travels_is_counted():
    task = ragged_task(SIZES)
    initial = start_of(task)(0)
    whole, learning = count(initial), count(initial, task.trainable)
    expected = {
        "fedadam": (whole, whole),
        "pfedhn": (learning, learning),
    }
    for name in NAMES:
        _, evaluations, _ = evaluate(name, task, rounds=2)
        row = evaluations[1].row
        assert (row.sent, row.uploaded) == expected[name], name


@pytest.mark.parametrize("name", [name for name in NAMES if name != "pfedhn"])
def test_a_client_without_samples_has_no_part(name):
    """The last client has no samples. The others' models are the same without it."""
    task = ragged_task(SIZES)
    _, _, models = evaluate(name, task, rounds=3)
    alone = ragged_task(SIZES)
    alone.parts = {part: rows[: SIZES.index(0)] for part, rows in task.parts.items()}
    _, _, without = evaluate(name, alone, rounds=3)
    for key in without:
        assert_close(models[key], without[key], 1e-10)


@pytest.mark.parametrize("policy", ["skip", "reset"])
@pytest.mark.parametrize("name", [*NAMES, "scaffold", "feddyn", "apfl", "moon"])
def test_a_client_that_diverges_spoils_nothing(name, policy):
    """One client's samples are not finite. Nobody else's state shows it, in any number of lanes."""
    found = []
    for lanes in (1, None):
        task = ragged_task(SIZES)
        task.x[task.parts["train"][2]] = float("nan")
        simulation, evaluations, _ = evaluate(
            name, task, lanes=lanes, rounds=3, on_divergence=policy
        )
        assert [one.row.diverged for one in evaluations] == [1, 1, 1, 0]
        states = {"server": simulation.servers[0], **dict(simulation.clients.items())}
        assert all(leaf.isfinite().all() for _, leaf in leaves(states))
        found.append(dict(leaves(states)))
    assert_close(*found, 1e-10)


@dataclass(frozen=True)
class Prototypes(Method):
    """Only extra tensors travel: each class's mean scores, towards which no client trains."""

    name = "prototypes"
    title = "Prototypes"
    summary = "sends no model"
    refuses_ala = "no model is received"

    def shared_part(self, task: Task, model: Params) -> Params:
        return {}

    def extra_template(self, task: Task, initial: Params) -> State:
        return {"mean": torch.zeros(1, 3, dtype=task.dtype)}

    def init_server(self, task: Task, initial: Params, server_round: ServerRound) -> State:
        return self.extra_template(task, initial)

    def send(self, server: State, server_round: ServerRound) -> Message:
        return Message(extra=server)

    def aggregate(self, server: State, uploads: Uploads, server_round: ServerRound) -> State:
        return uploads.average().extra

    def init_client(self, task: Task, initial: Params) -> State:
        return {"local": initial}

    def initialize(self, cohort: Cohort, received: Message, state: State):
        return state["local"], state

    def train(self, cohort: Cohort, initialized: Params, received: Message, state: State):
        trained = cohort.fit(initialized)
        bias = {**trained, "out.bias": trained["out.bias"] + 0.1 * received.extra["mean"]}
        return Message(extra={"mean": trained["out.bias"]}), {"local": bias}


@pytest.mark.parametrize("join_ratio", [1.0, 0.5])
def test_a_method_may_send_extra_tensors_only(join_ratio, tmp_path, register_method):
    register_method(Prototypes)
    test_lanes_are_independent("prototypes", join_ratio)
    test_it_resumes_from_its_state("prototypes", join_ratio, tmp_path)
    _, evaluations, _ = evaluate("prototypes", ragged_task(SIZES), rounds=2)
    assert (evaluations[1].row.sent, evaluations[1].row.uploaded) == (3, 3)
    test_a_federation_equals_the_simulation("prototypes", join_ratio, tmp_path)


# --- what sets each apart ------------------------------------------------------------------------


def train_plainly(task, model, client, round, correction):
    """Return a copy of the model after one epoch of SGD, with a correction of every gradient."""
    model, loss = copy.deepcopy(model), cross_entropy(task)
    for rows in batches(task, client, round=round):
        model.zero_grad()
        loss(model, rows).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= task.recipe.lr * (p.grad + correction[name])
    return model


def list_values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_fedadam_is_its_paper():
    """Two rounds of plain modules: m, v and x by the paper's algorithm 2, number by number."""
    task = ragged_task(SIZES)
    simulation, _, _ = evaluate("fedadam", task, rounds=2)
    x = module(task, start_of(task)(0))
    m = {n: np.zeros(p.shape) for n, p in list_values(x).items()}
    v = {n: np.full(p.shape, 0.001**2) for n, p in list_values(x).items()}
    for round in (1, 2):
        no_correction = dict.fromkeys(m, 0)
        models = [train_plainly(task, x, i, round, no_correction) for i in range(len(SIZES))]
        average, new = mean(models, SIZES), {}
        for n, p in list_values(x).items():
            delta = average.get_parameter(n).detach().numpy() - p.numpy()
            m[n] = 0.9 * m[n] + 0.1 * delta
            v[n] = 0.99 * v[n] + 0.01 * delta**2
            new[n] = torch.from_numpy(p.numpy() + 0.01 * m[n] / (np.sqrt(v[n]) + 0.001))
        average.load_state_dict(new, strict=False)
        x = average
    assert_close(simulation.servers[0]["global"], lane(x), 1e-10)


def test_pfedhns_models_differ_between_clients_and_learn():
    task = ragged_task(SIZES)
    simulation, evaluations, models = evaluate("pfedhn", task, rounds=16, seeds=(0, 1))
    for n in task.trainable:
        assert (models[0, 1][n] - models[0, 2][n]).abs().max() > 1e-3
    for seed in (0, 1):
        losses = [one.row.loss for one in evaluations if one.row.seed == seed]
        assert losses[-1] < 0.9 * losses[0]
    drawn, other = (server["clients"] for server in simulation.servers)
    assert not torch.equal(drawn, other)


def test_a_client_without_samples_does_not_move_pfedhns_network():
    """Its embedding stays, all others move."""
    task, empty = ragged_task(SIZES), SIZES.index(0)
    simulation = Simulation(make("pfedhn"), task, start_of(task), rounds=1)
    [before] = simulation.servers
    simulation.step(1, train=True)
    moved = (simulation.servers[0]["clients"] - before["clients"]).abs().amax(1)
    assert moved[empty] < 1e-12
    assert (moved[:empty] > 1e-6).all()


def test_pfedhns_step_is_the_gradient_of_a_squared_distance():
    """One client moves φ along −∇‖θ(φ) − trained‖²/2."""
    task = ragged_task([12], shuffle=False)
    simulation, _, _ = evaluate("pfedhn", task, rounds=1)
    method = simulation.method
    again = Simulation(method, task, start_of(task), rounds=1)
    [before] = again.servers
    again.step(1, train=True)
    trained = again.clients[0, 0]["local"]
    learning = {path: leaf.clone().requires_grad_() for path, leaf in leaves(before)}
    network = {key: learning.get(key) for key in ("clients", "hidden")}
    for key in ("heads", "biases"):
        network[key] = {n: learning[f"{key}/{n}"] for n in before[key]}
    made = method.generate(network, [0])
    distance = sum((made[n] - trained[n]).square().sum() / 2 for n in made)
    gradients = torch.autograd.grad(distance, list(learning.values()))
    for (path, after), g in zip(leaves(again.servers[0]), gradients, strict=True):
        expected = learning[path].detach() - method.server_lr * g
        assert torch.allclose(after, expected, atol=1e-12), path
