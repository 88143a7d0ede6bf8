"""Results of the leaderboard for tests, and the commands that read them."""

import csv

from typer.testing import CliRunner

from fedala.cells.results import columns_of
from fedala.cli import app as cli
from fedala.leaderboard.results import BoardResult

COLUMNS = columns_of(BoardResult)


def make_result(**values):
    """Return a finished seed of FedALA; `values` replace its own."""
    own = {
        "setting": "cifar100-dir",
        "method": "fedala",
        "set": "",
        "shuffle": False,
        "seed": 0,
        "rounds": 200,
        "planned": 200,
        "eval_every": 1,
        "best": 0.56,
        "best_round": 115,
        "best_joined": 0.56,
        "final": 0.5,
        "seconds_per_round": 0.25,
        "together": 1,
        "diverged": 0,
        "sent": 100,
        "uploaded": 100,
        "samples": 60000,
        "data": "",
        "device": "GPU",
        "version": "fedala x",
        "mean": 0.55,
        "worst": 0.4,
        "trained": 0.57,
        "trained_round": 110,
        "trained_final": 0.51,
        "trained_mean": 0.55,
        "trained_worst": 0.41,
        "bytes_sent": 2_328_104,
        "bytes_uploaded": 400,
        "clients": 20,
        "curve": "0:0.01 100:0.5 200:0.56",
        "trained_curve": "100:0.55 200:0.57",
    }
    return BoardResult(**{**own, **values})


def write_table(path, *results):
    """Write a csv of results, or of dicts with impossible values; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for result in results:
            values = result if isinstance(result, dict) else vars(result)
            writer.writerow([values[name] for name in COLUMNS])
    return path


def call(*arguments):
    """Run `fedala leaderboard`."""
    words = ["leaderboard", *map(str, arguments)]
    return CliRunner().invoke(cli.app, words, prog_name="fedala")
