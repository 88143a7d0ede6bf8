"""FedCP: a policy that divides features between two heads, against a plain loop and by hand."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from plain import PlainALA, batches, changed, features_of, mean, mmd_of_pairs, module
from small import Doubled, Net, assert_close, ragged_task, simulate, start_of
from torch import Tensor, nn

from fedala.errors import UserError
from fedala.lanes.cohort import Cohort
from fedala.lanes.heads import extend_model, extend_task
from fedala.lanes.messages import Message
from fedala.lanes.trees import join, take
from fedala.methods import make
from fedala.methods.fedcp import FedCP, PolicyHead
from fedala.models import cnn
from fedala.simulation import Simulation

SIZES = [5, 13, 3, 0]


# --- the publication, without lanes and without the method's own layer ----------------------------


@dataclass
class Client:
    """What client i has: W_i^fe, W_i^hd, Θ_i as three matrices' owners, the frozen W^hd and v_i."""

    body: nn.Module  # its `out` is not used
    personal: nn.Linear
    frozen: nn.Linear
    linear: nn.Linear
    norm: nn.LayerNorm
    context: Tensor

    def predict(self, h: Tensor) -> Tensor:
        a = self.norm(self.linear(h * self.context)).relu()
        first, second = torch.exp(a[:, :6]), torch.exp(a[:, 6:])
        r, s = first / (first + second), second / (first + second)
        return self.frozen(r * h) + self.personal(s * h)

    def state(self) -> dict[str, Tensor]:
        parts = {
            "out.personal": self.personal,
            "out": self.frozen,
            "out.policy.0": self.linear,
            "out.policy.1": self.norm,
        }
        found = {k: v for k, v in self.body.state_dict().items() if not k.startswith("out.")}
        for prefix, part in parts.items():
            found |= {f"{prefix}.{name}": value for name, value in part.state_dict().items()}
        found["out.context"] = self.context
        return {name: value.detach().unsqueeze(0) for name, value in found.items()}


def context_of(head: nn.Linear) -> Tensor:
    v = head.weight.detach()[0] + head.weight.detach()[1] + head.weight.detach()[2]
    return v / v.square().sum().sqrt()


def train(client: Client, received: nn.Module, task, number: int, round: int, lam: float) -> None:
    teacher = copy.deepcopy(received)
    learning = [client.body.conv, client.body.norm, client.body.hidden]
    learning += [client.personal, client.linear, client.norm]
    optimizer = torch.optim.SGD([p for part in learning for p in part.parameters()], task.recipe.lr)
    for rows in batches(task, number, round=round):
        optimizer.zero_grad()
        h, g = features_of(client.body, task.x[rows]), features_of(teacher, task.x[rows]).detach()
        loss = F.cross_entropy(client.predict(h), task.y[rows])
        (loss + lam * mmd_of_pairs(h, g)).backward()
        optimizer.step()


def run_plainly(task, rounds: int, lam: float, ala: bool):
    """Return the server's parts, and the model that each client is tested with at the end."""
    start = extend_task(task, start_of(task), PolicyHead, "FedCP")[1](0)
    linear, norm = nn.Linear(6, 12).double(), nn.LayerNorm(12).double()
    for part, layer in (("0", linear), ("1", norm)):
        names = ("weight", "bias")
        layer.load_state_dict({name: start[f"out.policy.{part}.{name}"][0] for name in names})
    body = Net().double()
    body.load_state_dict({name: start[name][0] for name in body.state_dict()})
    head = body.out
    personal = [copy.deepcopy(head) for _ in SIZES]
    trained: list[Client | None] = [None for _ in SIZES]
    blends = [PlainALA(task, i, GOVERNED) for i in range(len(SIZES))]
    for round in range(1, rounds + 2):
        clients = []
        for i in range(len(SIZES)):
            parts = copy.deepcopy((body, personal[i], head, linear, norm))
            client = Client(*parts, context_of(personal[i]))
            if ala and round > 1:
                client = blend(task, blends[i], client, trained[i], round)
            elif ala:
                blend(task, blends[i], client, client, round)
            clients.append(client)
        if round > rounds:
            return (body, head, linear, norm), clients
        for i, client in enumerate(clients):
            train(client, body, task, i, round, lam)
        personal, trained = [client.personal for client in clients], clients
        uploads = []
        for client in clients:
            halfway = mean([client.frozen, client.personal], [1, 1])
            uploads.append((client.body, halfway, client.linear, client.norm))
        body, head, linear, norm = (mean(parts, SIZES) for parts in zip(*uploads, strict=True))
        body.out = nn.Linear(6, 3).double()


POLICY = tuple(f"out.policy.{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias"))
GOVERNED = ("hidden.weight", "hidden.bias", *POLICY)


def blend(task, ala: PlainALA, client: Client, old: Client, round: int) -> Client:
    """Return the client with ALA(received, own) for the body's last layer and the policy."""
    extended = extend_task(task, start_of(task), PolicyHead, "FedCP")[0]
    received = module(extended, client.state())
    local = changed(received, {name: old.state()[name][0] for name in GOVERNED})
    found = ala(received, local, received, round=round).state_dict()
    parts = {
        "hidden": client.body.hidden,
        "out.policy.0": client.linear,
        "out.policy.1": client.norm,
    }
    for path, layer in parts.items():
        layer.load_state_dict({name: found[f"{path}.{name}"] for name in ("weight", "bias")})
    return client


@pytest.mark.parametrize("ala", [False, True])
def test_it_is_the_plain_loop(ala):
    task = ragged_task(SIZES, lr=0.3)
    name = "fedcp+ala" if ala else "fedcp"
    settings = {"fedcp.lam": 2.0, **(PlainALA.SETTINGS if ala else {})}
    _, _, models = simulate(name, task, settings=settings, rounds=3)
    server, clients = run_plainly(task, 3, 2.0, ala)
    weights = clients[1].state()["hidden.weight"]
    assert torch.allclose(weights, server[0].hidden.weight, rtol=0, atol=1e-4) != ala
    for i, client in enumerate(clients):
        assert_close(models[0, i], client.state(), 1e-9)
    received = Client(server[0], server[1], *server[1:], torch.zeros(6)).state()
    own = ("out.personal", "out.context")
    received = {name: value for name, value in received.items() if not name.startswith(own)}
    assert_close(models[0, None], received, 1e-9)


# --- by hand --------------------------------------------------------------------------------------


def make_head(weight: Tensor) -> PolicyHead:
    last = nn.Linear(weight.shape[1], len(weight))
    with torch.no_grad():
        last.weight.copy_(weight)
        last.bias.fill_(1.0)
    return PolicyHead(last)


def test_a_policy_that_prefers_nothing_gives_the_mean_of_the_heads():
    """r = s = 1/2: (W + W_i) h / 2 and both biases."""
    head, h = make_head(torch.tensor([[1.0, 2.0], [3.0, 4.0]])), torch.tensor([[10.0, 1.0]])
    with torch.no_grad():
        head.personal.weight.mul_(3)
        head.policy[1].weight.zero_()  # all scores are 0
        assert torch.allclose(head(h), 2 * h @ head.weight.T + 2)


def test_a_decided_policy_takes_one_head():
    head, h = make_head(torch.tensor([[1.0, 2.0], [3.0, 4.0]])), torch.tensor([[10.0, 1.0]])
    with torch.no_grad():
        head.personal.weight.mul_(3)
        head.policy[1].weight.zero_()
        head.policy[1].bias.copy_(torch.tensor([99.0, 0, 0, 99]))  # feature 0: r, feature 1: s
        assert torch.allclose(head(h), torch.tensor([[10.0 + 6, 30.0 + 12]]) + 2)


def test_the_context_is_the_normalised_sum_of_the_rows():
    head = make_head(torch.tensor([[1.0, 2.0], [2.0, 2.0]]))
    assert torch.allclose(head.context, torch.tensor([0.6, 0.8]))
    assert torch.equal(make_head(torch.zeros(2, 2)).context, torch.zeros(2))


# --- what sets it apart ---------------------------------------------------------------------------


def test_heads_stay_and_the_global_head_is_frozen():
    simulation, rows, models = simulate("fedcp", ragged_task(SIZES), rounds=1)
    start = simulation.initial[0]
    for client in range(len(SIZES)):
        local = simulation.clients[0, client]["local"]
        assert torch.equal(local["out.weight"], start["out.weight"])
        assert torch.equal(local["out.context"], start["out.context"])
        is_trained = SIZES[client] > 0
        assert torch.equal(local["out.personal.weight"], start["out.weight"]) != is_trained
        # Equal heads leave the policy without a slope: it learns from the second step on.
        has_two_steps = SIZES[client] >= 8
        change = (local["out.policy.1.bias"] - start["out.policy.1.bias"]).abs().max().item()
        assert (change > 1e-9) == has_two_steps
    weights = torch.tensor(SIZES).double() / sum(SIZES)
    heads = [simulation.clients[0, i]["local"]["out.personal.weight"] for i in range(len(SIZES))]
    moved = sum(weight * head for weight, head in zip(weights, heads, strict=True))
    assert torch.allclose(models[0, None]["out.weight"], (moved + start["out.weight"]) / 2)
    assert not any("personal" in name or "context" in name for name in models[0, None])
    assert rows[0].sent == sum(value.numel() for value in models[0, None].values())


def test_the_distance_has_no_slope_until_the_body_has_moved():
    """In the first step, equal features have the least distance, whatever λ is."""

    def train_body(size, lam):
        task = ragged_task([size])
        simulation, _, _ = simulate("fedcp", task, settings={"fedcp.lam": lam}, rounds=1)
        return simulation.clients[0, 0]["local"]

    assert_close(train_body(4, 0.0), train_body(4, 5.0), 1e-12)
    far, near = (train_body(12, lam)["hidden.weight"] for lam in (0.0, 5.0))
    assert (far - near).abs().max() > 1e-4


def test_swept_lambdas_are_lanes():
    task = ragged_task(SIZES)
    both = torch.tensor([0.5, 4.0], dtype=torch.float64)
    task, start = extend_task(task, start_of(task), PolicyHead, "FedCP")
    method, model = FedCP(), join([start(0)] * 2)
    state = method.init_client(task, model)
    received = Message(method.shared_part(task, model))
    together, _ = FedCP(lam=both).train(Cohort(task, [1, 1], [0, 0]), model, received, state)
    for lane, lam in enumerate(both.tolist()):
        one = slice(lane, lane + 1)
        alone, _ = FedCP(lam=lam).train(
            Cohort(task, [1], [0]), take(model, one), take(received, one), take(state, one)
        )
        assert_close(take(together.model, one), alone.model, 1e-12)


def test_a_model_that_cannot_be_cut_is_refused_before_any_work():
    task = ragged_task(SIZES, model=Doubled())
    simulation = Simulation(make("fedcp"), task, start_of(task, Doubled), rounds=1)
    with pytest.raises(UserError, match=r"FedCP works with what enters the last layer"):
        simulation.step(1, train=False)


def test_what_ala_governs():
    """Layers of the body, and with them the policy: a client trains and receives both."""
    model = extend_model(cnn(), PolicyHead, "FedCP")
    policy = tuple(name.replace("out.", "fc2.") for name in POLICY)
    method = make("fedcp+ala")
    assert method.ala_parameters(model, 0) == ()
    assert method.ala_parameters(model, 1) == ("fc1.weight", "fc1.bias", *policy)
    assert method.ala_parameters(model, "fc2.policy.1,fc1.bias") == ("fc1.bias", *policy[2:])
    with pytest.raises(UserError, match=r"takes fc2\.weight.* which is not"):
        method.ala_parameters(model, "fc2.weight")
    make("fedcp+ala", {"ala.layers": "fc2.policy"}).check_model(cnn())
    with pytest.raises(UserError, match="layers must be between 0 and 3"):
        make("fedcp+ala", {"ala.layers": 4}).check_model(cnn())


def test_it_is_exported_and_runs_without_a_bias():
    head = PolicyHead(nn.Linear(4, 3, bias=False)).eval()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(head, (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert torch.allclose(program.module()(x[:3]), head(x[:3]))


def test_defaults():
    assert make("fedcp") == FedCP(lam=5.0)
