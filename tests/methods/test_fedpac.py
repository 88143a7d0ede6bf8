"""FedPAC: aligned features, and heads that the server combines for each client."""

import copy
from itertools import combinations

import plain
import pytest
import torch
from small import Net, assert_close, ragged_task, simulate, start_of
from torch import nn

from fedala.errors import UserError
from fedala.lanes.losses import Regression
from fedala.methods import make
from fedala.methods.fedpac import weigh_heads
from fedala.methods.simplex import minimize_on_simplex
from fedala.simulation import Simulation

SIZES = [5, 22, 13, 9, 0]
HEAD = ("out.weight", "out.bias")
ROUNDS = 3


def skewed_task(sizes=tuple(SIZES), **options):
    """Clients that see the three classes unequally often; client 3 has only two of them."""
    task = ragged_task(list(sizes), **options)
    for client, rows in enumerate(task.parts["train"][:4]):
        for row in rows[: len(rows) // 2]:
            task.x[row] += (client % 3 - task.y[row]) * 0.5
            task.y[row] = client % 3
        if client == 3:
            task.y[rows] = task.y[rows].clamp(max=1)
    return task


# --- the publication, client by client ------------------------------------------------------------


def by_class(task, client, model):
    """Return the features of each class's training samples."""
    rows = task.parts["train"][client]
    with torch.no_grad():
        features = (
            plain.features_of(copy.deepcopy(model).eval(), task.x[rows]) if len(rows) else None
        )
    return {k: features[task.y[rows] == k] for k in task.y[rows].unique().tolist()}


def statistics(task, client, model):
    """h_k = p_k·μ_k, and the variance of its estimate from n samples."""
    n, h, v = SIZES[client], torch.zeros(3, 6).double(), 0.0
    for k, features in by_class(task, client, model).items():
        p, mean = len(features) / n, features.mean(0)
        h[k] = p * mean
        v += p * torch.trace(features.T @ features / len(features)) - p**2 * (mean @ mean)
    return h, v / max(n, 1)


def trained(task, client, model, centroids, round, lam):
    """One epoch of the head, then one of the body with loss + λ·‖f(x) − c_y‖²/d."""
    cross_entropy = plain.cross_entropy(task)

    def aligned(model, rows):
        features = plain.features_of(model, task.x[rows])
        total = nn.functional.cross_entropy(model.out(features), task.y[rows])
        for feature, label in zip(features, task.y[rows].tolist(), strict=True):
            if label in centroids:
                total = total + lam / len(rows) * ((feature - centroids[label]) ** 2).mean()
        return total

    def phase(model, loss, learns, **batches):
        model = copy.deepcopy(model)
        for name, part in model.named_children():
            part.train(learns(name)).requires_grad_(learns(name))
        return plain.descend(
            model, loss, plain.batches(task, client, round=round, **batches), task.recipe.lr
        )

    model = phase(model, cross_entropy, lambda name: name == "out", purpose="head")
    return phase(model, aligned, lambda name: name != "out").train().requires_grad_(True)


def best_weights(h, v, i):
    """Try every support: the least αᵀPα among those whose stationary point is not negative."""
    m = len(h)
    differences = torch.stack([(one - h[i]).flatten() for one in h])
    matrix = differences @ differences.T + torch.diag(
        torch.tensor(list(map(float, v)), dtype=torch.float64)
    )
    best, least = None, float("inf")
    for size in range(1, m + 1):
        for chosen in map(list, combinations(range(m), size)):
            x = torch.linalg.solve(matrix[chosen][:, chosen], torch.ones(size).double())
            alpha = torch.zeros(m).double()
            alpha[chosen] = x / x.sum()
            value = alpha @ matrix @ alpha
            if (alpha >= 0).all() and value < least:
                best, least = alpha, value
    return best.tolist()


def combine_heads(task, uploads, statistics_of):
    """Return the new head of each participant, as a module."""
    able = [client for client in uploads if SIZES[client]]
    h, v = zip(*(statistics_of[client] for client in able), strict=True)
    heads = [uploads[client].out for client in able]
    combined = {}
    for client in uploads:
        if client in able:
            weights = best_weights(h, v, able.index(client))
        else:
            weights = [SIZES[one] / sum(SIZES[c] for c in able) for one in able]
        combined[client] = plain.combine(heads, weights)
    return combined


@pytest.mark.parametrize(
    ("name", "join_ratio"), [("fedpac", 1.0), ("fedpac", 0.6), ("fedpac+ala", 1.0)]
)
def test_against_a_plain_loop(name, join_ratio):
    """With `+ala`, the last layer is ALA(the combined head, the own head)."""
    task = skewed_task()
    settings = {"fedpac.lam": 0.7} | (plain.PlainALA.SETTINGS if "+" in name else {})
    method = make(name, settings)
    simulation = Simulation(method, task, start_of(task), rounds=ROUNDS, join_ratio=join_ratio)
    found = {}
    for _ in simulation.run(lambda personal: found.update({personal.client: personal.model})):
        pass
    server = plain.module(task, simulation.initial[0])
    clients = range(len(SIZES))
    expected = dict.fromkeys(clients, server)
    local = dict.fromkeys(clients, server)
    ala = [plain.PlainALA(task, client) for client in clients]
    heads, centroids = {}, {}
    for round in range(1, ROUNDS + 2):
        joined = simulation.draw_participants(0, round)
        for client in joined:
            received = copy.deepcopy(server)
            received.out.load_state_dict(heads.get(client, server.out).state_dict())
            expected[client] = received
            if "+" in name:
                expected[client] = ala[client](received, local[client], received, round=round)
        if round > ROUNDS:
            break
        measured = {client: statistics(task, client, server) for client in joined}
        for client in joined:
            local[client] = trained(task, client, expected[client], centroids, round, 0.7)
            if SIZES[client]:
                expected[client] = local[client]
        uploads = {client: local[client] for client in joined}
        heads |= combine_heads(task, uploads, measured)
        sums = {}
        for client in joined:
            for k, features in by_class(task, client, local[client]).items():
                sums.setdefault(k, []).append(features)
        centroids = {**centroids, **{k: torch.cat(all_of).mean(0) for k, all_of in sums.items()}}
        server = plain.mean(list(uploads.values()), [SIZES[client] for client in joined])
    assert_close(found[None], plain.lane(server), 1e-9)
    for client in clients:
        assert_close(found[client], plain.lane(expected[client]), 1e-9)
    assert len(heads) == len(SIZES), "every client should have had a head of its own"


# --- the combining weights ------------------------------------------------------------------------


def violation(matrix, alpha):
    """How far α is from the optimality conditions on the simplex, relative to the matrix."""
    slope = matrix @ alpha
    least = alpha @ slope
    below, product = (least - slope).clamp(min=0).max(), ((slope - least) * alpha).abs().max()
    return max(below, product).item() / matrix.abs().max().item()


@pytest.mark.parametrize("clients", [1, 2, 7, 40])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e3])
def test_weights_are_optimal(clients, size):
    draw = torch.Generator().manual_seed(clients)
    h = torch.randn(clients, 3, 5, generator=draw, dtype=torch.float64) * size
    h *= torch.rand(clients, 1, 1, generator=draw, dtype=torch.float64)
    variance = torch.rand(clients, generator=draw, dtype=torch.float64)
    shares = weigh_heads(h, variance)
    assert (shares >= 0).all()
    assert torch.allclose(shares.sum(1), torch.ones(clients).double(), atol=1e-12)
    for i, alpha in enumerate(shares):
        apart = (h - h[i]).flatten(1)
        assert violation(apart @ apart.T + torch.diag(variance), alpha) < 1e-13


def test_weights_are_those_of_every_support_tried():
    draw = torch.Generator().manual_seed(3)
    for _ in range(20):
        h = torch.randn(5, 2, 3, generator=draw, dtype=torch.float64)
        variance = torch.rand(5, generator=draw, dtype=torch.float64)
        shares = weigh_heads(h, variance)
        for i in range(5):
            expected = best_weights(h, variance.tolist(), i)
            assert shares[i].tolist() == pytest.approx(expected, abs=1e-10)


def test_weights_by_hand():
    """Two clients at distance d: α minimises (1 − a)²·V₀ + a²·(V₁ + d²), so a = V₀/(V₀ + V₁ + d²).

    Equal clients share by 1/V. With V₀ = 1, V₁ = 2 and d² = 3, client 0 takes 1/6 of the other,
    and client 1 takes 2/6.
    """
    h = torch.tensor([[[0.0]], [[3**0.5]]]).double()
    shares = weigh_heads(h, torch.tensor([1.0, 2.0]).double())
    assert shares.flatten().tolist() == pytest.approx([5 / 6, 1 / 6, 1 / 3, 2 / 3])
    shares = weigh_heads(torch.ones(3, 2, 2).double(), torch.tensor([1.0, 2.0, 4.0]).double())
    assert shares[0].tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def test_a_client_without_variance_keeps_its_head_and_nothing_at_all_is_shared_equally():
    shares = weigh_heads(torch.eye(3).double().unsqueeze(2), torch.tensor([0.0, 1.0, 1.0]).double())
    assert shares[0].tolist() == pytest.approx([1, 0, 0], abs=1e-9)
    assert (shares[1] > 0.1).all()
    shares = weigh_heads(torch.zeros(4, 2, 2).double(), torch.zeros(4).double())
    assert shares.flatten().tolist() == pytest.approx([0.25] * 16)


def test_matrices_that_need_many_exchanges():
    """Strongly coupled matrices: most places are bound, and their signs depend on each other."""
    draw = torch.Generator().manual_seed(0)
    factors = torch.randn(30, 25, 25, generator=draw, dtype=torch.float64)
    matrices = factors @ factors.transpose(1, 2) + 1e-3 * torch.eye(25)
    for matrix, alpha in zip(matrices, minimize_on_simplex(matrices), strict=True):
        assert violation(matrix, alpha) < 1e-12
        assert 1 < (alpha > 0).sum() < 25


# --- limits and refusals --------------------------------------------------------------------------


def test_alone_and_without_alignment_it_is_fedrep():
    task = ragged_task([22])
    _, _, alone = simulate("fedpac", task, rounds=3, settings={"fedpac.lam": 0.0})
    _, _, fedrep = simulate("fedrep", task, rounds=3, settings={"fedrep.epochs": 1})
    assert_close(alone[0, 0], fedrep[0, 0], 1e-12)


def test_the_first_round_has_no_centroids():
    results = []
    for lam in (0.0, 5.0):
        simulation, _, _ = simulate("fedpac", skewed_task(), settings={"fedpac.lam": lam}, rounds=1)
        results.append(simulation.servers[0])
    assert_close(results[0]["global"], results[1]["global"], 0)
    assert results[0]["centroids"]["known"].all()


def test_alignment_brings_classes_together():
    """With a strong λ, features are nearer to the mean of their class."""
    spread = []
    for lam in (0.0, 20.0):
        task = skewed_task(lr=0.02)
        _, _, models = simulate("fedpac", task, rounds=8, settings={"fedpac.lam": lam})
        body = plain.module(task, models[0, None])
        groups = by_class(task, 1, body).values()
        spread.append(sum((group - group.mean(0)).square().sum().item() for group in groups))
    assert spread[1] < 0.5 * spread[0]


def test_refusals():
    def refuse(sentence, net, **options):
        task = ragged_task([5, 4], model=net(), **options)
        with pytest.raises(UserError, match=sentence):
            Simulation(make("fedpac"), task, start_of(task, net)).step(1, train=True)

    refuse("at least two layers", lambda: nn.Linear(36, 3))
    refuse("FedPAC works with the classes of the samples", Net, loss=Regression())


def test_defaults():
    assert (make("fedpac").lam, make("fedpac").epochs) == (1, 1)
