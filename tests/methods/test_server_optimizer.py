"""Optimisers at the server: the papers' formulas, and every method takes or refuses them."""

import copy
from dataclasses import dataclass

import pytest
import torch
from plain import batches, cross_entropy, descend, lane, mean, module
from proof.fedadam import FedAdam
from runs.test_resume import interrupted, planned, same
from small import QUICK, Net, assert_close, ragged_task, same_rows, start_of

import fedala
from fedala.errors import UserError
from fedala.methods import Method, list_methods, make
from fedala.methods.server_optimizer import ServerOptimizer, with_server_optimizer
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.plan import plan
from fedala.simulation import Simulation

SIZES = [9, 5, 7, 12, 3]
ROUNDS = 20
KINDS = ("avgm", "adam", "yogi", "adagrad")
REFUSING = {"local", "fedamp", "fedfomo", "apple", "pfedme", "scaffold", "feddyn", "ifca", "fedpac"}
REFUSING |= {"feddbe", "fedproto"}


def optimizer(kind, lr=None):
    return ServerOptimizer(kind, lr or (1.0 if kind == "avgm" else 0.03), 0.9, 0.95, 0.002)


def run(method, task, **options):
    """Run all rounds: the rows, the models by (seed, client), and the simulation."""
    models = {}
    simulation = Simulation(method, task, start_of(task), **{"rounds": ROUNDS, **options})
    rows = [
        evaluation.row
        for evaluation in simulation.run(
            lambda personal: models.update({(personal.seed, personal.client): personal.model})
        )
    ]
    return rows, models, simulation


# --- the formulas ---------------------------------------------------------------------------------


def plain_step(kind, x, m, v, delta, lr=0.03, beta1=0.9, beta2=0.95, tau=0.002):
    """One round of Algorithm 2 of Reddi et al., or of FedAvgM, on one tensor, as they are printed.

    In FedAvgM, Δw is the clients' mean change with its sign reversed, and w ← w − v.
    """
    if kind == "avgm":
        m = 0.9 * m + -delta
        return x - 1.0 * m, m, v
    m = beta1 * m + (1 - beta1) * delta
    if kind == "adagrad":
        v = v + delta**2
    elif kind == "yogi":
        v = v - (1 - beta2) * delta**2 * torch.sign(v - delta**2)
    else:
        v = beta2 * v + (1 - beta2) * delta**2
    return x + lr * m / (torch.sqrt(v) + tau), m, v


def plain_fedopt(kind, task):
    """Return the global module after all rounds: clients are modules, one after another."""
    model = module(task, start_of(task)(0))
    learned = [name for name, _ in model.named_parameters()]
    state = model.state_dict()
    m = {name: torch.zeros_like(state[name]) for name in learned}
    v = {name: torch.full_like(state[name], 0.002**2) for name in learned}
    for round in range(1, ROUNDS + 1):
        trained = [
            descend(model, cross_entropy(task), batches(task, client, round=round), task.recipe.lr)
            for client in range(len(SIZES))
        ]
        before, after = copy.deepcopy(model.state_dict()), mean(trained, SIZES)
        values = dict(after.state_dict())
        for name in learned:
            values[name], m[name], v[name] = plain_step(
                kind, before[name], m[name], v[name], values[name] - before[name]
            )
        after.load_state_dict(values)
        model = after
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_papers_algorithm(kind):
    task = ragged_task(SIZES)
    _, models, _ = run(with_server_optimizer(make("fedavg"), optimizer(kind)), task)
    expected = lane(plain_fedopt(kind, ragged_task(SIZES)))
    assert_close(models[0, None], expected, 1e-10)
    _, plain, _ = run(make("fedavg"), task)
    assert (plain[0, None]["out.weight"] - expected["out.weight"]).abs().max() > 1e-3


def test_momentum_is_torchs():
    """torch.optim.SGD with momentum on the gradient −Δ takes the same steps."""
    torch.manual_seed(0)
    start = torch.randn(1, 4, dtype=torch.float64)
    weight = start.clone().requires_grad_()
    torch_optimizer = torch.optim.SGD([weight], lr=0.7, momentum=0.9)
    ours = ServerOptimizer("avgm", 0.7, 0.9, 0, 1)
    model = {"w": start}
    state = ours.init_state(model)
    for _ in range(ROUNDS):
        change = torch.randn(1, 4, dtype=torch.float64)
        weight.grad = -change
        torch_optimizer.step()
        model, state = ours.step(model, {"w": change}, state)
    assert_close(model, {"w": weight.detach()}, 1e-12)


def test_momentum_without_memory_is_fedavg():
    task, forgetful = ragged_task(SIZES), ServerOptimizer("avgm", 1.0, 0.0, 0.99, 0.001)
    ours = run(with_server_optimizer(make("fedavg"), forgetful), task)[1]
    assert_close(ours[0, None], run(make("fedavg"), task)[1][0, None], 1e-12)


def test_adam_is_the_proof_methods_fedadam():
    task = ragged_task(SIZES)
    proof = FedAdam(server_lr=0.03, beta1=0.9, beta2=0.95, tau=0.002)
    ours = run(with_server_optimizer(make("fedavg"), optimizer("adam")), task)
    theirs = run(proof, task)
    same_rows(ours[0], theirs[0], 1e-12)
    assert_close(ours[1][0, None], theirs[1][0, None], 1e-12)


def test_what_does_not_learn_is_averaged_as_before():
    """A round from the same model: buffers are the mean, what learns takes another step."""
    task = ragged_task(SIZES)
    ours = run(with_server_optimizer(make("fedavg"), optimizer("adam")), task, rounds=1)[1]
    plain = run(make("fedavg"), task, rounds=1)[1]
    buffers = {name for name in plain[0, None] if name not in task.trainable}
    unchanged = {n for n, value in plain[0, None].items() if torch.equal(ours[0, None][n], value)}
    # A bias before batch normalisation has no gradient, so it never moves.
    assert buffers == unchanged - {"conv.bias"}


# --- every method ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_methods())
def test_every_method_takes_it_or_refuses_it(name):
    method = make(name, QUICK.get(name))
    if name.removesuffix("+ala") in REFUSING:
        for kind in KINDS:
            with pytest.raises(UserError, match=f"{kind} is refused for .*: .+\\."):
                with_server_optimizer(method, optimizer(kind))
        return
    task = ragged_task([5, 3])
    options = {"rounds": 1, "join_ratio": 1.0}
    _, plain, _ = run(method, task, **options)
    for kind in KINDS:
        chosen = with_server_optimizer(method, optimizer(kind, lr=0.5))
        assert chosen.name == name
        assert chosen.title.startswith(f"{method.title} (server ")
        rows, models, _ = run(chosen, task, seeds=(0, 1), lanes=1 + KINDS.index(kind), **options)
        assert len(rows) == 4
        moved = [n for n, v in plain[0, None].items() if not torch.equal(models[0, None][n], v)]
        assert moved


@pytest.mark.parametrize("name", ["fedavg", "ditto+ala", "fedrep"])
def test_lanes_are_independent_over_rounds(name):
    """One client after another or all together, two seeds or one: all the same."""
    chosen = with_server_optimizer(make(name), optimizer("yogi"))
    task, options = ragged_task(SIZES), {"rounds": 3, "join_ratio": 0.6}
    rows, models, _ = run(chosen, task, seeds=(3, 4), lanes=1, **options)
    single_rows, single, _ = run(chosen, task, seeds=(4,), **options)
    same_rows([row for row in rows if row.seed == 4], single_rows, 1e-9)
    for key, model in single.items():
        assert_close(models[key], model, 1e-10)


def test_a_method_with_its_own_server_step_refuses_it():
    @dataclass(frozen=True)
    class Own(Method):
        name, title, summary = "own", "Own", ""

        def aggregate(self, server, uploads, server_round):
            return server

    with pytest.raises(UserError, match="refused for Own: its server does more than average"):
        with_server_optimizer(Own(), optimizer("adam"))


# --- in a run -------------------------------------------------------------------------------------


def test_resumed_is_uninterrupted(tmp_path):
    options = {"seeds": 2, "server_optimizer": "yogi", "set": {"ala.max_epochs": 2}}
    execute(planned("fedrep+ala", **options), tmp_path / "whole")
    interrupted(tmp_path / "parts", 2, "fedrep+ala", **options)
    same(tmp_path / "whole", tmp_path / "parts")


def test_its_options_reach_it_and_are_written_down():
    planned_run = planned("fedavg", server_optimizer="adam", server_momentum=0.5, server_tau=0.1)
    [method] = planned_run.methods
    assert method.optimizer == ServerOptimizer("adam", 0.01, 0.5, 0.99, 0.1)
    assert method.title == "FedAvg (server Adam)"
    assert planned_run.config.server_lr == 0.01
    assert planned("fedavg", server_optimizer="avgm").config.server_lr == 1.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"method": "fedavg,pfedme", "server_optimizer": "adam"},
            "adam is refused for pFedMe: it has a server step of its own, pfedme.beta",
        ),
        ({"server_lr": 0.1}, "server_lr has no effect without the server_optimizer avgm"),
        ({"server_optimizer": "avgm", "server_tau": 0.1}, "server_tau has no effect without"),
        ({"server_optimizer": "adagrad", "server_beta2": 0.5}, "server_beta2 has no effect"),
        ({"server_optimizer": "sgd"}, "server_optimizer must be one of none, avgm"),
        ({"server_optimizer": "avgm", "server_momentum": 1.0}, "server_momentum must be at most"),
    ],
)
def test_refusals(options, sentence):
    with pytest.raises(UserError, match=sentence):
        plan(Config.from_values(options))


def test_a_federation_equals_the_simulation(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flower.inprocess import RUN, build_federation, run_in_process
    from flower.test_parity import assert_same_models, assert_same_rows, load_models

    options = {"method": "fedala", "server_optimizer": "adam", "server_lr": 0.05}
    options["set"] = {"ala.max_epochs": 2}
    _, federated = run_in_process(tmp_path, **options)
    simulated = fedala.run(dataset=build_federation(), model=Net, lanes="1", **RUN, **options)
    assert_same_rows(federated.history, simulated.history)
    assert_same_models(load_models(tmp_path), simulated.models)
