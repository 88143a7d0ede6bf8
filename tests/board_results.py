"""Results of the leaderboard for tests, and the commands that read them."""

import paper_results
from paper_results import write_table
from typer.testing import CliRunner

from fedala.cli import app as cli

__all__ = ["call", "make_result", "write_table"]


def make_result(**values):
    """Return a finished seed of FedALA, with all columns; `values` replace its own."""
    own = {
        "rounds": 200,
        "planned": 200,
        "best_round": 115,
        "together": 1,
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
    return paper_results.make_result(**{**own, **values})


def call(*arguments):
    """Run `fedala leaderboard`."""
    words = ["leaderboard", *map(str, arguments)]
    return CliRunner().invoke(cli.app, words, prog_name="fedala")
