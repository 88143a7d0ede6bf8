"""Killed at any moment, a run goes on to the end that it would have had.

A few kills by default. FEDALA_KILLS sets how many (`make test-kill`: a hundred), FEDALA_KILL_SEED
which ones.
"""

import os
import random
import signal
import subprocess
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

from fedala.errors import RunError
from fedala.methods import list_methods, make
from fedala.runs.execute import execute
from fedala.runs.tables import TABLES, Tables

KILLS = int(os.environ.get("FEDALA_KILLS", "4"))
SEED = int(os.environ.get("FEDALA_KILL_SEED", "1"))
ROUNDS = 8


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory):
    """Run once in this process: what torch imports at its first step, the forks then have."""
    execute(planned(rounds=1), tmp_path_factory.mktemp("imported") / "run")


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


#: Ways to train. PartialFed and SCAFFOLD take none that remembers earlier steps.
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
    if not any(name.startswith(("partialfed", "scaffold")) for name in methods):
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
        child = self._fork(path, rounds, doom)
        if seconds:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    return self._ended(status)
                time.sleep(0.001)
            os.kill(child, signal.SIGKILL)
        return self._ended(os.waitpid(child, 0)[1])

    def fail(self, path: Path, rounds: int) -> str:
        """Run or resume in a child that is to fail; return what it says."""
        status = os.waitpid(self._fork(path, rounds, Doomed), 0)[1]
        assert os.waitstatus_to_exitcode(status) == 1
        return self.log.read_text()

    def _fork(self, path: Path, rounds: int, doom: Callable[[], Doomed]) -> int:
        child = os.fork()
        if child == 0:
            self._child(path, rounds, doom)
        return child

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
        except RunError as error:
            self.log.write_text(str(error))
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


# --- one configuration ---------------------------------------------------------------------------

TWO_METHODS = Drawn(
    "fedala,ditto", {"checkpoint_every": 1, "join_ratio": 0.5, "seeds": 2}, fewer=None
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    place = tmp_path_factory.mktemp("whole")
    began = time.monotonic()
    assert Runs(TWO_METHODS, place / "log").carry_out(place / "run", ROUNDS)
    return place / "run", time.monotonic() - began


def test_killed_at_random_moments(whole, tmp_path):
    reference, seconds = whole
    moments, runs = random.Random(1), Runs(TWO_METHODS, tmp_path / "log")
    path, killed = tmp_path / "run", 0
    while killed < 2:
        if not runs.carry_out(path, ROUNDS, seconds=moments.uniform(0, 0.75 * seconds)):
            killed += 1
            continue
        same(reference, path)
        path = tmp_path / f"run-{killed}"  # it came to its end: begin with another
    assert runs.carry_out(path, ROUNDS)
    same(reference, path)


def test_a_full_disk(whole, tmp_path):
    reference, _ = whole
    disk, runs = tmp_path / "disk", Runs(TWO_METHODS, tmp_path / "log")
    disk.mkdir()
    needed = sum(-(-path.stat().st_size // 4096) * 4096 for path in reference.rglob("*"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={needed // 2}", "tmpfs", str(disk)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        said = runs.fail(disk / "run", ROUNDS)
        assert "\n" not in said
        assert "No space left on device" in said
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
        assert runs.carry_out(disk / "run", ROUNDS)
        same(reference, disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        said = runs.fail(disk / "run", ROUNDS + 1)
        assert "Read-only file system" in said or "cannot be written to" in said
        same(reference, disk / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
