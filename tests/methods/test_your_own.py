"""The method that docs/methods/your-own.md builds, as it stands on the page."""

import importlib
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from small import assert_close, ragged_task, same_rows, simulate

from fedala.errors import UserError
from fedala.methods import Method, catalogue, make, register, registry

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "your-own.md"
SIZES = [5, 22, 13, 3, 8, 17, 0]
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
METHOD, USE, EXCERPT, TEST = BLOCKS
SCAFFOLD = Path(__file__).parents[1] / "proof" / "scaffold.py"


@pytest.fixture(autouse=True)
def fedper(tmp_path, monkeypatch):
    """The page's file, imported from a folder of its own; afterwards it has never been there."""
    (tmp_path / "fedper.py").write_text(METHOD, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module("fedper")
    del sys.modules["fedper"]
    del registry._classes()["fedper"]
    catalogue.cache_clear()


@pytest.mark.parametrize("join_ratio", [1.0, 0.5])
def test_lanes_are_independent_over_rounds(join_ratio):
    options = {"seeds": (3, 4), "rounds": 3, "join_ratio": join_ratio}
    _, rows, models = simulate("fedper", ragged_task(SIZES), lanes=1, **options)
    for lanes in (3, None):
        _, other_rows, other_models = simulate("fedper", ragged_task(SIZES), lanes=lanes, **options)
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


def test_the_pages_way_to_run_it_runs():
    namespace = {}
    quick = USE.replace("rounds=10", "rounds=1, clients=3, partition='iid', batch_size=50")
    exec(quick, namespace)
    result = namespace["result"]
    assert list(result.methods) == ["fedper", "fedavg", "local"]
    sent = result.methods["fedper"].summary()["parameters_per_client_and_round"]["sent"]
    whole = result.methods["fedavg"].summary()["parameters_per_client_and_round"]["sent"]
    assert whole - sent == 512 * 10 + 10


def test_the_upper_layers_are_personal_and_the_others_the_servers():
    simulation, rows, models = simulate(
        "fedper", ragged_task(SIZES), rounds=2, settings={"fedper.layers": 2}
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
    assert catalogue()["fedper"].title == "FedPer"
    assert make("fedper", {"fedper.layers": "2"}).layers == 2
    with pytest.raises(UserError, match=r"fedper.layers must be at least 1"):
        make("fedper", {"fedper.layers": 0})
    with pytest.raises(
        UserError, match=r"fedper\+ala is refused: the upper layers are not received"
    ):
        make("fedper+ala")


def test_a_method_may_be_defined_again_but_not_take_anothers_name(fedper):
    assert register(fedper.FedPer) is fedper.FedPer
    for taken in ("fedavg", "fedala", "fedper"):
        with pytest.raises(UserError, match=f"There is a method {taken} already"):
            register(type("Other", (Method,), {"name": taken}))
