"""IFCA: k models, and each client trains the one that fits its samples best."""

import plain
import pytest
import torch
from small import Net, assert_close, evaluate, ragged_task, simulate, start_of
from torch import nn

from fedala.errors import UserError
from fedala.lanes.cohort import Cohort
from fedala.lanes.messages import Message
from fedala.lanes.trees import share
from fedala.methods import ServerRound, make
from fedala.simulation import Simulation

SIZES = [5, 22, 13, 18, 0]
ROUNDS = 3


def grouped_task(**options):
    """Clients of two groups: the second has other labels for the same images."""
    task = ragged_task(SIZES, **options)
    for client in (0, 2):
        for part in ("train", "test"):
            rows = task.parts[part][client]
            task.y[rows] = (task.y[rows] + 1) % 3
    return task


def pick(task, client, models):
    """Return the number of the model with the least training loss, the first of equal ones."""
    loss, rows = plain.cross_entropy(task), task.parts["train"][client]
    if not len(rows):
        return 0
    with torch.no_grad():
        losses = [loss(model.eval(), rows).item() for model in models]
    return losses.index(min(losses))


def split_stack(task, stack):
    """Return the modules of a server's stack of models."""
    count = next(iter(stack.values())).shape[1]
    return [plain.module(task, {n: v[:, j] for n, v in stack.items()}) for j in range(count)]


@pytest.mark.parametrize("name", ["ifca", "ifca+ala"])
def test_against_a_plain_loop(name):
    """With `+ala`, the last layer is ALA(the chosen model, w)."""
    task = grouped_task()
    settings = {"ifca.clusters": 3} | (plain.PlainALA.SETTINGS if "+" in name else {})
    simulation = Simulation(make(name, settings), task, start_of(task), rounds=ROUNDS)
    models = split_stack(task, simulation.servers[0]["models"])
    found, rows = {}, []
    for one in simulation.run(lambda personal: found.update({personal.client: personal.model})):
        rows.append(one.row)
    clients = range(len(SIZES))
    local = [plain.module(task, simulation.initial[0]) for _ in clients]
    ala = [plain.PlainALA(task, client) for client in clients]
    picked = []
    for round in range(1, ROUNDS + 2):
        chosen = [pick(task, client, models) for client in clients]
        picked.append(chosen)
        start = [models[number].train() for number in chosen]
        if "+" in name:
            start = [one(g, w, g, round=round) for one, g, w in zip(ala, start, local, strict=True)]
        if round > ROUNDS:
            break
        local = [
            plain.descend(
                model.train(),
                plain.cross_entropy(task),
                plain.batches(task, client, round=round),
                task.recipe.lr,
            )
            for client, model in enumerate(start)
        ]
        for number in range(3):
            weights = [SIZES[client] * (chosen[client] == number) for client in clients]
            if sum(weights):
                models[number] = plain.mean(local, weights)
    assert len({number for chosen in picked for number in chosen}) > 1, "one cluster took all"
    for number, model in enumerate(models):
        own = {n: v[:, number] for n, v in simulation.servers[0]["models"].items()}
        assert_close(own, plain.lane(model), 1e-9)
    for client in clients:
        assert_close(found[client], plain.lane(start[client]), 1e-9)
    for row, chosen in zip(rows, picked, strict=True):
        for number in range(3):
            part = chosen.count(number) / len(SIZES)
            assert row.metrics[f"cluster_{number + 1}"] == pytest.approx(part)


def test_one_cluster_is_fedavg_to_the_bit():
    task = ragged_task(SIZES)
    _, _, ifca = simulate("ifca", task, rounds=3, settings={"ifca.clusters": 1})
    _, _, fedavg = simulate("fedavg", task, rounds=3)
    for client in range(len(SIZES)):
        assert_close(ifca[0, client], fedavg[0, None], 0)


def test_two_groups_find_their_models():
    """Each group's data say something else of the same images, so one model cannot fit both."""
    simulation, _, _ = simulate("ifca", grouped_task(), rounds=12)
    clusters = [int(simulation.clients[0, client]["cluster"]) for client in range(4)]
    assert clusters[0] == clusters[2] != clusters[1] == clusters[3]


def initial_models(seed=0, net=Net, **settings):
    task = ragged_task([5, 4], model=net())
    initial = start_of(task, net)(seed)
    method = make("ifca", {f"ifca.{name}": value for name, value in settings.items()})
    stack = method.init_server(task, initial, ServerRound(seed, 0, 1, [0, 1], [5, 4]))["models"]
    return task, initial, stack


def test_initial_models_are_permutations_of_the_first():
    """Every tensor that learns keeps its entries; running statistics and counters stay."""
    task, initial, stack = initial_models(clusters=3)
    for name, value in stack.items():
        first, second, third = value[0]
        assert torch.equal(first, initial[name][0])
        if name in task.trainable and first.unique().numel() > 6:
            assert not torch.equal(first, second)
            assert not torch.equal(second, third)
            assert torch.equal(second.flatten().sort().values, first.flatten().sort().values)
        elif name not in task.trainable:
            assert torch.equal(second, first)
    again, other = initial_models(clusters=3)[2], initial_models(seed=1, clusters=3)[2]
    assert_close(again, stack, 0)
    order, another = (s["hidden.weight"][0, 1].flatten().argsort() for s in (stack, other))
    assert not torch.equal(order, another)
    # More clusters leave the first ones as they are.
    fewer = initial_models(clusters=2)[2]
    assert_close(fewer, {name: value[:, :2] for name, value in stack.items()}, 0)


def test_initial_models_with_noise_are_near_the_first():
    task, initial, stack = initial_models(noise=0.01)
    for name in task.trainable:
        scale = initial[name].std(correction=0)
        apart = (stack[name][:, 1] - initial[name]).std(correction=0)
        if initial[name].numel() > 50:
            assert 0.005 * scale < apart < 0.02 * scale
    assert torch.equal(stack["norm.weight"][0, 1], initial["norm.weight"][0])


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=2)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.words(x.flatten(1).long() % 7).mean(1))


def test_rows_of_padding_stay_zero():
    _, initial, stack = initial_models(net=Embedded)
    assert not initial["words.weight"][0, 2].any()
    assert not stack["words.weight"][0, 1, 2].any()
    assert not torch.equal(stack["words.weight"][0, 1, 3], initial["words.weight"][0, 3])


def test_equal_models_mean_the_first_and_diverged_ones_are_nobodys_choice():
    task = ragged_task([8, 6])
    method = make("ifca", {"ifca.clusters": 3})
    one = start_of(task)(0)
    stack = share({name: torch.stack([value] * 3, 1) for name, value in one.items()}, 2)
    cohort = Cohort(task, [0, 1], [0, 0])
    _, state = method.initialize(cohort, Message(stack), {})
    assert state["cluster"].tolist() == [0, 0]
    broken = {name: value.clone() for name, value in stack.items()}
    broken["out.bias"][:, 0] = torch.nan
    model, state = method.initialize(cohort, Message(broken), {})
    assert state["cluster"].tolist() == [1, 1]
    assert_close(model, share(one, 2), 0)


def test_a_cluster_without_clients_and_a_number_that_no_cluster_has_change_nothing():
    """By hand: clients of 1 and 3 samples choose cluster 2, another one says 7."""
    from fedala.lanes.uploads import Piece, Uploads

    method = make("ifca", {"ifca.clusters": 2})
    server = {"models": {"w": torch.tensor([[[5.0], [6.0]]])}}
    upload = Message(
        {"w": torch.tensor([[0.0], [4.0], [9.0]])}, {"cluster": torch.tensor([1, 1, 7])}
    )
    weights = torch.tensor([1.0, 3.0, 2.0]).double()
    uploads = Uploads([0, 1, 2], weights, [Piece(upload, [0, 1, 2], [0, 1, 2])])
    after = method.aggregate(server, uploads, ServerRound(0, 1, 1, [0, 1, 2], [1, 3, 2]))
    assert after["models"]["w"].flatten().tolist() == [5.0, 3.0]
    assert server["models"]["w"].flatten().tolist() == [5.0, 6.0]


def test_the_history_has_the_share_of_each_cluster():
    _, evaluations, _ = evaluate("ifca", grouped_task(), rounds=2, join_ratio=0.6)
    for one in evaluations:
        shares = [one.row.metrics["cluster_1"], one.row.metrics["cluster_2"]]
        assert sum(shares) == pytest.approx(1)


def test_defaults_and_refusals():
    assert (make("ifca").clusters, make("ifca").noise) == (2, 0)
    with pytest.raises(UserError, match=r"ifca\.clusters must be at least 1"):
        make("ifca", {"ifca.clusters": 0})
