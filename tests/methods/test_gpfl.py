"""GPFL: class embeddings and a conditional valve, against a plain loop and by hand."""

import copy
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from plain import PlainALA, batches, changed, features_of, mean, module
from small import Doubled, Net, assert_close, ragged_task, simulate, start_of
from torch import Tensor, nn

from fedala.errors import UserError
from fedala.lanes.cohort import Cohort
from fedala.lanes.heads import extend_model, extend_task
from fedala.lanes.losses import Regression
from fedala.lanes.messages import Message
from fedala.lanes.trees import join, take
from fedala.methods import make
from fedala.methods.gpfl import GPFL, GuidedHead
from fedala.models import cnn
from fedala.simulation import Simulation

SIZES = [5, 13, 3, 0]
VALUES = {"lam": 0.2, "mu": 0.3}
SETTINGS = {f"gpfl.{name}": value for name, value in VALUES.items()}
VALVE = tuple(
    f"out.valve.{side}.{layer}.{name}"
    for side in ("gamma", "beta")
    for layer in (0, 2)
    for name in ("weight", "bias")
)
GOVERNED = ("hidden.weight", "hidden.bias", *VALVE)


# --- the publication, without lanes and without the method's own layer ----------------------------


@dataclass
class Client:
    """What client i has: W^fe and its own W_i^h in one network, V, C, and p_i."""

    net: nn.Module
    valve: nn.ModuleDict
    embeddings: Tensor
    condition: Tensor

    def open_valve(self, f: Tensor, condition: Tensor) -> Tensor:
        found = {}
        for side in ("gamma", "beta"):
            linear, norm = self.valve[f"{side}_linear"], self.valve[f"{side}_norm"]
            found[side] = norm(linear(condition).relu())
        return F.relu((found["gamma"] + 1) * f + found["beta"])

    def state(self) -> dict[str, Tensor]:
        found = {**self.net.state_dict(), "out.embeddings": self.embeddings}
        for side in ("gamma", "beta"):
            for layer, kind in ((0, "linear"), (2, "norm")):
                for name, value in self.valve[f"{side}_{kind}"].state_dict().items():
                    found[f"out.valve.{side}.{layer}.{name}"] = value
        found["out.condition"] = self.condition
        return {name: value.detach().unsqueeze(0) for name, value in found.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over the valve and the network from a state without lanes."""
        self.net.load_state_dict({name: state[name] for name in self.net.state_dict()})
        for side in ("gamma", "beta"):
            for layer, kind in ((0, "linear"), (2, "norm")):
                prefix = f"out.valve.{side}.{layer}."
                part = {name: state[prefix + name] for name in ("weight", "bias")}
                self.valve[f"{side}_{kind}"].load_state_dict(part)


def make_valve() -> nn.ModuleDict:
    parts = {}
    for side in ("gamma", "beta"):
        parts |= {f"{side}_linear": nn.Linear(6, 6), f"{side}_norm": nn.LayerNorm(6)}
    return nn.ModuleDict(parts).double()


def train(client: Client, task, number: int, round: int, lam: float, mu: float) -> None:
    frozen = client.embeddings.clone()
    client.embeddings.requires_grad_()
    decayed = [*client.valve.parameters(), client.embeddings]
    optimizer = torch.optim.SGD(
        [{"params": client.net.parameters()}, {"params": decayed, "weight_decay": mu}],
        lr=task.recipe.lr,
    )
    for rows in batches(task, number, round=round):
        optimizer.zero_grad()
        features, y = features_of(client.net, task.x[rows]), task.y[rows]
        guided = client.open_valve(features, (frozen[0] + frozen[1] + frozen[2]) / 3)
        loss = F.cross_entropy(client.net.out(client.open_valve(features, client.condition)), y)
        for f, label in zip(guided, y, strict=True):
            cosines = [f @ c / (f.norm() * c.norm()) for c in client.embeddings]
            odds = torch.exp(cosines[label]) / sum(map(torch.exp, cosines))
            loss = loss - odds.log() / len(y) + lam * (f - frozen[label]).norm() / len(y)
        loss.backward()
        optimizer.step()
    client.embeddings.requires_grad_(False)


def run_plainly(task, rounds: int, ala: bool):
    """Return the server's model as a client, and the clients as they are tested at the end."""
    start = extend_task(task, start_of(task), GuidedHead, "GPFL")[1](0)
    server = Client(Net().double(), make_valve(), start["out.embeddings"][0], torch.zeros(6))
    server.load({name: value[0] for name, value in start.items()})
    heads = [copy.deepcopy(server.net.out) for _ in SIZES]
    trained: list[Client | None] = [None for _ in SIZES]
    blends = [PlainALA(task, i, GOVERNED) for i in range(len(SIZES))]
    for round in range(1, rounds + 2):
        clients = []
        for i in range(len(SIZES)):
            client = copy.deepcopy(server)
            client.net.out = copy.deepcopy(heads[i])
            labels = task.y[task.parts["train"][i]].tolist() or [0, 1, 2]
            client.condition = sum(server.embeddings[label] for label in labels) / len(labels)
            if ala:
                blend(task, blends[i], client, trained[i] or client, round)
            clients.append(client)
        if round > rounds:
            return server, clients
        for i, client in enumerate(clients):
            train(client, task, i, round, **VALUES)
        heads, trained = [client.net.out for client in clients], clients
        server = Client(
            mean([client.net for client in clients], SIZES),
            mean([client.valve for client in clients], SIZES),
            sum(n * client.embeddings for n, client in zip(SIZES, clients, strict=True))
            / sum(SIZES),
            torch.zeros(6),
        )


def blend(task, ala: PlainALA, client: Client, old: Client, round: int) -> None:
    """Set the body's last layer and the valve to ALA(received, own)."""
    extended = extend_task(task, start_of(task), GuidedHead, "GPFL")[0]
    received = module(extended, client.state())
    local = changed(received, {name: old.state()[name][0] for name in GOVERNED})
    client.load(ala(received, local, received, round=round).state_dict())


@pytest.mark.parametrize("ala", [False, True])
def test_it_is_the_plain_loop(ala):
    task = ragged_task(SIZES)
    settings = {**SETTINGS, **(PlainALA.SETTINGS if ala else {})}
    _, _, models = simulate("gpfl+ala" if ala else "gpfl", task, settings=settings, rounds=3)
    server, clients = run_plainly(task, 3, ala)
    for i, client in enumerate(clients):
        assert_close(models[0, i], client.state(), 1e-9)
    own = ("out.weight", "out.bias", "out.condition")
    received = {name: value for name, value in server.state().items() if name not in own}
    assert_close(models[0, None], received, 1e-9)
    weights = clients[1].state()["hidden.weight"][0]
    assert torch.allclose(weights, server.net.hidden.weight, rtol=0, atol=1e-6) != ala


# --- by hand --------------------------------------------------------------------------------------


def test_an_open_valve_adds_nothing():
    """γ = β = 0 leaves the features, so the head's output is that of the model's own layer."""
    last = nn.Linear(2, 3)
    head, f = GuidedHead(last), torch.tensor([[0.5, 2.0]])
    with torch.no_grad():
        for side in (head.valve.gamma, head.valve.beta):
            side[2].weight.zero_()
        assert torch.allclose(head(f), F.linear(f, last.weight, last.bias))
        head.valve.gamma[2].bias.fill_(1.0)  # (1 + 1)·f − 2
        head.valve.beta[2].bias.fill_(-2.0)
        expected = F.linear(torch.tensor([[0.0, 2.0]]), last.weight, last.bias)
        assert torch.allclose(head(f), expected)


def test_the_losses_by_hand():
    """One sample (0, 2) of class 1 between the embeddings (1, 0) and (0, 1), with λ = 1, μ = 0:

    L^P = log 2 for a head of zeros, L^alg = log(1 + e⁻¹), L^mlg = ‖(0, 2) − (0, 1)‖ = 1.
    """
    model = extend_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), GuidedHead, "GPFL")
    state = {name: torch.zeros_like(value)[None] for name, value in model.state_dict().items()}
    state["0.bias"] = torch.tensor([[0.0, 2.0]])
    state["1.embeddings"] = torch.eye(2)[None]
    task = ragged_task([1], model=model, dtype=torch.float32)
    task.x, task.y = torch.zeros(2, 2), torch.tensor([1, 1])
    method, cohort = GPFL(lam=1.0, mu=0.0), Cohort(task, [0], [0])
    method.train(cohort, state, Message(method.shared_part(task, state)), {"local": state})
    expected = math.log(2) + math.log(1 + math.exp(-1)) + 1
    assert cohort.metrics["train_loss"].item() == pytest.approx(expected, abs=1e-6)


# --- what sets it apart ---------------------------------------------------------------------------


def test_what_travels_and_what_stays():
    simulation, rows, models = simulate("gpfl", ragged_task(SIZES), rounds=2)
    whole = simulation.initial[0].keys()
    assert whole - models[0, None].keys() == {"out.weight", "out.bias", "out.condition"}
    assert rows[0].sent == rows[0].uploaded == sum(v.numel() for v in models[0, None].values())
    empty = SIZES.index(0)
    assert torch.equal(models[0, empty]["out.weight"], simulation.initial[0]["out.weight"])
    even = models[0, None]["out.embeddings"].mean(1)
    assert torch.allclose(models[0, empty]["out.condition"], even)
    assert not torch.allclose(models[0, 1]["out.condition"], even)


def test_decay_shrinks_the_valve_and_the_embeddings_alone():
    """One step with lr·μ = 1 leaves −lr·∇ of what is decayed; the body moves as without μ."""
    task = ragged_task([4])
    with_mu, without = (
        simulate("gpfl", task, settings={"gpfl.mu": mu}, rounds=1)[2][0, 0] for mu in (10.0, 0.0)
    )
    start = extend_task(task, start_of(task), GuidedHead, "GPFL")[1](0)
    for name in start.keys() - {"out.condition"}:
        decayed = name in (*VALVE, "out.embeddings")
        expected = without[name] - start[name] if decayed else without[name]
        assert torch.allclose(with_mu[name], expected, rtol=0, atol=1e-12), name


def test_swept_numbers_are_lanes():
    task, start = extend_task(ragged_task(SIZES), start_of(ragged_task(SIZES)), GuidedHead, "GPFL")
    lam, mu = torch.tensor([0.5, 0.1]).double(), torch.tensor([0.2, 0.0]).double()
    model = join([start(0)] * 2)
    state = GPFL().init_client(task, model)
    received = Message(GPFL().shared_part(task, model))
    cohort = Cohort(task, [1, 1], [0, 0])
    together, _ = GPFL(lam=lam, mu=mu).train(cohort, model, received, state)
    for lane in (0, 1):
        one, method = slice(lane, lane + 1), GPFL(lam[lane].item(), mu[lane].item())
        alone, _ = method.train(
            Cohort(task, [1], [0]), take(model, one), take(received, one), take(state, one)
        )
        assert_close(take(together.model, one), alone.model, 1e-12)


def test_what_ala_governs():
    """Layers of the body, and with them the valve. The embeddings are not in the tested path."""
    model = extend_model(cnn(), GuidedHead, "GPFL")
    valve, method = tuple(name.replace("out.", "fc2.") for name in VALVE), make("gpfl+ala")
    assert method.ala_parameters(model, 0) == ()
    assert method.ala_parameters(model, 1) == ("fc1.weight", "fc1.bias", *valve)
    with pytest.raises(UserError, match=r"takes fc2\.embeddings, which is not"):
        method.ala_parameters(model, "fc2.embeddings")


def test_refusals():
    task = ragged_task(SIZES, model=Doubled())
    simulation = Simulation(make("gpfl"), task, start_of(task, Doubled), rounds=1)
    with pytest.raises(UserError, match="GPFL works with what enters the last layer"):
        simulation.step(1, train=False)
    with pytest.raises(UserError, match="GPFL needs a model of at least 2 layers"):
        make("gpfl").check_model(nn.Linear(36, 3))
    floats = ragged_task(SIZES, loss=Regression())
    simulation = Simulation(make("gpfl"), floats, start_of(floats), rounds=1)
    with pytest.raises(UserError, match="GPFL works with the classes of the samples"):
        simulation.step(1, train=False)


def test_it_is_exported_and_runs_without_a_bias():
    head = GuidedHead(nn.Linear(4, 3, bias=False)).eval()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(head, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert torch.allclose(program.module()(x[:3]), head(x[:3]))


def test_defaults():
    assert make("gpfl") == GPFL(lam=0.01, mu=0.1)
