"""PartialFed against two plain modules per client, and what it is where the choice is settled."""

import copy
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from small import Net, assert_close, ragged_task, simulate, start_of
from torch.func import functional_call

from fedala.lanes.cohort import Cohort
from fedala.lanes.messages import Message
from fedala.lanes.optimizers import UpdateRule
from fedala.lanes.randomness import draw
from fedala.lanes.trees import leaves, tree_map
from fedala.lanes.weight_learning import Settings
from fedala.methods import make, partialfed
from fedala.methods.partialfed import PartialFed, WeightStep, step_logits
from fedala.methods.with_ala import WithALA
from fedala.simulation import Simulation

SIZES = [44, 22, 13, 5]
#: Layers of `Net`, output first.
LAYERS = ["out.", "hidden.", "norm.", "conv."]


def compose(load, loaded, kept):
    states = loaded.state_dict(), kept.state_dict()
    return {name: states[0 if load[layer(name)] else 1][name] for name in states[0]}


def layer(name):
    [number] = [k for k, prefix in enumerate(LAYERS) if name.startswith(prefix)]
    return number


def by_plain_modules(task, start, rounds, tau, lr):
    """Return the evaluated models and logits of all clients after `rounds` rounds, by modules."""
    clients = range(len(SIZES))
    server = Net().double()
    server.load_state_dict({name: value[0] for name, value in start.items()})
    local = [copy.deepcopy(server) for _ in clients]
    logits = [torch.zeros(4, 2, dtype=torch.float64) for _ in clients]
    for round in range(1, rounds + 1):
        temperature = max(0.1, tau * 0.965 ** (round - 1))
        for client in clients:
            loaded, kept, pair = (
                copy.deepcopy(server).train(),
                local[client].train(),
                logits[client].requires_grad_(),
            )
            rows = task.parts["train"][client]
            order = rows[draw(0, "batches", client=client, round=round).permutation(len(rows))]
            batches = [order[a:b] for a, b in pairwise(range(0, len(order) + 1, 4))]
            noise = draw(0, "gumbel", client=client, round=round).gumbel(size=(len(batches), 4, 2))
            for number, batch in enumerate(batches):
                x, y, gumbel = task.x[batch], task.y[batch], torch.from_numpy(noise[number])
                if (number + round - 1) % 10 < 8:
                    load = [bool(k[0] >= k[1]) for k in pair.detach() + gumbel]
                    model = Net().double().train()
                    model.load_state_dict(compose(load, loaded, kept))
                    optimizer = torch.optim.SGD(model.parameters(), lr)
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    for one, chosen in ((loaded, load), (kept, [not k for k in load])):
                        one.load_state_dict(compose(chosen, model, one))
                else:
                    share = F.softmax((pair + gumbel) / temperature, -1)
                    mixed = {
                        name: share[layer(name), 0] * a.detach()
                        + share[layer(name), 1] * b.detach()
                        for (name, a), (_, b) in zip(
                            loaded.named_parameters(), kept.named_parameters(), strict=True
                        )
                    }
                    copies = {name: value.clone() for name, value in loaded.named_buffers()}
                    F.cross_entropy(
                        functional_call(loaded, {**mixed, **copies}, (x,)), y
                    ).backward()
                    with torch.no_grad():
                        pair -= lr * pair.grad
                    pair.grad = None
            logits[client] = pair.detach()
            local[client] = copy.deepcopy(kept)
            local[client].load_state_dict(
                compose([bool(k[0] >= k[1]) for k in logits[client]], loaded, kept)
            )
        mean = {}
        for name, value in server.state_dict().items():
            parts = [
                n / sum(SIZES) * net.state_dict()[name] for n, net in zip(SIZES, local, strict=True)
            ]
            mean[name] = sum(parts) if value.is_floating_point() else local[0].state_dict()[name]
        server.load_state_dict(mean)
    final = [compose([bool(k[0] >= k[1]) for k in logits[c]], server, local[c]) for c in clients]
    return [{name: value[None] for name, value in state.items()} for state in final], logits


def test_four_rounds_are_those_of_plain_modules():
    task = ragged_task(SIZES, lr=0.3)
    expected, logits = by_plain_modules(task, start_of(task)(0), 4, tau=5.0, lr=0.3)
    loads = torch.stack(logits)[..., 0] >= torch.stack(logits)[..., 1]
    assert len(loads.unique()) == 2, (
        "some layers should be loaded and some kept for this test to bite"
    )
    simulation, _, models = simulate("partialfed", task, rounds=4)
    for client in range(len(SIZES)):
        assert torch.allclose(
            simulation.clients[0, client]["logits"][0], logits[client], atol=1e-10, rtol=0
        )
        assert_close(models[0, client], expected[client], 1e-9)


# --- where the choice is settled ------------------------------------------------------------------


@dataclass(frozen=True)
class Settled(PartialFed):
    """PartialFed whose logits are as good as infinite."""

    name = property(lambda self: "settled")  # not one of the methods
    load: bool = True

    def init_client(self, task, initial):
        state = super().init_client(task, initial)
        return {
            **state,
            "logits": state["logits"]
            + torch.tensor([1e9, -1e9]).double() * (1 if self.load else -1),
        }


def run(method, task, rounds=3, **options):
    simulation, models = Simulation(method, task, start_of(task), rounds=rounds, **options), {}
    list(simulation.run(lambda personal: models.update({personal.client: personal.model})))
    return simulation, models


def test_logits_for_loading_make_it_fedavg():
    _, models = run(Settled(f_s=0), ragged_task(SIZES))
    _, _, fedavg = simulate("fedavg", ragged_task(SIZES), rounds=3)
    for client in [*range(len(SIZES)), None]:
        assert_close(models[client], fedavg[0, None], 0)


def test_logits_for_keeping_make_it_local():
    _, models = run(Settled(f_s=0, load=False), ragged_task(SIZES))
    _, _, local = simulate("local", ragged_task(SIZES), rounds=3)
    for client in range(len(SIZES)):
        assert_close(models[client], local[0, client], 0)


def test_with_ala_the_kept_copy_starts_from_alas_model():
    """If all layers are kept, the kept model is ALA(g, w): FedALA."""
    _, models = run(WithALA(Settled(f_s=0, load=False), Settings()), ragged_task(SIZES))
    _, _, fedala = simulate("fedala", ragged_task(SIZES), rounds=3)
    for client in range(len(SIZES)):
        assert_close(models[client], fedala[0, client], 0)


@pytest.mark.parametrize("load", [True, False])
def test_settled_logits_stay_and_nothing_breaks(load):
    simulation, models = run(Settled(load=load), ragged_task(SIZES), rounds=10)
    for client in range(len(SIZES)):
        assert (simulation.clients[0, client]["logits"].abs() == 1e9).all()
        assert all(value.isfinite().all() for value in models[client].values())


# --- one training ---------------------------------------------------------------------------------


def setting(round=1, dtype=torch.float64):
    """A cohort, two different models and logits that choose differently by layer and lane."""
    task = ragged_task(SIZES, dtype=dtype)
    cohort = Cohort(task, range(len(SIZES)), [0] * len(SIZES), round=round, rounds=round)
    received, kept = (
        {n: v.expand(len(SIZES), *v.shape[1:]) for n, v in start_of(task)(seed).items()}
        for seed in (1, 2)
    )
    logits = (
        torch.linspace(-1, 1, len(SIZES) * 8, dtype=dtype)
        .view(len(SIZES), 4, 2)
        .roll(3, 1)
        .contiguous()
    )
    return cohort, received, kept, logits


def training(step, round=1):
    cohort, received, kept, logits = setting(round)
    partial = make("partialfed")
    batch = torch.zeros(len(SIZES), dtype=torch.int64)
    state = {"load": received, "keep": kept, "logits": logits, "batch": batch}
    fixed = {
        "lr": cohort.lr,
        "optimizer": cohort.optimizer_numbers(),
        "gumbel": partial._draw_gumbel(cohort),
        "tau": torch.full((len(SIZES),), 2.0, dtype=torch.float64),
    }
    return state, cohort.train(step, tree_map(torch.clone, state), fixed)


def test_logits_are_moved_by_their_steps_alone_and_weights_by_the_others_alone():
    before, after = training(step_logits)
    for part in ("load", "keep"):
        assert_close(before[part], after[part], 0)
    moved = after["logits"] - before["logits"]
    assert moved.abs().amax((1, 2)).gt(1e-4).all()
    assert torch.allclose(moved.sum(-1), torch.zeros(()).double(), atol=1e-14)

    before, after = training(WeightStep(UpdateRule()))
    assert torch.equal(before["logits"], after["logits"])
    for part in ("load", "keep"):
        assert (before[part]["out.weight"] - after[part]["out.weight"])[0].abs().max() > 1e-3
    assert after["batch"].tolist() == [11, 5, 3, 1]


def test_only_the_chosen_copy_of_a_layer_steps():
    """The last client has one batch: every layer has moved in one copy and not in the other."""
    before, after = training(WeightStep(UpdateRule()))
    lane = len(SIZES) - 1
    cohort, _, _, logits = setting()
    load = (logits + make("partialfed")._draw_gumbel(cohort)[:, 0])[lane]
    assert len({bool(a >= b) for a, b in load}) == 2, "both copies should be chosen from"
    for number, prefix in enumerate(LAYERS):
        names = [name for name in before["load"] if name.startswith(prefix)]
        loads = bool(load[number][0] >= load[number][1])
        for part, chosen in (("load", loads), ("keep", not loads)):
            moved = [
                not torch.equal(before[part][name][lane], after[part][name][lane]) for name in names
            ]
            assert any(moved) == chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_breaks_at_the_floor_of_the_temperature(dtype, monkeypatch):
    cohort, received, kept, logits = setting(round=2000, dtype=dtype)
    partial, taus = make("partialfed"), []
    train = Cohort.train
    monkeypatch.setattr(
        Cohort,
        "train",
        lambda self, *a, **o: taus.extend(a[2]["tau"].tolist()) or train(self, *a, **o),
    )
    upload, state = partial.train(
        cohort, kept, Message(received), {"local": kept, "logits": logits}
    )
    assert taus == pytest.approx([0.1] * len(SIZES))
    assert all(value.isfinite().all() for _, value in leaves((upload, state)))
    assert (state["logits"] - logits)[0].abs().max() > 0


def test_the_temperature_starts_at_tau_and_falls_by_the_decay(monkeypatch):
    taus, train = [], Cohort.train
    monkeypatch.setattr(
        Cohort,
        "train",
        lambda self, *a, **o: taus.append(a[2]["tau"][0].item()) or train(self, *a, **o),
    )
    simulate("partialfed", ragged_task(SIZES), rounds=3)
    assert taus == pytest.approx([5, 5 * 0.965, 5 * 0.965**2])


def test_of_every_ten_batches_eight_step_the_weights_also_where_a_round_has_one(monkeypatch):
    """In ten rounds of one batch, the weights step eight times, and the logits twice."""
    taken = []
    step_weights = WeightStep.__call__
    monkeypatch.setattr(
        WeightStep, "__call__", lambda *a: taken.append("step_weights") or step_weights(*a)
    )
    monkeypatch.setattr(
        partialfed, "step_logits", lambda *a: taken.append("step_logits") or step_logits(*a)
    )
    simulate("partialfed", ragged_task([4]), rounds=10)
    assert taken == ["step_weights"] * 8 + ["step_logits"] * 2


def test_equal_logits_load():
    cohort, received, kept, logits = setting()
    model = make("partialfed").model_to_evaluate(
        cohort, kept, Message(received), {"logits": torch.zeros_like(logits)}
    )
    assert_close(model, received, 0)
