"""A GPU that fails while a run is stopping: the last checkpoint stands, and resuming is exact."""

import signal
from contextlib import contextmanager, nullcontext

import pytest
import torch
from runs.test_resume import planned, same
from typer.testing import CliRunner

from fedala.cli.app import app
from fedala.runs.devices import is_device_error, use_device
from fedala.runs.execute import execute
from fedala.runs.observer import RunObserver, Stopped
from fedala.simulation import Simulation

#: What torch raises since version 2.8.
AcceleratorError = getattr(torch, "AcceleratorError", RuntimeError)
LAUNCH = "CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA to see more.\n"
ERRORS = {
    "torch": AcceleratorError(LAUNCH),
    "older torch": RuntimeError(LAUNCH),
    "mps": RuntimeError("CUDA error: MPS client terminated"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    "triton": RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
}
OTHERS = {
    "program": RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x12 and 13x6)"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. CUDA error: out of memory"),
    "value": ValueError("CUDA error"),
}


@pytest.mark.parametrize("name", [*ERRORS, *OTHERS])
def test_which_errors_say_that_a_gpu_has_failed(name):
    assert is_device_error({**ERRORS, **OTHERS}[name]) == (name in ERRORS)


@pytest.fixture
def fail(monkeypatch):
    """Let the server's part of a round fail; `before` is called first."""

    def arrange(round, error, before=lambda: None):
        aggregate = Simulation._aggregate

        def failing(self, work):
            if work.request.round == round:
                before()
                raise error
            return aggregate(self, work)

        monkeypatch.setattr(Simulation, "_aggregate", failing)

    return arrange


@pytest.mark.parametrize(
    ("name", "round", "kept"), [("torch", 4, 2), ("older torch", 1, 0), ("triton", 3, 2)]
)
def test_the_last_checkpoint_stands_and_the_run_resumes(
    name, round, kept, fail, monkeypatch, tmp_path
):
    execute(planned(checkpoint_every=2), tmp_path / "whole")
    stop = []
    fail(round, ERRORS[name], lambda: stop.append(signal.SIGTERM))
    observer = RunObserver(should_stop=lambda: bool(stop))
    sentence = rf"^Stopped after {kept} rounds of FedALA: the GPU failed in a later one \("
    with pytest.raises(Stopped, match=sentence) as stopped:
        execute(planned(checkpoint_every=2), tmp_path / "run", observer=observer)
    assert "\n" not in str(stopped.value)
    # A method without an evaluation has no result.
    assert list(stopped.value.result.methods) == (["fedala"] if kept else [])
    monkeypatch.undo()
    execute(planned(checkpoint_every=2), tmp_path / "run", resume=True)
    same(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize(
    ("error", "stops"),
    [(ERRORS["torch"], False), (OTHERS["program"], True), (OTHERS["value"], True)],
    ids=["not stopping", "program", "value"],
)
def test_other_errors_are_those_of_the_run(error, stops, fail, tmp_path):
    stop = []
    fail(3, error, lambda: stop.append(stops))
    observer = RunObserver(should_stop=lambda: any(stop))
    with pytest.raises(type(error)) as raised:
        execute(planned(), tmp_path / "run", observer=observer)
    assert raised.value is error


def test_the_command_ends_with_a_sentence_and_the_signals_exit_code(fail, tmp_path):
    fail(3, ERRORS["torch"], lambda: signal.raise_signal(signal.SIGTERM))
    out = tmp_path / "run"
    arguments = (
        "run --method fedavg --dataset digits --model mlp --clients 3 --batch-size 200 "
        f"--rounds 4 --checkpoint-every 1 --device cpu --out {out}"
    )
    found = CliRunner().invoke(app, arguments.split())
    assert found.exit_code == 128 + signal.SIGTERM, found.output
    last = " ".join(found.output.split())
    assert last.endswith(
        "Stopped after 2 rounds of FedAvg: the GPU failed in a later one (CUDA error: unspecified "
        f"launch failure); to resume it, use fedala run --resume {out}."
    )
    assert "Traceback" not in found.output


# --- the end of the work on a GPU -----------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is not there; it notes what happens, and fails if it is told to."""

    class Gpu:
        def __init__(self):
            self.events, self.has_failed = [], False

        def check(self):
            if self.has_failed:
                raise AcceleratorError(LAUNCH)

        def synchronize(self, device):
            self.events.append("wait")
            self.check()

        @contextmanager
        def fork_rng(self, devices):
            assert devices == [torch.device("cuda")]
            try:
                yield
            finally:
                self.events.append("restore")
                self.check()

    made = Gpu()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(torch.random, "fork_rng", made.fork_rng)
    return made


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, Stopped])
def test_a_gpu_has_nothing_left_to_do_at_the_end(error, gpu):
    with pytest.raises(error) if error else nullcontext(), use_device(torch.device("cuda")):
        gpu.events.append("work")
        if error:
            raise error
    assert gpu.events == ["work", "wait", "restore"]


@pytest.mark.parametrize(
    "error",
    [Stopped("as asked"), AcceleratorError(LAUNCH)],
    ids=["stopped", "failed"],
)
def test_an_error_of_the_end_does_not_hide_the_one_before(error, gpu):
    gpu.has_failed = True
    with pytest.raises(type(error)) as raised, use_device(torch.device("cuda")):
        raise error
    assert raised.value is error
    assert gpu.events == ["wait", "restore"]


def test_a_gpu_that_fails_at_a_good_end_says_so(gpu):
    with pytest.raises(AcceleratorError), use_device(torch.device("cuda")):
        gpu.has_failed = True
