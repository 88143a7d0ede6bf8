"""Clients that were not there during training: what they score when they arrive.

A newcomer receives what the server sends in this round, and starts as a client before its first
round. It is tested before it trains, and after so many local epochs. Nothing of it flows back: the
server, the other clients and their draws are as if there were no newcomers. A client that takes
part for the first time in this round would do the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedala.errors import UserError
from fedala.lanes import Cohort, Message, Params, State
from fedala.methods import Method, ServerRound
from fedala.methods.returned import (
    check_initialized,
    check_message,
    check_trained,
    find_widths,
)
from fedala.records import NewcomerScores
from fedala.simulation.client_round import score_model, take_slots
from fedala.simulation.client_states import Lane
from fedala.simulation.divergence import find_finite_lanes
from fedala.simulation.model_scores import EvaluationSchedule
from fedala.simulation.scores import ScoreTable, settle
from fedala.simulation.transport import Setup, Transport


@dataclass
class Arrival:
    """What a cohort of newcomers did: by local epochs, 0 for the initialised model."""

    lanes: Sequence[Lane]
    scores: dict[int, Tensor] = field(default_factory=dict)
    """[lane, (summed score, summed loss, samples)] on the test samples."""
    is_finite: dict[int, Tensor] = field(default_factory=dict)
    models: dict[int, Params] = field(default_factory=dict)
    """The tested models, as stacks."""
    received: Tensor | None = None
    """The scores of the received model, if it is a whole one."""


class Newcomers:
    """The held-out clients of one simulation."""

    def __init__(
        self,
        setup: Setup,
        transport: Transport,
        schedule: EvaluationSchedule,
        epochs: Sequence[int] = (0,),
        every: int = 1,
        on_message: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`epochs` are the local epochs after which they are tested, every `every` rounds."""
        self.setup, self.transport, self.schedule = setup, transport, schedule
        self.epochs, self.every, self.on_message = epochs, every, on_message
        self._has_explained = False

    def are_due(self, round: int, *, is_last: bool) -> bool:
        """Tell whether they are tested in the evaluation that begins a round, from 1."""
        is_wanted = self.schedule.tests_newcomers(round - 1, self.every, is_last)
        return self.setup.held_out > 0 and is_wanted

    def test(
        self, servers: Sequence[State], rounds: Sequence[ServerRound]
    ) -> list[list[NewcomerScores]]:
        """Return what the held-out clients of each run score; nothing of a run that has ended."""
        setup, runs = self.setup, len(self.setup.seeds)
        table = ScoreTable(np.zeros((runs, setup.held_out, len(self.epochs), 3)))
        is_tested = np.zeros((runs, len(self.epochs)), dtype=bool)
        diverged = np.zeros((runs, len(self.epochs)), dtype=int)
        arrivals = list(self.arrive(servers, rounds))
        for arrival in arrivals:
            lanes = [(run, client - setup.population) for run, client in arrival.lanes]
            for position, count in enumerate(self.epochs):
                if count in arrival.scores:
                    table.add_part(position, lanes, arrival.scores[count])
                    is_tested[[run for run, _ in lanes], position] = True
        settle([table])
        for arrival in arrivals:
            for count, is_finite in arrival.is_finite.items():
                for (run, _), is_good in zip(arrival.lanes, is_finite.tolist(), strict=True):
                    diverged[run, self.epochs.index(count)] += not is_good
        self._explain_missing(is_tested)
        return [
            [
                NewcomerScores(count, table.values[run, :, position], int(diverged[run, position]))
                for position, count in enumerate(self.epochs)
                if is_tested[run, position]
            ]
            for run in range(runs)
        ]

    def _explain_missing(self, is_tested: np.ndarray) -> None:
        if not is_tested.any(0).all() and is_tested.any() and not self._has_explained:
            self._has_explained = True
            self.on_message(
                f"{self.setup.method.title} keeps no whole model after training, so held-out "
                "clients are tested before they train only."
            )

    def arrive(
        self,
        servers: Sequence[State],
        rounds: Sequence[ServerRound],
        *,
        keeps_models: bool = False,
        tests_received: bool = False,
    ) -> Sequence[Arrival]:
        """Let the held-out clients of each run arrive, with the server as it is."""
        setup = self.setup
        newcomers = range(setup.population, setup.population + setup.held_out)
        # A run without participants has ended.
        clients = [list(newcomers) if one.clients else [] for one in rounds]
        sent = [
            self._send(run, server, one) if one.clients else Message()
            for run, (server, one) in enumerate(zip(servers, rounds, strict=True))
        ]
        work = partial(
            run_arrival,
            epochs=self.epochs,
            keeps_models=keeps_models,
            tests_received=tests_received and not setup.method.sends_model_stack,
        )
        return list(self.transport.run_newcomers(work, rounds[0].round, sent, clients))

    def _send(self, run: int, server: State, server_round: ServerRound) -> Message:
        method = self.setup.method_of(run)
        message = method.send_to_newcomers(server, server_round)
        message = check_message_to_newcomers(method, message)
        return self.setup.reset_transient(run, message)


def check_message_to_newcomers(method: Method, message: Any) -> Message:
    """Refuse a method whose server sends each client its own message, and newcomers none."""
    if find_widths(method, "send_to_newcomers", message) - {0, 1}:
        raise UserError(
            f"{method.title} takes no newcomers: its server sends each client a message of its "
            "own, and send_to_newcomers does not say what a client gets that it does not know."
        )
    return check_message(method, message, 1, "send_to_newcomers")


def run_arrival(
    method: Method,
    cohort: Cohort,
    lanes: Sequence[Lane],
    state: State,
    *,
    epochs: Sequence[int],
    keeps_models: bool = False,
    tests_received: bool = False,
) -> Arrival:
    """Initialise and test a cohort of newcomers; train and test them for each number of epochs."""
    state = take_slots(cohort, state)
    received, task = cohort.received, cohort.task
    pair = method.initialize(cohort, received, state)
    initialized, state = check_initialized(method, cohort, pair)
    arrival = Arrival(lanes)

    def test(count: int, model: Params) -> None:
        if initialized.keys() <= model.keys():
            [arrival.scores[count]] = score_model(cohort, model, ["test"])
            if keeps_models:
                arrival.models[count] = model

    if tests_received and initialized.keys() <= received.model.keys():
        [arrival.received] = score_model(cohort, received.model, ["test"])
    if 0 in epochs:
        test(0, method.model_to_evaluate(cohort, initialized, received, state))
    usual = 1 if task.local_steps else task.epochs
    devices = [task.device] if task.device.type == "cuda" else []
    for count in filter(None, epochs):
        longer = replace(
            cohort,
            task=task.with_epochs(count),
            metrics={},
            kept_slots=None if cohort.kept_slots is None else dict(cohort.kept_slots),
        )
        own = method.scale_epochs(Fraction(count, usual))
        with torch.random.fork_rng(devices=devices):  # every training draws from the same state
            found = own.train(longer, initialized, received, state)
            upload, trained = check_trained(own, found)
            arrival.is_finite[count] = find_finite_lanes(longer, upload, trained)
            test(count, own.trained_model(longer, received, upload, trained))
    return arrival
