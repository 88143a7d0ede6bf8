"""Newcomers of a run: which options they have, which methods take them, what is recorded."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedala.data.holdout import check_holdout, count_held_out
from fedala.errors import UserError, spreadsheet_safe
from fedala.lanes.task import Task
from fedala.lanes.trees import Params
from fedala.methods import Method, ServerRound
from fedala.options import name_option
from fedala.records import Evaluation
from fedala.runs.config import Config
from fedala.simulation.newcomers import check_message_to_newcomers
from fedala.simulation.server_round import init_server_state

#: Columns of `newcomers.csv` and `newcomer_clients.csv` besides the score.
NEWCOMERS, NEWCOMER_CLIENTS = "newcomers.csv", "newcomer_clients.csv"

Line = dict[str, Any]


def parse_epochs(text: str, name: str = "holdout_epochs") -> tuple[int, ...]:
    """Read local epochs such as `0,1,5`, in order and each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,5}", part, re.ASCII) for part in parts):
        raise UserError(f"{name} must be whole numbers from 0 on, such as 0,1,5, not {text!r}.")
    return tuple(sorted({int(part) for part in parts}))


def count_known(config: Config) -> int:
    """Return how many clients of a resolved config take part in training."""
    clients, which = int(config.clients or 0), config.holdout_clients
    return clients - (count_held_out(which, clients) if which else 0)


def check_options(config: Config, methods: Sequence[Method]) -> None:
    """Refuse options of newcomers that mean nothing, and methods that take none."""
    parse_epochs(config.holdout_epochs)
    usual = Config()
    if config.holdout_clients is None:
        for name in ("holdout_epochs", "holdout_every"):
            if getattr(config, name) != getattr(usual, name):
                raise UserError(
                    f"{name} has no effect without holdout_clients: hold out some clients, as in "
                    f"{name_option('holdout_clients', 0.2)}, or leave it out."
                )
        return
    check_holdout(config.holdout_clients)
    for method in methods:
        check_method(method)


def check_method(method: Method) -> None:
    """Refuse a method that takes no newcomers."""
    if method.refuses_newcomers:
        raise UserError(f"{method.title} takes no newcomers: {method.refuses_newcomers}.")


def rehearse_newcomers(method: Method, task: Task, initial: Params, population: int) -> None:
    """Send a message to newcomers of a federation of some clients; refuse one for each client."""
    check_method(method)
    clients, sizes = list(range(population)), [2] * population
    shared = method.shared_part(task, initial)
    server = init_server_state(method, task, shared, ServerRound(0, 0, 1, clients, sizes))
    message = method.send_to_newcomers(server, ServerRound(0, 1, 1, clients, sizes))
    check_message_to_newcomers(method, message)


def list_newcomers(evaluation: Evaluation) -> list[Line]:
    """Return the lines of `newcomers.csv` of an evaluation, without the method."""
    row, lines = evaluation.row, []
    for epochs, scores, diverged in evaluation.newcomers:
        score, loss, samples = scores.sum(0)
        line: Line = {"seed": row.seed, "round": row.round, "epochs": epochs}
        line |= {"clients": len(scores), "samples": int(samples)}
        line |= {row.metric.name: _share(score, samples), "loss": _share(loss, samples)}
        lines.append({**line, "diverged": diverged})
    return lines


def list_newcomer_clients(evaluation: Evaluation, names: Sequence[str] = ()) -> list[Line]:
    """Return the lines of `newcomer_clients.csv` of an evaluation, without the method.

    `names`: the names of all clients, if they have any.
    """
    row, first = evaluation.row, len(evaluation.client_scores)
    lines = []
    for epochs, scores, _ in evaluation.newcomers:
        for client, (score, loss, samples) in enumerate(scores, first):
            line: Line = {"seed": row.seed, "round": row.round, "epochs": epochs}
            line |= {"client": client, "samples": int(samples)}
            line |= {row.metric.name: _share(score, samples), "loss": _share(loss, samples)}
            if names:
                line["client_name"] = spreadsheet_safe(names[client])
            lines.append(line)
    return lines


def _share(total: float, samples: float) -> float:
    return float(total / samples) if samples else float(np.nan)
