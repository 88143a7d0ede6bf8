"""Help, tables and completion: what a terminal shows, and how narrow it may be."""

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from fedala.cli.app import app
from fedala.cli.completion import completion_of
from fedala.cli.output import COLUMNS, keep_lines
from fedala.data import known_datasets
from fedala.methods import catalogue, list_kinds
from fedala.report import tables
from fedala.runs.config import Config


def commands(command=None, name=()):
    command = command or get_command(app)
    yield name, command
    for key, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*name, key))


WITH_EXAMPLES = {name: command for name, command in commands() if command.epilog}


@pytest.mark.parametrize("name", WITH_EXAMPLES, ids=" ".join)
def test_examples_keep_their_lines(name, monkeypatch):
    """On the usual terminal each has its line. On a narrow one they wrap, and nothing is lost."""
    lines = [line.replace("\\[", "[") for line in WITH_EXAMPLES[name].epilog.split("\n\n")]
    assert lines[0] == "Examples:"
    assert max(map(len, lines)) <= COLUMNS
    for width in (60, 80, 120):
        monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)
        shown = CliRunner().invoke(app, [*name, "--help"], prog_name="fedala").stdout
        assert max(map(len, shown.splitlines())) <= width
        end = shown[shown.index("Examples:") :]
        assert end.split() == " ".join(lines).split()
        if width >= 80:
            found = [line.strip() for line in end.splitlines() if line.strip()]
            assert found == [line.strip() for line in lines]


def test_a_long_comment_stands_above_its_command():
    text = keep_lines(f"Examples:\n  fedala run   # short\n  fedala run   # {'long ' * 20}")
    assert text.split("\n\n")[1:] == [
        "$ fedala run   # short",
        f"# {'long ' * 20}".strip(),
        "$ fedala run",
    ]


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Return a function that shows a table on a terminal of so many columns."""

    def show(table, width):
        monkeypatch.setattr(tables, "console", lambda: Console(width=width))
        tables.show(table)
        return capsys.readouterr().out

    return show


METHODS = {
    "title": "A method with a long name", "parameters_per_client_and_round": {"together": 1234567},
    "accuracy": {"best": {"mean": 0.5, "std": 0.01, "runs": [0.5]}}, "seconds_per_round": 0.123,
}  # fmt: skip
TABLES = {
    "methods": lambda: tables.methods(list_kinds()),
    "hyperparameters": lambda: tables.hyperparameters(catalogue().values()),
    "datasets": lambda: tables.datasets(known_datasets()),
    "results": lambda: tables.results({"mine": METHODS}),
}


@pytest.mark.parametrize("width", [40, 50, 60, 80, 120, 200])
@pytest.mark.parametrize("name", TABLES)
def test_no_table_loses_a_word_on_a_narrow_terminal(terminal, name, width):
    table = TABLES[name]()
    words = [
        word for column in table.columns for cell in column.cells for word in str(cell).split()
    ]
    shown = terminal(TABLES[name](), width)
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    assert set(words) <= set(shown.split())
    is_table = "──" in shown
    assert is_table or width < 140


def complete(name, incomplete):
    return completion_of(Config.__dataclass_fields__[name])(incomplete)


@pytest.mark.parametrize(
    ("name", "incomplete", "expected"),
    [
        ("method", "fedprox", ["fedprox", "fedprox-c", "fedprox+ala"]),
        ("method", "fedala,ditto", ["fedala,ditto", "fedala,ditto+ala"]),
        ("method", "fedala,fedala", []),
        ("dataset", "cifar", ["cifar10", "cifar100"]),
        ("device", "c", ["cpu", "cuda", "cuda:"]),
        ("model", "re", ["resnet18"]),
        ("partition", "p", ["pathological:"]),
        ("set", "fedprox.", ["fedprox.mu="]),
        ("sweep", "lr", ["lr="]),
        ("evaluate", "global,tr", ["global,trained"]),
        ("optimizer", "adam", ["adam", "adamw"]),
    ],
)
def test_the_shell_completes_names(name, incomplete, expected):
    assert complete(name, incomplete) == expected


def test_the_shell_asks_the_command_line(monkeypatch):
    """The same through the protocol of a shell."""
    environment = {
        "_FEDALA_COMPLETE": "complete_bash", "COMP_WORDS": "fedala run --method fedprox-",
        "COMP_CWORD": "3",
    }  # fmt: skip
    answer = CliRunner().invoke(app, [], prog_name="fedala", env=environment)
    assert answer.stdout.split() == ["fedprox-c"]
