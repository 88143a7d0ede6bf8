"""The method that docs/methods/your-own.md builds, as it stands on the page."""

import importlib
import re
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from small import Net, assert_close, ragged_task, same_rows, simulate, start_of
from typer.testing import CliRunner

import fedala.lanes
from fedala.cli.app import app
from fedala.errors import UserError
from fedala.lanes import Message, Uploads, features, trees
from fedala.lanes.heads import Head, extend_model
from fedala.lanes.layers import Cut
from fedala.lanes.uploads import Piece
from fedala.methods import Method, ServerRound, catalogue, find_code, make, register, registry
from fedala.simulation import Simulation

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "your-own.md"
SIZES = [5, 22, 13, 3, 8, 17, 0]
TEXT = PAGE.read_text(encoding="utf-8")


def find_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


METHOD, USE, FEATURES, EXCERPT, MESSAGES, HEAD, TEST = find_blocks("python")
[PROJECT] = find_blocks("toml")
COMMANDS = "".join(find_blocks("sh")).splitlines()
SCAFFOLD = Path(__file__).parents[2] / "src" / "fedala" / "methods" / "scaffold.py"


@pytest.fixture(autouse=True)
def fedsim(tmp_path, monkeypatch):
    """The page's file, imported from a folder of its own; afterwards it has never been there."""
    (tmp_path / "fedsim.py").write_text(METHOD, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module("fedsim")
    del sys.modules["fedsim"]
    del registry._classes()["fedsim"]
    catalogue.cache_clear()


SMALL = "--dataset d.npz --clients 3 --batch-size 50 --partition iid --device cpu"


def test_the_pages_commands_work(own_code, fedsim, monkeypatch):
    """All of them, in their order, with a single round each."""
    (own_code / "fedsim.py").write_text(METHOD, encoding="utf-8")
    monkeypatch.setattr(fedsim, "__file__", str(own_code / "fedsim.py"))
    images = np.random.default_rng(0).integers(0, 255, (60, 16, 16), np.uint8)
    np.savez("d.npz", x=images, y=np.arange(60) % 3)
    lines = [f"fedala run --import fedsim.py --method fedsim --rounds 1 --out runs/mine {SMALL}"]
    for line in COMMANDS:
        rounds = 2 if "--resume" in line else 1
        quick = re.sub(r" --rounds \d+", "", line)
        quick += f" --rounds {rounds}" * line.startswith(("fedala run", "fedala flower"))
        lines.append(quick if "--resume" in line or " new method" in line else f"{quick} {SMALL}")
    assert sum(line.startswith("fedala") for line in lines) == 6
    for line in lines:
        if line.startswith("fedala"):
            answer = CliRunner().invoke(app, line.split()[1:])
            assert answer.exit_code == 0, f"{line}\n{answer.output}"


def test_the_pages_package_adds_the_method(own_code, monkeypatch):
    project = tomllib.loads(PROJECT)
    [(group, points)] = project["project"]["entry-points"].items()
    [(name, value)] = points.items()
    about = own_code / "fedala_fedsim-1.0.dist-info"
    about.mkdir()
    version = project["project"]["version"]
    (about / "METADATA").write_text(f"Name: {project['project']['name']}\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    del registry._classes()["fedsim"]
    monkeypatch.syspath_prepend(own_code)
    monkeypatch.setattr(registry, "_has_loaded_plugins", False)
    monkeypatch.setattr(registry, "_packages", {})
    catalogue.cache_clear()
    assert catalogue()["fedsim"].title == "FedSim"
    assert find_code("fedsim") == ("fedsim", ("fedala-fedsim", "1.0"))
    [file] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert file == "fedsim.py"


@pytest.mark.parametrize("join_ratio", [1.0, 0.5])
def test_lanes_are_independent_over_rounds(join_ratio):
    options = {"seeds": (3, 4), "rounds": 3, "join_ratio": join_ratio}
    _, rows, models = simulate("fedsim", ragged_task(SIZES), lanes=1, **options)
    for lanes in (3, None):
        _, other_rows, other_models = simulate("fedsim", ragged_task(SIZES), lanes=lanes, **options)
        same_rows(rows, other_rows, 1e-9)
        for key in models:
            assert_close(models[key], other_models[key], 1e-10)


def test_the_pages_own_test_passes():
    namespace = {}
    exec(TEST, namespace)
    namespace["test_lanes_are_independent"]()


def test_the_excerpt_is_part_of_a_tested_method():
    source = SCAFFOLD.read_text(encoding="utf-8")
    functions = EXCERPT.strip().split("\n\n\n")
    assert all(textwrap.indent(function, "    ") in source for function in functions)


def add_method(block, **attributes):
    """Return a method with a block's functions; everything that it uses is known to it."""
    namespace = {**vars(fedala.lanes), **vars(features), **vars(trees), "torch": torch}
    namespace |= {"dataclass": dataclass, "Cut": Cut, "Tensor": torch.Tensor}
    namespace["ServerRound"] = ServerRound
    before = set(namespace)
    exec(block, namespace)
    names = {"name": "mine", "title": "Mine", "summary": "of the page", **attributes}
    own = {name: value for name, value in namespace.items() if name not in before}
    return type("Mine", (Method,), names | own)()


def run_method(method, **options):
    """Return the simulation after all rounds, its scores and its models."""
    task, models = ragged_task(SIZES), {}
    simulation = Simulation(method, task, start_of(task), seeds=(3,), **options)
    rows = [
        one.row
        for one in simulation.run(lambda personal: models.update({personal.client: personal.model}))
    ]
    return simulation, rows, models


def test_the_pages_objective_on_features_makes_them_small():
    plain, small = (run_method(add_method(FEATURES, lam=lam), rounds=2)[0] for lam in (0.0, 1.0))
    expected = run_method(make("fedavg"), rounds=2)[0].servers[0]["global"]
    assert_close(plain.servers[0]["global"], expected, 1e-12)

    def measure(simulation):
        task, model = simulation.task, simulation.servers[0]["global"]
        cut = features.find_last_cut(task, model, "Mine")
        lower = cut.lower({name: value[0] for name, value in model.items()}, task.x.double())
        return lower.square().mean().item()

    assert measure(small) < 0.7 * measure(plain)


@pytest.mark.parametrize("join_ratio", [1.0, 0.5])
def test_the_pages_server_sends_each_client_its_own_model(join_ratio):
    """A client gets the mean of what it has uploaded and of all uploads, in any cohort."""
    method = add_method(MESSAGES)
    options = {"rounds": 3, "join_ratio": join_ratio}
    _, rows, models = run_method(method, **options)
    _, other_rows, other_models = run_method(method, lanes=1, **options)
    same_rows(rows, other_rows, 1e-9)
    for client in models:
        assert_close(models[client], other_models[client], 1e-10)
    uploads = Uploads(
        [1, 4],
        torch.tensor([1.0, 3.0]).double(),
        [Piece(Message({"w": torch.tensor([[4.0], [8.0]])}), [0, 1], [1, 4])],
    )
    server = {"global": {"w": torch.zeros(1, 1)}, "models": {"w": torch.zeros(5, 1)}}
    after = method.aggregate(server, uploads, None)
    assert after["global"]["w"].tolist() == [[7.0]]
    sent = method.send(after, ServerRound(0, 1, 1, [4, 0, 1], [1] * 5))
    assert sent.model["w"].tolist() == [[7.5], [0.0], [5.5]]


def test_the_pages_head_adds_parameters():
    namespace = {"Head": Head, "nn": torch.nn, "Tensor": torch.Tensor}
    exec(HEAD, namespace)
    net = extend_model(Net(), namespace["TwoHeads"], "Mine")
    new = {name for name, _ in net.named_parameters()} - {n for n, _ in Net().named_parameters()}
    assert new == {"out.personal.weight", "out.personal.bias"}
    features = torch.ones(2, 6)
    own = torch.nn.functional.linear(features, net.out.weight, net.out.bias)
    assert torch.equal(net.out(features), own + net.out.personal(features))


def test_the_pages_way_to_run_it_runs():
    namespace = {}
    quick = USE.replace("rounds=10", "rounds=1, clients=3, partition='iid', batch_size=50")
    exec(quick, namespace)
    result = namespace["result"]
    assert list(result.methods) == ["fedsim", "fedavg", "local"]
    sent = result.methods["fedsim"].summary()["parameters_per_client_and_round"]["sent"]
    whole = result.methods["fedavg"].summary()["parameters_per_client_and_round"]["sent"]
    assert whole - sent == 512 * 10 + 10


def test_the_upper_layers_are_personal_and_the_others_the_servers():
    simulation, rows, models = simulate(
        "fedsim", ragged_task(SIZES), rounds=2, settings={"fedsim.layers": 2}
    )
    personal = {name for name in simulation.initial[0] if name.startswith(("out.", "hidden."))}
    assert models[0, None].keys() == simulation.initial[0].keys() - personal
    assert (
        rows[0].sent == rows[0].uploaded == sum(value.numel() for value in models[0, None].values())
    )
    for name in simulation.initial[0]:
        if name in personal:
            assert (models[0, 1][name] - models[0, 2][name]).abs().max() > 1e-4
        else:
            assert torch.equal(models[0, 1][name], models[0, None][name])


def test_it_is_known_by_its_name_like_any_other():
    assert catalogue()["fedsim"].title == "FedSim"
    assert make("fedsim", {"fedsim.layers": "2"}).layers == 2
    with pytest.raises(UserError, match=r"fedsim.layers must be at least 1"):
        make("fedsim", {"fedsim.layers": 0})
    with pytest.raises(
        UserError, match=r"fedsim\+ala is refused: the upper layers are not received"
    ):
        make("fedsim+ala")


def test_a_method_may_be_defined_again_but_not_take_anothers_name(fedsim):
    assert register(fedsim.FedSim) is fedsim.FedSim
    for taken in ("fedavg", "fedala", "fedsim"):
        with pytest.raises(UserError, match=f"There is a method {taken} already"):
            register(type("Other", (Method,), {"name": taken}))
