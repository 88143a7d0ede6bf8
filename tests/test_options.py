"""Options: how values are converted, and the message for values that are refused."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import fedala
from fedala.errors import UserError
from fedala.options import build, convert, name_option, option, suggest, use_flags


@dataclass(frozen=True)
class Sample:
    count: int = option(3, "how many", least=1, most=9)
    ratio: float = option(0.5, "a share", above=0, most=1)
    rate: float | None = option(None, "a rate")
    fast: bool = option(False, "whether")
    kind: str = option("a", "which", choices=("a", "b"))


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("3", int, 3),
        (3.0, int, 3),
        ("3.0", int, 3),
        (2**60 + 1, int, 2**60 + 1),
        (str(2**60 + 1), int, 2**60 + 1),
        ("1e-3", float, 0.001),
        (2, float, 2.0),
        (None, float | None, None),
        ("2", int | str, 2),
        ("fc2,conv1", int | str, "fc2,conv1"),
        ("2", float | None, 2.0),
        ("False", bool, False),
        ("yes", bool, True),
        (True, bool, True),
        ("x", str, "x"),
        (4, str, "4"),
    ],
)
def test_a_value_is_taken_for_what_it_says(value, kind, expected):
    got = convert(value, kind, "n")
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("2.5", int), ("x", int), (True, int), ([1], int), ("inf", int), ("", int), (None, int),
        ("x", float), (False, float), ("nan", float), (float("inf"), float), (10**400, float),
        (1e39, float),
        (1, bool), ("maybe", bool),
        (2.5, str), (True, str), (None, str), ("\udcff", str), ("a\nb", str), ("\0", str),
        (2**63, int), pytest.param(16**9999, int, id="huge"),
    ],
)  # fmt: skip
def test_anything_else_is_refused(value, kind):
    nouns = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    with pytest.raises(UserError, match=rf"^my\.n must be {nouns[kind]}, not .*\.$"):
        convert(value, kind, "my.n")


def test_build_converts_and_keeps_defaults():
    assert build(Sample, {"count": "5", "fast": "true"}) == Sample(count=5, fast=True)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"count": 0}, "s.count must be at least 1, not 0."),
        ({"count": 10}, "s.count must be at most 9, not 10."),
        ({"ratio": 0}, "s.ratio must be greater than 0, not 0.0."),
        ({"ratio": 1.5}, "s.ratio must be at most 1, not 1.5."),
        ({"kind": "c"}, "s.kind must be one of a, b, not 'c'."),
        ({"cuont": 1}, "There is no option s.cuont (did you mean s.count?)."),
        (
            {"zzz": 1},
            "There is no option s.zzz; choose from count, ratio, rate, fast, kind.",
        ),
    ],
)
def test_build_refuses(values, sentence):
    with pytest.raises(UserError) as caught:
        build(Sample, values, "s.")
    assert str(caught.value) == sentence


def test_suggest_without_anything_to_suggest():
    assert suggest("x", []) == "; there are none"


@pytest.mark.parametrize(
    ("option", "flags", "python"),
    [
        (("label_column",), "--label-column", "label_column"),
        (("clients_by", "folder"), "--clients-by folder", "clients_by='folder'"),
        (
            ("drop_columns", "blood type"),
            "--drop-columns 'blood type'",
            "drop_columns='blood type'",
        ),
        (("imports", "mine.py"), "--import mine.py", "imports='mine.py'"),
        (("validation", 0.1), "--validation 0.1", "validation=0.1"),
        (("save_best", True), "--save-best", "save_best=True"),
        (("save_best", False), "--no-save-best", "save_best=False"),
        (("sweep", {"lr": "log:0.1..1"}), "--sweep lr=log:0.1..1", "sweep={'lr': 'log:0.1..1'}"),
    ],
)
def test_an_option_is_named_as_the_user_gives_it(option, flags, python):
    assert name_option(*option) == python
    with use_flags():
        assert name_option(*option) == flags
    assert name_option(*option) == python


#: Commands alone have these, so that they may be named as flags.
COMMANDS = {"cli", "report", "bench", "ranks", "flower", "cells", "paper", "leaderboard"}


def list_messages(path):
    """Yield the texts in a module's code: all but docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_messages_that_python_gets_name_no_flags():
    """They call `name_option`, or give a whole command.

    What `fedala datasets` lists is for the command line alone.
    """
    package = Path(fedala.__file__).parent
    found = {}
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0]
        if room in COMMANDS or path.name in ("catalogue.py", "options.py"):
            continue
        texts = [text for text in list_messages(path) if re.search(r"(^|\W)--[a-z]+", text)]
        if texts:
            found[path.name] = texts
    assert found == {"provenance.py": ["--always", "--dirty"], "images.py": [" --out "]}
