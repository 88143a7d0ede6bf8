"""Processes that share a GPU get an MPS daemon, which ends with the command.

NVIDIA's program is a stand-in here. `tests/cuda/test_gpu_mps.py` has the real one.
"""

import io
import os
import re
import signal
import stat
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from mps_stand_in import NOTES, PROGRAM, StandIn
from runs.test_jobs import OPTIONS, machine  # noqa: F401
from runs.test_resume import planned

from fedala.cells import processes
from fedala.runs import jobs, mps, mps_daemon
from fedala.runs.execute import execute
from fedala.runs.jobs import Jobs, JobsFailed
from fedala.runs.observer import RunObserver, Stopped

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
SHARED = ["cuda:0", "cuda:0"]


@pytest.fixture
def control(tmp_path, monkeypatch):
    """The stand-in, first on the PATH, on a machine where processes can use GPUs by MPS."""
    folder = tmp_path / "bin"
    folder.mkdir()
    made = StandIn(folder)
    made.install()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name in (PIPES, "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES", mps.SWITCH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mps, "_serves", lambda environment, gpus: True)
    yield made
    for number in made.living:
        os.kill(number, signal.SIGKILL)


def test_processes_that_share_a_gpu_get_a_daemon_of_their_own(control):
    said = []
    with mps.share_gpus(["cuda:0", "cuda:1", "cuda:0"], said.append) as environment:
        folder = environment[PIPES]
        logs = f"{folder}/logs"
        assert environment == {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": logs}
        assert Path(logs).is_dir()
        assert PIPES not in os.environ  # this process is not a client
        assert len(f"{folder}/control_privileged") < 60
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
        assert len(control.living) == 1
        assert control.calls == [["get_server_list", "", "", ""], ["-d", folder, logs, ""]]
    assert control.has_ended(0.1)
    assert control.calls[2:] == [
        ["get_server_list", folder, logs, ""],
        ["quit", folder, logs, ""],
    ]
    assert not said


@pytest.mark.parametrize(
    ("devices", "setting"),
    [
        (["cuda:0"], {}),
        (["cuda:0", "cuda:1"], {}),
        (["cpu", "cpu"], {}),
        (["auto", "auto"], {}),
        (["cuda:0"] * 49, {}),
        (SHARED, {mps.SWITCH: "off"}),
        (SHARED, {PIPES: "/tmp/mine"}),
        (SHARED, {"PATH": "/nowhere"}),
    ],
    ids=["one", "one each", "cpu", "no gpu", "too many", "off", "users", "not installed"],
)
def test_no_daemon_starts_in_silence(devices, setting, control, monkeypatch):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    with mps.share_gpus(devices, pytest.fail) as environment:
        assert environment == {}
    assert control.calls == []


@pytest.mark.parametrize("state", ["own", "hangget_server_list"])
def test_a_daemon_of_the_user_is_left_alone(state, control, monkeypatch):
    monkeypatch.setattr(mps_daemon, "_ANSWER", 0.3)
    control.let(state)
    with mps.share_gpus(SHARED, pytest.fail) as environment:
        assert environment == {}
    assert control.commands == ["get_server_list"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Stopped])
def test_the_daemon_ends_with_an_error(error, control):
    def fail():
        with mps.share_gpus(SHARED, pytest.fail):
            assert control.living
            raise error

    with pytest.raises(error):
        fail()
    assert control.has_ended(0.1)


@pytest.mark.parametrize("fault", ["daemon", "client"])
def test_without_a_daemon_work_continues_with_a_sentence(fault, control, monkeypatch):
    said = []
    if fault == "daemon":
        control.let("fail-d")
    else:
        monkeypatch.setattr(mps, "_serves", lambda environment, gpus: False)
    with mps.share_gpus(SHARED, said.append) as environment:
        assert environment == {}
        assert control.has_ended(0.1)  # one that is of no use does not wait
    assert said == [
        "NVIDIA's MPS could not be started, so processes that share a GPU take turns. "
        "FEDALA_MPS=off does without it."
    ]


def test_a_client_that_fails_or_hangs_has_no_use_for_it(control, monkeypatch):
    monkeypatch.undo()
    assert not mps._serves({}, [99])  # no driver, or no such GPU
    monkeypatch.setattr(mps, "_CLIENT", "import time; time.sleep(600)")
    monkeypatch.setattr(mps, "_FIRST_CLIENT", 0.3)
    assert not mps._serves({}, [0])
    monkeypatch.setattr(mps, "_FIRST_CLIENT", 30.0)
    text = (
        "import os, sys; raise SystemExit(os.environ['X'] + str(sys.argv[1:]) != \"y['0', '2']\")"
    )
    monkeypatch.setattr(mps, "_CLIENT", text)
    assert mps._serves({"X": "y"}, [0, 2])


@pytest.mark.parametrize("word", ["-d", "quit", "get_server_list"])
def test_a_program_that_hangs(word, control, monkeypatch, capsys):
    """The process that keeps the daemon, in this one: it waits a moment, then it kills."""
    for name in ("_ANSWER", "_QUIT", "_END"):
        monkeypatch.setattr(mps_daemon, name, 0.5)
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    control.let(f"hang{word}")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    try:
        mps_daemon.main()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, before[number])
    assert bool(capsys.readouterr().out) == (word != "-d")
    assert control.has_ended(0.1)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, {}),
        ("", {}),
        ("GPU-8932f937,GPU-1", {}),
        ("MIG-4d2a", {}),
        ("2,0", {"CUDA_VISIBLE_DEVICES": "GPU-a0,GPU-a1"}),
    ],
)
def test_numbers_of_gpus_become_names(given, found, monkeypatch):
    """The daemon hides GPUs, and its clients would count those that are left."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr(mps.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        mps.torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"a{number}")
    )
    assert mps._name_gpus() == found


def test_daemon_and_clients_get_the_names(control, monkeypatch):
    monkeypatch.setattr(mps, "_name_gpus", lambda: {"CUDA_VISIBLE_DEVICES": "GPU-a0"})
    with mps.share_gpus(SHARED, pytest.fail) as environment:
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-a0"
        assert control.calls[-1][-1] == "GPU-a0"


# --- the commands that start processes -----------------------------------------------------------


@pytest.mark.parametrize("end", ["success", "error", "stop"])
def test_the_processes_of_a_run_are_clients(end, control, machine, tmp_path, monkeypatch):  # noqa: F811
    environments, stop = [], []

    def start(program, arguments, environment, *others):
        environments.append(environment[PIPES])
        assert len(control.living) == 1
        return machine.start(program, arguments, environment, *others)

    monkeypatch.setattr(jobs, "Worker", start)
    monkeypatch.setattr(jobs, "share_devices", lambda name, count: ["cuda:0"] * count)
    observer = RunObserver(should_stop=lambda: bool(stop), on_row=lambda *_: stop.append(1))
    if end == "error":
        machine.kill_at = ("fedavg[lr=0.05]", 1)
    with {
        "success": nullcontext(),
        "error": pytest.raises(JobsFailed),
        "stop": pytest.raises(Stopped),
    }[end]:
        watch = observer if end == "stop" else None
        execute(planned(**OPTIONS), tmp_path / "run", jobs=Jobs(2), observer=watch)
    assert control.has_ended(0.1)
    assert control.commands.count("-d") == 1
    assert len(environments) == (2 if end == "stop" else 3)
    assert set(environments) == {control.calls[1][1]}


@pytest.mark.parametrize("end", ["success", "interrupt"])
def test_the_processes_of_cells_are_clients(end, control, monkeypatch):
    environments = []

    class Worker:
        def __init__(self, module, arguments, environment, receive):
            environments.append(environment[PIPES])
            self.process = SimpleNamespace(kill=lambda: None)

        @property
        def is_running(self):
            if end == "interrupt":
                raise KeyboardInterrupt
            return False

        def wait(self):
            assert len(control.living) == 1
            return 0

    monkeypatch.setattr(processes, "Worker", Worker)
    with pytest.raises(KeyboardInterrupt) if end == "interrupt" else nullcontext():
        processes.run_processes(["paper", "run"], [*SHARED, "cuda:1"], None)
    assert control.has_ended(0.1)
    assert environments == [control.calls[1][1]] * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_daemon_of_a_real_command_ends_with_it(number, control, tmp_path):
    """All processes are asked to stop together, as a cluster does it."""
    (tmp_path / "note.py").write_text(NOTES)
    words = (
        "run --import note.py --method noted,local --dataset digits --model mlp --clients 3 "
        "--rounds 100000 --checkpoint-every 1 --device cpu --jobs 2 --out run"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", PROGRAM, *words.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as process:
        try:
            _wait_for_rounds(tmp_path / "run", process)
            assert len(control.living) == 1
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            process.send_signal(number)
            if number == signal.SIGTERM:
                for child in children.split():
                    os.kill(int(child), number)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert control.has_ended(60 if number == signal.SIGKILL else 0.1)
    noted = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    folder = control.calls[1][1]
    assert [pipes == folder for _, pipes in noted] == [False, True, True]
    assert noted[0] == [str(process.pid), "-"]
    if number == signal.SIGTERM:
        assert process.returncode == 128 + number, errors
        stopped = (
            r"Stopped after \d+ rounds of \w+, \d+ rounds of \w+; to resume it, use fedala run"
        )
        assert re.search(stopped, errors)
        assert "Traceback" not in errors


def _wait_for_rounds(folder, process):
    deadline = time.monotonic() + 120
    files = [folder / "jobs" / job / "history.csv" for job in ("0", "1")]
    while not all(file.exists() and len(file.read_text().splitlines()) > 3 for file in files):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
