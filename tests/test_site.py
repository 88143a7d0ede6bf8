"""The site builds without a broken link, and the commands in the docs exist with their flags."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from fedala.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
COMMAND = re.compile(r"^(?:    |\$ )fedala (.*)$", re.MULTILINE)


def test_the_site_builds_without_a_broken_link(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'fedala[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    warnings = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
    assert done.returncode == 0, "\n".join(warnings)
    assert "ALA" in (tmp_path / "site" / "reference" / "ala" / "index.html").read_text("utf-8")
    options = (tmp_path / "site" / "reference" / "options" / "index.html").read_text("utf-8")
    assert "holdout_clients" in options
    commands = (tmp_path / "site" / "reference" / "command-line" / "index.html").read_text("utf-8")
    assert "fedala predict" in commands


def find_command(words):
    """Return the command that the words call, and the words behind its name."""
    command, rest = typer.main.get_command(app), list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    return command, rest


def list_commands(path):
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    return [match.split("  #")[0] for match in COMMAND.findall(text)]


def find_mistake(line):
    """Return what is wrong with a command of the docs, or None."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        return str(error)
    command, rest = find_command(words)
    if hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        return f"there is no command {rest[0]}"
    known = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    flags = [word.split("=")[0] for word in rest if word.startswith("--")]
    wrong = [flag for flag in flags if flag not in known | {"--help", "--version"}]
    return f"{line}: there is no flag {wrong[0]}" if wrong else None


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_page_exist_with_their_flags(path):
    mistakes = [mistake for line in list_commands(path) if (mistake := find_mistake(line))]
    assert not mistakes, mistakes


def test_mistakes_are_found():
    assert "run" in [line.split()[0] for line in list_commands(ROOT / "README.md")]
    assert find_mistake("run --rounds 3") is None
    assert find_mistake("run --ruonds 3") == "run --ruonds 3: there is no flag --ruonds"
    assert find_mistake("runn") == "there is no command runn"
