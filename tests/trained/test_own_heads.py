"""Models with parameters that a user's method adds are rebuilt by code that the user names."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from trained.worlds import PIXELS, Y, run
from typer.testing import CliRunner

from fedala import UserError, load
from fedala.cli.app import app
from fedala.methods import catalogue, registry

METHOD = """
from torch import nn
from fedala.lanes.heads import Head
from fedala.methods import Method

class TwoHeads(Head):
    def __init__(self, last):
        super().__init__(last)
        self.personal = nn.Linear(last.in_features, last.out_features)

    def forward(self, features):
        return super().forward(features) + self.personal(features)

class Mine(Method):
    name, title, summary = "mine", "Mine", "FedAvg with two heads"
    has_personal_models = True
    head = TwoHeads

class Plain(Method):
    name, title, summary = "plain", "Plain", "FedAvg"
    has_personal_models = True
"""
COMMANDS = {
    "predict": "predict run --method mine --client 1 --data bare.npz --out answers.csv",
    "evaluate": "evaluate run --method mine --data new.npz",
    "export": "export run --method mine --client 1 --out model.safetensors",
}


@pytest.fixture
def place(own_code):
    """A run of methods that this process no longer knows, and data for its models."""
    Path("mine.py").write_text(METHOD)
    run("run", method="mine,plain", imports="mine.py")
    np.savez("new.npz", x=PIXELS[:15], y=Y[:15])
    np.savez("bare.npz", x=PIXELS[:15])
    forget()
    return own_code


def forget():
    del sys.modules["mine"]
    for name in ("mine", "plain"):
        del registry._classes()[name]
    catalogue.cache_clear()


def call(command):
    return CliRunner().invoke(app, command.split(), prog_name="fedala")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_the_method_that_is_named(place, command):
    answer = call(f"{COMMANDS[command]} --import mine.py")
    assert answer.exit_code == 0, answer.output
    trained = load("run", "mine")
    weights = trained.personal(1).state_dict()
    assert "fc2.personal.weight" in weights
    if command == "predict":
        rows = Path("answers.csv").read_text().splitlines()[1:]
        expected = trained.predict(PIXELS[:15], 1).tolist()
        assert [row.split(",")[1] for row in rows] == expected
    if command == "export":
        saved = load_file("model.safetensors")
        assert saved.keys() == weights.keys()
        assert all(torch.equal(saved[name], value) for name, value in weights.items())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_executes_nothing_that_the_folder_alone_names(place, command):
    Path("mine.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    answer = call(COMMANDS[command])
    assert answer.exit_code == 2
    assert "the method mine has added. It is a method of your own" in answer.stderr
    assert "--import mine.py" in answer.stderr
    assert not Path("executed").exists()
    assert not Path("model.safetensors").exists()
    assert not Path("answers.csv").exists()
    assert call(f"{COMMANDS[command]} --import mine.py").exit_code == 2  # it has no method
    assert Path("executed").exists()


def test_in_python_a_method_is_imported_or_named(place):
    trained = load("run", "mine")
    with pytest.raises(UserError, match=r"only if you name it: imports='mine.py'\."):
        trained.personal(1)
    expected = load("run", "mine", imports="mine.py").predict(PIXELS, 1)
    forget()
    sys.path.insert(0, str(place))
    registry.register_module(importlib.import_module("mine"))
    assert (trained.predict(PIXELS, 1) == expected).all()


def test_a_method_that_adds_nothing_needs_no_import(place):
    assert load("run", "plain").predict(PIXELS, 1).shape == Y.shape
    answer = call(COMMANDS["evaluate"].replace("mine", "plain"))
    assert answer.exit_code == 0, answer.output
