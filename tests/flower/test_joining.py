"""Clients that join a federation later, and how many clients a score counts."""

import json

import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import (  # noqa: E402
    CUSTOM,
    RUN,
    InProcessGrid,
    make_samples,
    run_in_process,
)
from flwr.superlink.grid.inmemory_grid import InMemoryGrid  # noqa: E402

from fedala import UserError  # noqa: E402
from fedala.flower import CustomApp, client_app  # noqa: E402
from fedala.flower.server import serve  # noqa: E402
from fedala.records import HistoryRow  # noqa: E402
from fedala.runs.early_stopping import RunWatch  # noqa: E402
from fedala.runs.folder import RunFolder  # noqa: E402
from fedala.runs.results import MethodResult, best_row  # noqa: E402
from fedala.simulation.participation import draw_participants  # noqa: E402

SPARSE = CustomApp(
    CUSTOM.model,
    lambda context: make_samples(context.node_config["partition-id"] % 3),
    CUSTOM.shape,
    CUSTOM.classes,
)


class GrowingGrid(InProcessGrid):
    """A grid on which some nodes appear after a round: `late` has the round by partition-id."""

    def __init__(self, folder, run_config, numbers, late=None, custom=CUSTOM):
        super().__init__(client_app(custom), 0, folder / "state", run_config)
        self.numbers, self.late, self.round = numbers, late or {}, 0
        self.appear()

    def appear(self):
        for number in self.numbers:
            if self.late.get(number, 0) <= self.round:
                config = {"partition-id": number, "state-dir": str(self.state_dir)}
                self.node_configs[100 + number] = config

    def push_messages(self, messages):
        messages = list(messages)
        self.round = max([self.round, *(int(m.metadata.group_id or 0) for m in messages)])
        ids = super().push_messages(messages)
        self.appear()
        return ids


def federate(folder, numbers, late=None, custom=CUSTOM, **options):
    waits = {"start_timeout": 9, "round_timeout": 0.01, "min_nodes": 2}
    run_config = {"out": str(folder / "runs"), **waits, **RUN, **options}
    grid = GrowingGrid(folder, run_config, numbers, late, custom)
    return grid, serve(grid, run_config, custom)


def list_figures(result):
    return [(row.accuracy, row.loss, dict(row.metrics)) for row in result.history]


def list_asked(result):
    return [(row.asked, row.answered) for row in result.history]


def list_trained(grid):
    """Return the clients that trained, by round."""
    found = {}
    for message in grid.sent:
        if message.metadata.message_type == "train":
            round = int(message.metadata.group_id)
            found.setdefault(round, []).append(message.metadata.dst_node_id - 100)
    return found


@pytest.mark.parametrize("method", ["fedala", "fedavg"])
def test_a_client_that_joins_equals_one_that_was_offline_before(method, tmp_path, caplog):
    caplog.set_level("INFO", "flwr")
    _, expected = federate(tmp_path / "a", [0, 1, 2], {2: 2}, clients=3, method=method)
    assert "client 2 is offline" in caplog.text
    caplog.clear()
    _, joined = federate(tmp_path / "b", [0, 1, 2], {2: 2}, clients=2, max_clients=3, method=method)
    assert list_figures(joined) == list_figures(expected)
    assert list_asked(expected) == [(3, 2), (3, 2), (3, 3), (3, 3)]
    assert list_asked(joined) == [(2, 2), (2, 2), (3, 3), (3, 3)]
    assert "offline" not in caplog.text
    assert "Joined: client 2. The federation has 3 clients." in caplog.text
    rows = RunFolder(joined.folder).rows("clients.csv")
    assert [(row["client"], row["samples"]) for row in rows] == [(0, 10), (1, 6), (2, 8)]


@pytest.mark.parametrize("method", ["fedala", "fedavg"])
def test_a_resumed_run_keeps_the_clients_that_have_joined(method, tmp_path, monkeypatch):
    """Also if nobody may join any more. Absent clients count with the scores that they had."""
    options = {"clients": 2, "join_ratio": 0.5, "method": method, "rounds": 3}
    late = {2: 1}
    _, whole = federate(tmp_path / "a", [0, 1, 2], late, max_clients=3, **options)

    class Crash(Exception):
        pass

    def crash(self, message):
        if message.metadata.group_id == "3":
            raise Crash
        return handle(self, message)

    handle = InProcessGrid._handle
    monkeypatch.setattr(InProcessGrid, "_handle", crash)
    with pytest.raises(Crash):
        federate(tmp_path / "b", [0, 1, 2], late, max_clients=3, **options)
    monkeypatch.setattr(InProcessGrid, "_handle", handle)
    _, resumed = federate(tmp_path / "b", [0, 1, 2], **options)
    assert list_figures(resumed) == list_figures(whole)
    assert list_asked(resumed) == list_asked(whole)


def test_numbers_that_nobody_has_are_not_drawn_or_missed(tmp_path, caplog):
    caplog.set_level("WARNING", "flwr")
    grid, result = federate(
        tmp_path, [0, 1, 4], custom=SPARSE, clients=2, max_clients=6, join_ratio=0.7,
        method="fedavg",
    )  # fmt: skip
    members = [0, 1, 4]
    for round, trained in list_trained(grid).items():
        drawn = draw_participants(RUN["seed"], round, 3, 0.7)
        assert sorted(trained) == [members[position] for position in drawn]
    assert list_asked(result) == [(3, 3)] * 4
    assert not caplog.records
    rows = RunFolder(result.folder).rows("clients.csv")
    assert [row["samples"] for row in rows] == [10, 6, 0, 0, 6]


def test_a_client_that_joins_is_tested_with_the_initial_model_first(tmp_path):
    """Before its first round, an absent client has Θ⁰. So the figures count it at once."""
    options = {"method": "fedala", "join_ratio": 0.4, "rounds": 2}
    _, result = federate(
        tmp_path / "a", [0, 1, 2], {2: 1}, clients=2, max_clients=3, eval_clients="all", **options
    )
    samples = [row["samples"] for row in RunFolder(result.folder).rows("clients.csv")]
    assert samples == [10, 6, 8]
    assert list_asked(result)[1][0] >= 2  # its participant, and the client that is new


def test_a_number_beyond_the_seats_is_refused(tmp_path, caplog):
    caplog.set_level("WARNING", "flwr")
    federate(tmp_path, [0, 1, 5], custom=SPARSE, clients=2, max_clients=5, method="fedavg")
    assert "Node 105 is refused: its client is 5, but should be a whole number" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_clients": 1}, "max_clients is 1, but 2 clients are expected at the start"),
        ({"method": "fedamp"}, "FedAMP takes no clients that join later, because every client"),
        ({"method": "apple"}, "APPLE takes no clients that join later, because every client"),
        ({"method": "fedfomo"}, "FedFomo takes no clients that join later, because its server"),
    ],
)
def test_what_cannot_grow_says_so(options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        federate(tmp_path, [0, 1], **{"clients": 2, "max_clients": 3, **options})
    assert not (tmp_path / "runs").exists()


def test_a_divided_dataset_has_no_samples_for_others(tmp_path):
    with pytest.raises(UserError, match="divided among 2 clients"):
        federate(tmp_path, [0, 1], custom=None, dataset="digits", clients=2, max_clients=3)


def make_row(round, score, asked, answered):
    return HistoryRow(
        0, round, score, 1.0, score, asked=asked, answered=answered, uploaded=1, sent=1
    )


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([(0.5, 3, 3), (0.9, 3, 1), (0.7, 3, 3)], 2),
        ([(0.5, 3, 2), (0.9, 3, 1), (0.7, 3, 2)], 1),
        ([(0.9, 3, 2), (0.5, 3, 3), (0.4, 3, 3)], 1),
        ([(0.5, None, None), (0.9, None, None)], 1),
    ],
    ids=["full rounds first", "no full round", "a full round after a better one", "simulation"],
)
def test_the_best_round_is_one_in_which_all_answered(rows, best):
    history = [make_row(i, *row) for i, row in enumerate(rows)]
    assert best_row(history, "score").round == best
    watch = RunWatch()
    for row in history:
        watch.add(row)
    assert watch.best.round == best
    summary = MethodResult("fedavg", "FedAvg", history).summary()
    if rows[0][1] is None:
        assert "answers" not in summary
    else:
        full = sum(asked == answered for _, asked, answered in rows)
        assert summary["answers"]["full_rounds"] == full
        assert ("there is none" in summary["answers"]["best_is_picked_from"]) == (full == 0)


class Engine(InProcessGrid, InMemoryGrid):
    """Passes for the grid of Flower's simulation engine."""

    def pull_messages(self, message_ids):
        ids = list(message_ids)
        self.pulled.append(len(ids))
        return super().pull_messages(ids)


def test_in_the_simulation_engine_answers_are_fetched_together(tmp_path):
    run_config = {"clients": 3, "out": str(tmp_path / "runs"), **RUN, "rounds": 1}
    engine = Engine(client_app(CUSTOM), 3, tmp_path / "engine", run_config)
    engine.pulled = []
    there = serve(engine, run_config, CUSTOM)
    assert engine.pulled == [3, 3, 3]  # the introductions, round 1, and the last evaluation
    _, here = run_in_process(tmp_path / "nodes", rounds=1)
    assert list_figures(there) == list_figures(here)


def test_the_history_tells_who_answered(tmp_path):
    """A dropped reply does not count as an answer."""
    run_config = {
        "clients": 3, "out": str(tmp_path / "runs"), "round_timeout": 0.01, **RUN, "rounds": 2,
    }  # fmt: skip
    grid = InProcessGrid(client_app(CUSTOM), 3, tmp_path / "state", run_config)

    def spoil(sent, reply):
        if (sent.metadata.group_id, sent.metadata.dst_node_id) == ("2", 101):
            reply.content["metrics"]["client"] = 2
        return reply

    grid.alter_reply = spoil
    result = serve(grid, run_config, CUSTOM)
    rows = list(RunFolder(result.folder).rows("history.csv"))
    assert [(row["asked"], row["answered"]) for row in rows] == [(3, 3), (3, 2), (3, 3)]
    assert list(rows[0])[-2:] == ["asked", "answered"]
    summary = json.loads((result.folder / "summary.json").read_text())
    assert summary["methods"]["fedala"]["answers"]["full_rounds"] == 2
