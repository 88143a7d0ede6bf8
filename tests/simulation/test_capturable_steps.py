"""What a GPU can capture: steps that read no number on the host, and use no tensor of the host.

They run on tensors without memory (PyTorch's meta device), which allow neither.
"""

from functools import partial

import pytest
import torch
from small import EACH_KIND, ragged_task, simulate, start_of

from fedala.lanes import row_gradients
from fedala.lanes.training import EagerRunner, FitStep
from fedala.lanes.trees import tree_map
from fedala.lanes.weight_steps import HeadStep, WeightStep
from fedala.methods import make
from fedala.models import fasttext
from fedala.models.lstm import token_lstm
from fedala.simulation import Simulation


def drop_memory(value):
    if not torch.is_tensor(value):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@pytest.fixture
def devices(monkeypatch):
    """Take every step on tensors without memory, too; the fixture has the losses' devices."""
    seen, take_step = {}, EagerRunner.step

    def take_twice(step, task, *arguments):
        losses = step(task, *(tree_map(drop_memory, one) for one in arguments))
        seen.setdefault(type(step), set()).add(losses.device.type)
        return step(task, *arguments)

    def watch(self, step, lanes, columns):
        take_step(self, partial(take_twice, step), lanes, columns)

    monkeypatch.setattr(EagerRunner, "step", watch)
    return seen


@pytest.mark.parametrize("name", EACH_KIND)
def test_a_step_of_every_method(devices, name):
    simulate(name, ragged_task([5, 9, 4], dtype=torch.float32), rounds=1)
    assert devices
    assert all(found == {"meta"} for found in devices.values())


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "per-fedavg", "apple", "apfl", "scaffold"])
@pytest.mark.parametrize("make_model", [fasttext, token_lstm])
def test_a_step_on_rows_of_a_large_table(devices, monkeypatch, name, make_model):
    monkeypatch.setattr(row_gradients, "LEAST_ROWS", 10)
    task = ragged_task([5, 9, 4], dtype=torch.float32, model=make_model(30, 3, 4))
    task.x = torch.arange(len(task.x) * 6).view(-1, 6) % 30
    simulation = Simulation(make(name), task, start_of(task, lambda: make_model(30, 3, 4)))
    simulation.step(1, train=True)
    assert task.embeddings
    assert devices
    assert all(found == {"meta"} for found in devices.values())


@pytest.mark.parametrize("name", ["fedala", "fedrep+ala"])
@pytest.mark.parametrize("layers", [1, 2, "conv,hidden"])
def test_a_step_of_weight_learning(devices, name, layers):
    section = "fedala" if name == "fedala" else "ala"
    settings = {f"{section}.layers": layers, f"{section}.max_epochs": 2}
    simulate(name, ragged_task([5, 9, 4], dtype=torch.float32), rounds=2, settings=settings)
    kind = HeadStep if (name, layers) == ("fedala", 1) else WeightStep
    assert devices[kind] == {"meta"}


@pytest.mark.parametrize(
    "wait",
    [
        lambda losses: losses.sum().item(),
        lambda losses: losses[losses > 0],
        lambda losses: losses + torch.tensor([1.0]),
        lambda losses: losses.sum() > 0 or losses,
    ],
)
def test_a_step_that_waits_is_noticed(devices, monkeypatch, wait):
    before = FitStep.__call__

    def step(self, *arguments):
        losses = before(self, *arguments)
        wait(losses)
        return losses

    monkeypatch.setattr(FitStep, "__call__", step)
    with pytest.raises((RuntimeError, NotImplementedError)):
        simulate("fedavg", ragged_task([5]), rounds=1)
