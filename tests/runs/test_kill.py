"""Killed at any moment, a run goes on to the end that it would have had.

A few kills by default. FEDALA_KILLS sets how many (`make test-kill`: a hundred), FEDALA_KILL_SEED
which ones.
"""

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from corrupt.worlds import accuracies
from runs.test_resume import planned, same
from small import QUICK

from fedala.methods import list_methods, make
from fedala.runs.execute import execute
from fedala.runs.tables import TABLES, Tables

KILLS = int(os.environ.get("FEDALA_KILLS", "4"))
SEED = int(os.environ.get("FEDALA_KILL_SEED", "1"))
ROUNDS = 20

CHILD = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
import torch
torch.set_num_threads(1)
from fedala.errors import RunError
from fedala.runs.execute import execute
from runs.test_resume import planned

path = Path(sys.argv[1])
work = planned("fedala,ditto", rounds=int(sys.argv[2]), checkpoint_every=1, join_ratio=0.5, seeds=2)
print("ready", flush=True)
try:
    begun = (path / "config.toml").exists()
    execute(work, path, resume=begun, force=path.exists() and not begun)
except RunError as error:
    sys.exit(str(error))
"""


def child(path: Path, rounds: int = ROUNDS) -> "subprocess.Popen[str]":
    here = Path(__file__).parents[1]
    code = CHILD.format(path=[str(here.parent / "src"), str(here)])
    command = [sys.executable, "-W", "ignore", "-c", code, str(path), str(rounds)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    began = time.monotonic()
    with child(path) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return path, time.monotonic() - began


def test_killed_at_random_moments(whole, tmp_path):
    reference, seconds = whole
    moments = random.Random(1)
    path, killed = tmp_path / "run", 0
    while killed < 2:
        with child(path) as process:
            try:
                process.wait(timeout=moments.uniform(0, 1.5 * seconds / 2))
            except subprocess.TimeoutExpired:
                process.kill()
                killed += 1
                continue
            assert process.returncode == 0, process.stderr.read()
        same(reference, path)
        path = tmp_path / f"run-{killed}"  # it came to its end: begin with another
    with child(path) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    same(reference, path)


# --- configurations drawn at random --------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A configuration, as `planned` takes it."""

    method: str
    options: dict[str, Any]
    fewer: int | None
    """Rounds that the run is first asked for, if it gets the rest by a resume."""

    def __str__(self) -> str:
        options = ", ".join(
            f"{name}={value}" for name, value in self.options.items() if name != "set"
        )
        return f"{self.method}: {options}, fewer={self.fewer}"


#: Ways to train. PartialFed takes none that remembers earlier steps.
TRAININGS: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer": "adamw", "lr": 0.01, "keep_optimizer": True},
    {"momentum": 0.9, "clip": 1.0, "keep_optimizer": True, "schedule": "exponential"},
)


def draw(rng: random.Random) -> Drawn:
    """Draw methods, ρ, seeds, memory limits, training, evaluation, stops, lanes, checkpoints."""
    methods = rng.sample(list_methods(), rng.choice((1, 1, 1, 2, 3)))
    made = [make(name) for name in methods]
    options: dict[str, Any] = {
        "rounds": rng.choice((3, 4, 5)),
        "join_ratio": 1.0
        if any(method.requires_all_clients for method in made)
        else rng.choice((1.0, 0.5)),
        "seeds": rng.choice((1, 2)),
        "client_memory": rng.choice((None, 0.0)),
        "save_best": rng.choice((None, True)),
        "patience": rng.choice((None, None, 1)),
        "feature_memory": rng.choice((None, 0.0)),
        "eval_every": rng.choice((1, 2, 3)),
        "eval_clients": rng.choice(("all", "joined")),
        "evaluate": rng.choice(("initialized", "trained,global")),
        "sweep": rng.choice(({}, {}, {"lr": "0.1,0.05"})),
        "lanes": rng.choice(("auto", "1", "2", "all")),
        "checkpoint_every": rng.choice((1, 1, 2, None)),
        "keep_checkpoint": rng.choice((True, False)),
        "set": {
            key: value
            for name in methods
            for key, value in QUICK.get(name.split("+")[0], {}).items()
        },
    }
    training = rng.choice(TRAININGS)
    if not any(name.startswith("partialfed") for name in methods):
        options |= training
    growing = options["keep_checkpoint"] and not any(
        method.schedule_depends_on_rounds for method in made
    )
    return Drawn(",".join(methods), options, 2 if growing and rng.random() < 0.4 else None)


#: What changes files, one by one: there, a child can be killed at the so-manieth.
OPERATIONS = ("replace", "fsync", "unlink", "rename", "link", "mkdir", "rmdir")


class Doomed:
    """Counts what changes files, and kills this process before or after the so-manieth of them."""

    def __init__(self, at: int = 0, after: bool = False, torn: int = 0) -> None:
        self.at, self.after, self.torn, self.count = at, after, torn, 0
        for name in OPERATIONS:
            setattr(os, name, self._counted(getattr(os, name)))
        Tables.append = self._appended(Tables.append)  # type: ignore[method-assign]

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.at and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **options)
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted

    def _appended(self, function: Callable[..., None]) -> Callable[..., None]:
        """A line may also be cut short: what is not flushed may get to the disk in part."""

        def appended(tables: Tables, name: str, lines: Any) -> None:
            self.count += 1
            dies, path = self.count == self.at, tables.path / name
            if dies and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            size = path.stat().st_size if path.exists() else 0
            function(tables, name, lines)
            if dies:
                os.truncate(path, max(size, path.stat().st_size - self.torn))
                os.kill(os.getpid(), signal.SIGKILL)

        return appended


@dataclass
class Runs:
    """A configuration, run in forks of this process: an import of torch would cost seconds."""

    drawn: Drawn
    log: Path
    kills: list[str] = field(default_factory=list)

    def carry_out(
        self, path: Path, rounds: int, doom: Callable[[], Doomed] = Doomed, seconds: float = 0
    ) -> bool:
        """Run or resume in a child, and kill it after some seconds; return whether it ended."""
        child = os.fork()
        if child == 0:
            self._child(path, rounds, doom)
        if seconds:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    return self._ended(status)
                time.sleep(0.001)
            os.kill(child, signal.SIGKILL)
        return self._ended(os.waitpid(child, 0)[1])

    def _ended(self, status: int) -> bool:
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL), (
            f"{self.drawn}, after {self.kills}: {self.log.read_text()}"
        )
        return code == 0

    def _child(self, path: Path, rounds: int, doom: Callable[[], Doomed]) -> None:
        """Never returns."""
        code = 1
        try:
            work = planned(self.drawn.method, **{**self.drawn.options, "rounds": rounds})
            begun = (path / "config.toml").exists()
            doomed = doom()
            execute(work, path, resume=begun, force=path.exists() and not begun)
            self.log.write_text(str(doomed.count))
            code = 0
        except BaseException:
            self.log.write_text(traceback.format_exc())
        finally:
            os._exit(code)


def sort_tables(folder: Path) -> None:
    """Put the lines of each method together."""
    for name in TABLES:
        if (folder / name).exists():
            header, *lines = (folder / name).read_text().splitlines(keepends=True)
            (folder / name).write_text(
                header + "".join(sorted(lines, key=lambda line: line.partition(",")[0]))
            )


def killed_and_resumed(
    drawn: Drawn, place: Path, rng: random.Random, by_operation: bool
) -> list[str]:
    """Kill a run one to three times, let it end, compare it; return the number of kills."""
    runs = Runs(drawn, place / "log")
    rounds = drawn.options["rounds"]
    began = time.monotonic()
    assert runs.carry_out(place / "whole", rounds)
    seconds, operations = time.monotonic() - began, int(runs.log.read_text())
    path = place / "parts"
    if drawn.fewer:
        assert runs.carry_out(path, drawn.fewer)
    for _ in range(rng.choice((1, 2, 3))):
        at, after, torn = rng.randrange(1, operations + 1), rng.random() < 0.5, rng.randrange(40)
        moment = rng.uniform(0.002, seconds)
        if by_operation:
            ended = runs.carry_out(
                path, rounds, lambda at=at, after=after, torn=torn: Doomed(at, after, torn)
            )
            told = f"{'after' if after else 'before'} operation {at} of {operations}"
        else:
            ended = runs.carry_out(path, rounds, seconds=moment)
            told = f"after {moment:.3f} of {seconds:.3f} s"
        if ended:
            break
        runs.kills.append(told)
    assert runs.carry_out(path, rounds)
    if (
        drawn.fewer
    ):  # with several methods, the lines of the later rounds come after those of the other methods
        for folder in (place / "whole", path):
            sort_tables(folder)
    try:
        same(place / "whole", path)
        assert accuracies(path / "summary.json") == accuracies(place / "whole" / "summary.json")
        assert not list(path.rglob(".*.new"))
    except AssertionError as error:
        raise AssertionError(f"{drawn}, killed {runs.kills}: {error}") from None
    return runs.kills


def test_killed_in_configurations_drawn_at_random(tmp_path, capsys):
    """Half of the kills come at a certain change of a file, half at a moment."""
    rng, kills, configurations, differences = random.Random(SEED), 0, 0, []
    while kills < KILLS:
        place = tmp_path / str(configurations)
        place.mkdir()
        drawn = draw(rng)
        try:
            kills += len(
                killed_and_resumed(drawn, place, rng, by_operation=configurations % 2 == 0)
            )
        except AssertionError as error:
            differences.append(str(error))
        configurations += 1
    with capsys.disabled():
        print(f"\n{kills} kills in {configurations} configurations, {len(differences)} differences")
    assert not differences, "\n\n".join(differences)


def test_a_full_disk(whole, tmp_path):
    reference, _ = whole
    disk = tmp_path / "disk"
    disk.mkdir()
    needed = sum(-(-path.stat().st_size // 4096) * 4096 for path in reference.rglob("*"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={needed // 2}", "tmpfs", str(disk)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        with child(disk / "run") as process:
            _, errors = process.communicate(timeout=300)
        assert process.returncode == 1
        assert errors.count("\n") == 1
        assert "No space left on device" in errors
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
        with child(disk / "run") as process:
            _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        same(reference, disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with child(disk / "run", ROUNDS + 1) as process:
            _, errors = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "Read-only file system" in errors or "cannot be written to" in errors
        same(reference, disk / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
