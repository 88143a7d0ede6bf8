"""Tables and progress: they show what was measured."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from fedala.records import HistoryRow
from fedala.report import tables
from fedala.report.progress import format_duration
from fedala.report.progress_bars import ProgressBars
from fedala.runs.config import Config


def figure(*runs):
    mean = sum(runs) / len(runs)
    return {
        "mean": mean,
        "std": (sum((run - mean) ** 2 for run in runs) / len(runs)) ** 0.5,
        "runs": list(runs),
    }


def render(table):
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def summary(title, **accuracy):
    parameters = {"sent": 5, "uploaded": 7, "together": 12}
    return {
        "title": title,
        "accuracy": accuracy,
        "seconds_per_round": 0.25,
        "parameters_per_client_and_round": parameters,
    }


def test_results_show_only_known_accuracies():
    text = render(
        tables.results(
            {"a": summary("A", best=figure(0.9), final=figure(0.8), validation_picked=figure(0.85))}
        )
    )
    assert "round picked by" in text
    assert "participants" not in text
    assert next(line for line in text.splitlines() if "A " in line).split() == [
        "A",
        "90.00",
        "80.00",
        "85.00",
        "0.25",
        "12",
    ]


def make_bars(console, **options):
    group = SimpleNamespace(members=[SimpleNamespace(label="a+ala", title="A[b]+ALA")])
    plan = SimpleNamespace(config=Config(rounds=2, seeds=2), groups=[group], members=group.members)
    return ProgressBars(console, plan, **options)


def show_rounds(bars):
    with bars:
        for round in range(3):
            for seed in (0, 1):
                accuracy = (0.5, 0.9, 0.7)[round] + 0.02 * seed
                bars.row("a+ala", HistoryRow(seed, round, accuracy, 1.0, accuracy))


@pytest.mark.parametrize(("every", "rounds"), [(0, [0, 1, 2]), (1000, [2])])
def test_without_a_terminal_a_line_now_and_then(every, rounds):
    console = Console(force_terminal=False, width=40)
    with console.capture() as capture:
        show_rounds(make_bars(console, every=every))
    lines = capture.get().splitlines()
    assert [line.split("/")[0] for line in lines] == [
        f"A[b]+ALA: round {round}" for round in rounds
    ]
    assert "accuracy 71.00 %  best 91.00 %" in lines[-1]
    assert "\x1b" not in capture.get()


def test_on_a_terminal_one_bar_for_each_method():
    console = Console(force_terminal=True, width=120, _environ={"TERM": "xterm"})
    with console.capture() as capture:
        show_rounds(make_bars(console))
    assert "round 2/2  accuracy 71.00 %  best 91.00 %" in capture.get()
    assert "\x1b" in capture.get()


def test_durations():
    assert [format_duration(seconds) for seconds in (0, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]
