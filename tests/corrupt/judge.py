"""Judge what a command does with a damaged folder.

It may refuse with one sentence and change nothing (exit code 2; with 1, it may have begun). It may
end with the outcome of the undamaged folder. Or it may end with another outcome and say so: it
names the file, or says that something is damaged or unverified. Anything else is a fault.
"""

import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corrupt.mutations import mutations
from corrupt.worlds import Command, World, content
from fuzz.bounded import Outcome, attempt

#: Words that tell of damage.
TELLS = re.compile(
    r"damaged|checksum|incomplete|unverified|not verified|cannot be verified|could not be verified",
    re.I,
)

GOOD = ("refused", "equal", "told")
BAD = ("traceback", "hang", "silent", "changed on refusal", "no sentence")

#: Damage to files that a command does not read; it must make no difference.
UNREAD = ("removed", "a folder", "empty")


@dataclass(frozen=True)
class Case:
    """A file of a folder, its damage, and the command that is run then."""

    world: World
    victim: Path
    mutation: str
    command: Command

    def __str__(self) -> str:
        return f"{self.world.name} | {self.victim} | {self.mutation} | {self.command.name}"


@dataclass
class Judge:
    """Damage folders and judge the commands that read them. `place` is a folder for copies."""

    place: Path
    repeats: int = 2
    """Runs on the undamaged folder: if their outcomes differ, nothing can be concluded."""
    references: dict[tuple[str, str], tuple[Outcome, dict[str, Any]]] = field(default_factory=dict)

    def reference(self, world: World, command: Command) -> tuple[Outcome, dict[str, Any]]:
        """Run the command on the undamaged folder."""
        key = world.name, command.name
        if key not in self.references:
            found = []
            for _ in range(self.repeats):
                with tempfile.TemporaryDirectory(dir=self.place) as place:
                    here = Path(place, "here")
                    world.copy(here)
                    outcome = attempt(list(command.arguments), here, before=command.before)
                    assert outcome.code == 0, f"{key}: {outcome.says}"
                    assert not re.search("damaged", outcome.says), f"{key}: {outcome.says}"
                    found.append((outcome, command.outcome(here, outcome.says)))
            for _, other in found:
                assert other == found[0][1], (
                    f"{key} differs from itself: {differences(found[0][1], other)}"
                )
            self.references[key] = found[0]
        return self.references[key]

    def judge(self, case: Case, keep: Path | None = None) -> tuple[str, str]:
        """Return the verdict and its reason. `keep` gets a copy of the damaged folder."""
        sound, expected = self.reference(case.world, case.command)
        with tempfile.TemporaryDirectory(dir=self.place) as place:
            here = Path(place, "here")
            case.world.copy(here)
            mutations(here / case.victim, case.world.twin / case.victim)[case.mutation](
                here / case.victim
            )
            if keep:
                shutil.copytree(here, keep, symlinks=True, ignore=_pipes)
            before = snapshot(here)
            found = attempt(list(case.command.arguments), here, before=case.command.before)
            if found.fault == "does not end":
                return "hang", found.says[-300:]
            if found.code not in (0, 1, 2) or "Traceback" in found.says:
                return "traceback", found.says.strip()[-300:]
            after = snapshot(here)
            if found.code:
                return _judge_refusal(found, before, after, case)
            outcome = case.command.outcome(here, found.says)
            # A file that the command neither reads nor writes is not part of its outcome.
            name = str(case.victim)
            if not case.command.reads(case.victim) and after.get(name) == before.get(name):
                outcome.pop(name, None)
                expected = {key: value for key, value in expected.items() if key != name}
            if outcome == expected:
                return "equal", ""
            page = content(here / case.world.folder / "report.html").decode(errors="replace")
            shown = page if "report.html" in outcome else ""
            if _tells(
                found.says + shown,
                sound.says + str(expected.get("report.html", "")),
                case.victim.name,
            ):
                return "told", ""
            return "silent", differences(expected, outcome)


def _pipes(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if stat.S_ISFIFO(Path(folder, name).lstat().st_mode)]


def _judge_refusal(
    found: Outcome, before: dict[str, Any], after: dict[str, Any], case: Case
) -> tuple[str, str]:
    sentences = [line for line in found.says.splitlines() if line.startswith("Error: ")]
    clean = all(c.isprintable() or c == "\n" for c in found.says)
    if len(sentences) != 1 or found.says.splitlines()[-1] != sentences[0] or not clean:
        return "no sentence", found.says.strip()[-300:]
    if found.code == 2 and before != after:
        return "changed on refusal", f"{changed(before, after)}; {sentences[0]}"
    return "refused", sentences[0]


def _tells(said: str, usually: str, name: str) -> bool:
    """Tell whether damage is reported, or the file is named more often than usual."""
    return bool(TELLS.search(said)) or said.count(name) > usually.count(name)


def snapshot(here: Path) -> dict[str, Any]:
    """Read everything in a folder but locks. Pipes, devices and links are not opened."""
    found: dict[str, Any] = {}
    for path in sorted(here.rglob("*")):
        mode = path.lstat().st_mode
        if path.name == ".lock":
            continue
        if stat.S_ISLNK(mode):
            found[str(path.relative_to(here))] = ("link", str(path.readlink()))
        elif stat.S_ISREG(mode):
            found[str(path.relative_to(here))] = path.read_bytes()
        else:
            found[str(path.relative_to(here))] = stat.S_IFMT(mode)
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Name the files that have changed."""
    names = sorted(before.keys() | after.keys())
    return ", ".join(name for name in names if before.get(name) != after.get(name))


def differences(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """Say in a few words how two outcomes differ."""
    told = []
    for name in sorted(expected.keys() | found.keys()):
        a, b = (str(values.get(name, "nothing")) for values in (expected, found))
        if a != b:
            at = next(
                (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)),
            )
            told.append(
                f"{name}: …{a[max(0, at - 15) : at + 15]}… is …{b[max(0, at - 15) : at + 15]}…"
            )
    return "; ".join(told)[:300].replace("\n", " ")


def cases(worlds: list[World]) -> Iterator[Case]:
    """Yield all cases in order."""
    for world in worlds:
        for victim in world.victims():
            possible = mutations(world.sound / victim, world.twin / victim)
            for command in world.commands:
                for mutation in possible:
                    if command.reads(victim) or mutation in UNREAD:
                        yield Case(world, victim, mutation, command)
