"""What a GPU can capture: a step whose operations never wait for a number on the host."""

import pytest
import torch
from small import EACH_KIND, ragged_task, simulate
from torch.utils._python_dispatch import TorchDispatchMode

from fedala.lanes.training import EagerRunner, FitStep

#: These read the device's memory on the host, have a size that depends on it, or copy from the
#: host. A CUDA graph allows none of them.
WAITING = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_static", "masked_select"),
    *("_unique2", "unique_dim", "unique_consecutive", "lift_fresh", "lift_fresh_copy"),
}


class NothingWaits(TorchDispatchMode):
    """Refuses operations that wait for the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in WAITING, name
        if name.startswith(("index", "_index")):
            chosen = [one for one in args[1] or () if one is not None] if len(args) > 1 else []
            assert torch.bool not in {one.dtype for one in chosen if torch.is_tensor(one)}, name
        return function(*args, **(kwargs or {}))


@pytest.fixture
def steps(monkeypatch):
    """Watch every step of a training; the fixture lists them."""
    seen, take_step = [], EagerRunner.step

    def watch(self, step, lanes, columns):
        def watched(*arguments):
            seen.append(step)
            with NothingWaits():
                return step(*arguments)

        take_step(self, watched, lanes, columns)

    monkeypatch.setattr(EagerRunner, "step", watch)
    return seen


@pytest.mark.parametrize("name", EACH_KIND)
def test_a_step_of_every_method(steps, name):
    task = ragged_task([5, 9, 4], dtype=torch.float32)
    simulate(name, task, rounds=2)
    assert steps


@pytest.mark.parametrize(
    "wait",
    [
        lambda losses: losses.sum().item(),
        lambda losses: losses[losses > 0],
        lambda losses: losses + torch.tensor([1.0]),
        lambda losses: losses.sum() > 0 or losses,
    ],
)
def test_a_step_that_waits_is_noticed(steps, monkeypatch, wait):
    before = FitStep.__call__

    def step(self, *arguments):
        losses = before(self, *arguments)
        wait(losses)
        return losses

    monkeypatch.setattr(FitStep, "__call__", step)
    with pytest.raises(AssertionError):
        simulate("fedavg", ragged_task([5]), rounds=1)
