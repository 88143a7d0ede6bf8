"""Results of the paper's cells for tests, and the commands that read them."""

import csv
from functools import partial

from typer.testing import CliRunner

from fedala.cells import reading
from fedala.cells.results import COLUMNS, SeedResult
from fedala.cli import app as cli
from fedala.cli.cells import read_folders
from fedala.leaderboard.board import BOARD
from fedala.paper.experiments import PAPER

read_results = partial(read_folders, shown=PAPER)
read_csv = partial(reading.read_csv, collections=(PAPER, BOARD))


def make_result(**values):
    """Return a finished seed of FedALA, as older runs wrote it; `values` replace its own."""
    own = {
        "setting": "cifar100-dir",
        "method": "fedala",
        "set": "",
        "shuffle": False,
        "seed": 0,
        "rounds": 2000,
        "planned": 2000,
        "eval_every": 1,
        "best": 0.56,
        "best_round": 150,
        "best_joined": 0.56,
        "final": 0.5,
        "seconds_per_round": 0.25,
        "together": 5,
        "diverged": 0,
        "sent": 100,
        "uploaded": 100,
        "samples": 60000,
        "data": "",
        "device": "GPU",
        "version": "x",
    }
    return SeedResult(**{**own, **values})


def write_table(path, *results, columns=COLUMNS):
    """Write a csv of results, or of dicts with impossible values; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for result in results:
            values = result if isinstance(result, dict) else vars(result)
            writer.writerow([values[name] for name in columns])
    return path


def call(*arguments):
    """Run `fedala paper`."""
    return CliRunner().invoke(cli.app, ["paper", *map(str, arguments)], prog_name="fedala")
