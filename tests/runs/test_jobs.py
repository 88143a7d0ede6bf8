"""Several processes write the run folder that one process writes: to the byte, but for times.

Here a process is a call in this one. `test_a_killed_process…` starts real ones.
"""

import csv
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs.test_resume import planned, same, stop_after
from runs.test_stops import ERRORS, OTHERS

from fedala.errors import UserError
from fedala.io import files
from fedala.runs import devices, job_process, jobs
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.jobs import Jobs, JobsFailed
from fedala.runs.observer import RunObserver, Stopped

#: Three groups: points that differ in their learning rate run side by side.
OPTIONS = {
    "method": "fedala,fedavg,local",
    "sweep": {"lr": "0.1,0.05"},
    "set": {"fedala.max_epochs": 1},
    "checkpoint_every": 1,
    "rounds": 2,
}
LAST = "[lr=0.05]"


class Killed(BaseException):
    """What ends a call as a kill ends a process."""


@dataclass
class Machine:
    """Carries out orders in this process, one after another, as processes would."""

    options: dict
    orders: list[dict] = field(default_factory=list)
    kill_at: tuple[str, int] | None = None
    """A label and a round: a process that sends this row is killed."""
    stop_at: tuple[str, int] | None = None
    """A label and a round: a process that sends this row is asked to stop."""

    def start(self, program, arguments, environment, receive, on_end, order):
        self.orders.append(order)
        return Call(self, receive, on_end, order)


class Call:
    """Stands for a `Worker`, and for the `Parent` in it."""

    def __init__(self, machine, receive, on_end, order):
        self.machine, self.receive, self.stop_signals = machine, receive, []
        self.process, self.code = self, 137
        with suppress(Killed):
            self.code = job_process.carry_out_job(json.loads(json.dumps(order)), self)
        on_end()

    def send(self, **message):
        self.receive(json.loads(json.dumps(message)))
        if message["kind"] == "row":
            place = message["label"], message["content"]["round"]
            if place == self.machine.kill_at:
                raise Killed
            if place == self.machine.stop_at:
                self.stop_signals.append(15)

    def ask_to_stop(self):
        self.stop_signals.append(15)

    def kill(self):
        pass

    def wait(self):
        return self.code


@pytest.fixture
def machine(monkeypatch):
    made = Machine(OPTIONS)

    def plan_job(values, order):
        whole = planned(**made.options)
        return replace(whole, groups=(whole.groups[order["number"]],))

    monkeypatch.setattr(job_process, "_plan_job", plan_job)
    monkeypatch.setattr(jobs, "Worker", made.start)
    return made


def contents(path: Path) -> dict[str, object]:
    """Every file of a run folder without seconds, times and what follows from them."""
    found: dict[str, object] = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_dir() or name in (".lock", "report.html"):
            continue
        if name in ("history.csv", "summary.json", "digests.json"):
            found[name] = {
                "history.csv": _history,
                "summary.json": _summary,
                "digests.json": lambda file: _record(file.parent),
            }[name](file)
        else:
            found[name] = file.read_bytes()
    return found


def _history(file):
    with file.open(newline="") as lines:
        table = csv.DictReader(lines)
        return table.fieldnames, [{**row, "seconds": ""} for row in table]


def _summary(file):
    text = re.sub(r'"(\w*seconds\w*)": [\d.e-]+', r'"\1": 0', file.read_text())
    summary = json.loads(text)
    del summary["command"]
    return summary


def _record(folder):
    """What is recorded, without digests of what has seconds in it."""
    record = RunFolder(folder).record
    methods = {
        name: (one.finished, one.checkpoint, one.models, one.batches, sorted(one.rows))
        for name, one in record.methods.items()
    }
    return list(methods), methods, record.identity, record.versions, record.origin, record.batches


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder that one process writes."""
    out = tmp_path_factory.mktemp("whole") / "run"
    execute(planned(**OPTIONS), out)
    return out


def test_several_processes_write_what_one_writes(whole, machine, tmp_path):
    rows, begun = [], []
    observer = RunObserver(
        on_row=lambda label, row: rows.append((label, row.round)),
        on_begin=lambda label, seeds: begun.append((label, seeds)),
    )
    result = execute(planned(**OPTIONS), tmp_path / "run", jobs=Jobs(2), observer=observer)
    assert contents(tmp_path / "run") == contents(whole)
    assert len(machine.orders) == len(planned(**OPTIONS).groups) == 3
    assert list(result.methods) == list(RunFolder(whole).history())
    assert len(rows) == sum(len(one.history) for one in result.methods.values())
    assert {label for label, _ in begun} == set(result.methods)
    # Nobody resumes what is finished: nothing is started, and nothing changes.
    before = contents(tmp_path / "run")
    execute(planned(**OPTIONS), tmp_path / "run", resume=True, jobs=Jobs(2))
    after = contents(tmp_path / "run")
    assert len(machine.orders) == 3
    assert after.keys() == before.keys()


def test_more_rounds_seeds_and_methods(machine, tmp_path):
    """What can be added to a run can be added by several processes."""
    small = {"method": "fedavg,local", "rounds": 1}
    further = [{**small, "rounds": 2}, {"method": "fedavg,local,ditto", "rounds": 2, "seeds": 2}]
    for name, many in (("one", None), ("several", Jobs)):
        execute(planned(**small), tmp_path / name)
        for options in further:
            machine.options = options
            count = many(2) if many else None
            execute(planned(**options), tmp_path / name, resume=True, jobs=count)
    assert [order["number"] for order in machine.orders] == [0, 1, 0, 1, 2]
    _same_in_any_order(tmp_path / "one", tmp_path / "several")
    one, several = (contents(tmp_path / name) for name in ("one", "several"))
    assert one.keys() == several.keys()
    assert one["digests.json"][1:] == several["digests.json"][1:]


@pytest.mark.parametrize("again", [Jobs, lambda count: None], ids=["processes", "one process"])
def test_a_killed_process_costs_nothing_else(again, whole, machine, tmp_path):
    out = tmp_path / "run"
    machine.kill_at = ("fedala" + LAST, 1)
    with pytest.raises(JobsFailed, match=r"FedALA failed: .*signal 9.*kept in .*resume=") as error:
        execute(planned(**OPTIONS), out, jobs=Jobs(2))
    assert error.value.exit_code == 137
    summary = json.loads((out / "summary.json").read_text())
    assert len(summary["methods"]) == 4  # all but the two points of FedALA
    assert not (out / "jobs").exists()
    machine.kill_at, machine.orders = None, []
    execute(planned(**OPTIONS), out, resume=True, jobs=again(2))
    assert [order["number"] for order in machine.orders] == ([0] if again is Jobs else [])
    same(whole, out) if again is Jobs else _same_in_any_order(whole, out)


def _same_in_any_order(a, b):
    rows = [
        sorted(map(repr, ({**row, "seconds": 0} for row in RunFolder(path).rows("history.csv"))))
        for path in (a, b)
    ]
    assert rows[0] == rows[1]
    found = [
        {name: one for name, one in contents(path).items() if name.endswith(".safetensors")}
        for path in (a, b)
    ]
    assert found[0] == found[1]


def test_all_processes_stop_and_all_continue(whole, machine, tmp_path):
    out = tmp_path / "run"
    machine.stop_at = ("fedala" + LAST, 0)
    stop = []
    observer = RunObserver(should_stop=lambda: bool(stop), on_row=lambda *_: stop.append(1))
    with pytest.raises(Stopped, match=r"^Stopped after 1 rounds of FedALA$") as error:
        execute(planned(**OPTIONS), out, jobs=Jobs(2), observer=observer)
    assert list(error.value.result.methods) == ["fedavg[lr=0.1]", "fedavg[lr=0.05]"]
    assert [order["number"] for order in machine.orders] == [0, 1]
    machine.stop_at = None
    execute(planned(**OPTIONS), out, resume=True, jobs=Jobs(4))
    assert [order["number"] for order in machine.orders] == [0, 1, 0, 2]
    same(whole, out)


def test_a_process_that_is_killed_while_all_stop_is_not_a_fault(whole, machine, tmp_path):
    out, stop = tmp_path / "run", []
    machine.kill_at = ("fedala" + LAST, 1)
    observer = RunObserver(should_stop=lambda: bool(stop), on_row=lambda *_: stop.append(1))
    sentence = (
        r"^Stopped after the last checkpoint of FedALA \(its process was killed by signal 9\)$"
    )
    with pytest.raises(Stopped, match=sentence):
        execute(planned(**OPTIONS), out, jobs=Jobs(2), observer=observer)
    machine.kill_at = None
    execute(planned(**OPTIONS), out, resume=True, jobs=Jobs(2))
    assert [order["number"] for order in machine.orders] == [0, 1, 0, 2]
    same(whole, out)


@pytest.mark.parametrize("name", [*ERRORS, *OTHERS])
@pytest.mark.parametrize("is_stopping", [True, False])
def test_a_gpu_that_fails_between_two_rounds(name, is_stopping, machine, tmp_path, monkeypatch):
    """It may fail wherever a process is: while it stops, its last checkpoint counts."""
    error, ends = {**ERRORS, **OTHERS}[name], []
    parent = SimpleNamespace(stop_signals=[], send=lambda **message: ends.append(message))

    def fail(plan, path, **_):
        if is_stopping:
            parent.stop_signals.append(15)
        raise error

    monkeypatch.setattr(job_process, "execute", fail)
    config = planned(**OPTIONS).config.text()
    order = {"config": config, "device": "cpu", "folder": "run", "job": "run/jobs/0", "number": 0}
    if name in OTHERS or not is_stopping:
        with pytest.raises(type(error)) as raised:
            job_process.carry_out_job(order, parent)
        assert raised.value is error
        assert not ends
    else:
        assert job_process.carry_out_job(order, parent) == 0
        [end] = ends
        assert end["content"]["outcome"] == "interrupted"
        assert end["content"]["reason"].startswith("the GPU failed: ")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space"), UserError("No space.")])
def test_a_disk_that_is_full_before_a_process_starts(error, whole, machine, tmp_path, monkeypatch):
    make_job_folder = jobs.make_job_folder

    def make(folder, number, group):
        if number == 0:
            raise error
        return make_job_folder(folder, number, group)

    whole_record = RunFolder(whole).record
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "make_job_folder", make)
        with pytest.raises(JobsFailed, match=r"^FedALA failed: .*No space\)\. What was") as caught:
            execute(planned(**OPTIONS), tmp_path / "run", jobs=Jobs(1))
    assert caught.value.exit_code == 1
    record = RunFolder(tmp_path / "run").record
    assert [name for name, one in record.methods.items() if one.finished] == [
        name for name in whole_record.methods if not name.startswith("fedala")
    ]
    execute(planned(**OPTIONS), tmp_path / "run", resume=True, jobs=Jobs(1))
    same(whole, tmp_path / "run")


def test_a_stop_before_anything_began(machine, tmp_path):
    with pytest.raises(Stopped, match="Stopped before FedALA, FedAvg, Local"):
        execute(planned(**OPTIONS), tmp_path / "no", jobs=Jobs(2), observer=stop_after(1))


def die(*_, **__):
    raise Killed


@pytest.mark.parametrize("step", ["take_over", "rename", "rmtree"])
def test_the_jobs_of_a_killed_parent_are_gathered(step, machine, tmp_path, monkeypatch):
    """Wherever the first process is killed while it gathers what others did, nothing is lost."""
    machine.options = small = {"method": "fedavg,local", "rounds": 1}
    out = tmp_path / "run"
    execute(planned(**small), tmp_path / "whole")
    places = {"take_over": (RunFolder, step), "rename": (Path, step), "rmtree": (shutil, step)}
    with monkeypatch.context() as patch:
        patch.setattr(*places[step], die)
        with pytest.raises(Killed):
            execute(planned(**small), out, jobs=Jobs(1))
    assert (out / "jobs").is_dir()
    assert list(RunFolder.open(out).history()) in ([], ["fedavg"])  # what a report reads is sound
    execute(planned(**small), out, resume=True)
    same(tmp_path / "whole", out)
    assert not (out / "jobs").exists()


def test_jobs_are_locked_checked_and_replaced(machine, tmp_path, monkeypatch):
    machine.options = small = {"method": "fedavg,local", "rounds": 1}
    out, job = tmp_path / "run", tmp_path / "run" / "jobs" / "0"
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "absorb_job_folder", die)
        with pytest.raises(Killed):
            execute(planned(**small), out, jobs=Jobs(1))
    with files.lock(job / ".lock", "test"):
        for options in ({"resume": True}, {"force": True}):
            with pytest.raises(UserError, match="jobs/0 is in use"):
                execute(planned(**small), out, **options)
    text = (job / "clients.csv").read_text()
    (job / "clients.csv").write_text(text.replace("fedavg,0,1,0,", "fedavg,0,1,9,"))
    with pytest.raises(files.DamagedFile, match=r"clients\.csv is damaged"):
        execute(planned(**small), out, resume=True)
    execute(planned(**small), out, force=True)
    assert not (out / "jobs").exists()


# --- devices -------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 2)


def test_a_device_that_is_not_there_is_refused(two_gpus, monkeypatch):
    names = ("auto", "cpu", "cuda", "cuda:0", "cuda:1")
    found = [str(devices.choose_device(name)) for name in names]
    assert found == ["cuda", "cpu", "cuda", "cuda:0", "cuda:1"]
    with pytest.raises(UserError, match="cuda:7, and there are 2 CUDA devices here: cuda:0 to"):
        devices.choose_device("cuda:7")
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="cuda:1, and there is 1 CUDA device here: cuda:0"):
        devices.choose_device("cuda:1")
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="cuda:0, and there is no CUDA device here"):
        devices.choose_device("cuda:0")
    for name in ("cuda:", "cuda:01", "cuda:-1", "cuda:x", "gpu", ""):
        with pytest.raises(UserError, match="device must be one of"):
            devices.choose_device(name)


def test_processes_share_the_gpus_in_turn(two_gpus, monkeypatch):
    assert devices.share_devices("auto", 5) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    assert devices.share_devices("cuda", 2) == ["cuda:0", "cuda:1"]
    assert devices.share_devices("cuda:1", 2) == ["cuda:1", "cuda:1"]
    assert devices.share_devices("cpu", 2) == ["cpu", "cpu"]
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: False)
    assert devices.share_devices("auto", 2) == ["auto", "auto"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert [devices.share_cores(jobs) for jobs in (1, 3, 16)] == [8, 2, 1]


def test_each_process_of_a_run_gets_its_device(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "share_devices", lambda name, count: ["cpu", "auto"][:count])
    execute(planned(**OPTIONS), tmp_path / "run", jobs=Jobs(9))
    assert {order["device"] for order in machine.orders} == {"cpu", "auto"}
    assert RunFolder(tmp_path / "run").config().device == "cpu"  # the run's own stays


# --- real processes ------------------------------------------------------------------------------

BOMB = """
import os, signal
from fedala.methods import Method, register
from contextlib import suppress
from dataclasses import dataclass

@register
@dataclass(frozen=True)
class Bomb(Method):
    \"\"\"FedAvg that kills a process in a run's second round, if there is a bomb.\"\"\"
    name, title, summary, has_personal_models = "bomb", "Bomb", "like FedAvg", False

    def aggregate(self, *arguments):
        if len(arguments[2].sizes) == 3:  # the rehearsal has other clients
            print("this is not a message")
            for name, process in (("bomb", os.getpid()), ("bomb for the first", os.getppid())):
                if arguments[2].round == 2 and os.path.exists(name):
                    os.kill(process, signal.SIGKILL)
        return super().aggregate(*arguments)
"""


def fedala(here, *words):
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-m", "fedala", "run", *words],
        cwd=here,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_killed_process_and_its_sibling(tmp_path):
    small = "--import bomb.py --method bomb,local --model mlp --clients 3 --rounds 2 --device cpu"
    (tmp_path / "bomb.py").write_text(BOMB)
    (tmp_path / "bomb").touch()
    ended = fedala(tmp_path, *small.split(), "--out", "run", "--jobs", "2")
    assert ended.returncode == 137, ended.stderr
    assert "Bomb failed: its process was killed by signal 9." in ended.stderr
    assert "use fedala run --resume run --import bomb.py" in ended.stderr
    assert ended.stdout == ""
    record = RunFolder(tmp_path / "run").record
    assert {n: one.finished for n, one in record.methods.items()} == {"bomb": False, "local": True}
    assert list(RunFolder(tmp_path / "run").history()) == ["bomb", "local"]


def test_processes_whose_first_one_is_killed_stop_at_a_checkpoint(tmp_path):
    small = "--import bomb.py --method bomb,local --model mlp --clients 3 --device cpu --jobs 2"
    (tmp_path / "bomb.py").write_text(BOMB)
    (tmp_path / "bomb for the first").touch()
    rare = ["--rounds", "5000", "--checkpoint-every", "9999"]
    ended = fedala(tmp_path, *small.split(), *rare, "--out", "run")
    assert ended.returncode == -9
    assert "Traceback" not in ended.stderr
    last = {}
    for job in (tmp_path / "run" / "jobs").iterdir():
        for method, rows in RunFolder(job).history().items():
            last[method] = rows[-1].round
            [checkpoint] = job.glob("checkpoint/*/server-*")
            assert checkpoint.stem == f"server-{last[method] + 1}"  # the round after the evaluation
    assert last["bomb"] < 10
