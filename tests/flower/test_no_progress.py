"""Runs that make no progress: nobody joins, or no update counts. They say why, and do not hang."""

import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import CUSTOM, RUN, InProcessGrid  # noqa: E402
from flwr.app import ArrayRecord, Error, Message  # noqa: E402

from fedala import UserError  # noqa: E402
from fedala.errors import RunError  # noqa: E402
from fedala.flower import client_app, nodes  # noqa: E402
from fedala.flower.nodes import Nodes  # noqa: E402
from fedala.flower.server import serve  # noqa: E402


@pytest.fixture(autouse=True)
def _do_not_wait_for_the_disk(monkeypatch):
    monkeypatch.setattr("fedala.io.files.flush", lambda descriptor: None)
    monkeypatch.setattr("fedala.io.files.flush_folder", lambda folder: None)
    monkeypatch.setattr(nodes, "PAUSE", 0.01)


def fail_introductions(message, context, call_next):
    if message.metadata.message_type == "query":
        reason = f"node {context.node_id} is broken" if context.node_id == 102 else "no disk"
        return Message(Error(6, reason), reply_to=message)
    return call_next(message, context)


@pytest.fixture
def broken_grid(tmp_path):
    app = client_app(CUSTOM, mods=[fail_introductions])
    return InProcessGrid(app, 3, tmp_path / "state")


def test_a_server_says_at_intervals_why_nobody_joins(broken_grid, monkeypatch, caplog):
    monkeypatch.setattr(nodes, "REPORT_PAUSE", 0.05)
    caplog.set_level("WARNING", "flwr")
    with pytest.raises(UserError, match=r"every connected node; the commonest reason is: no disk"):
        Nodes(broken_grid, 3, 2).wait_until_ready(0.5)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:3] == [
        "Node 100 is refused: no disk (code 6).",
        "Node 101 is refused: no disk (code 6).",
        "Node 102 is refused: node 102 is broken (code 6).",
    ]
    reports = lines[3:]
    assert 2 < len(reports) < 12
    assert set(reports) == {
        "Waiting for clients: 0 online, at least 2 required. Refused: every connected node; "
        "the commonest reason is: no disk (code 6)."
    }


def test_a_server_does_not_wait_for_nodes_that_cannot_come(broken_grid):
    """In Flower's simulation engine, all nodes are there from the start."""
    with pytest.raises(UserError, match=r"no further nodes can connect.*: no disk \(code 6\)"):
        Nodes(broken_grid, 3, 2, can_connect=False).wait_until_ready(600)


def test_before_the_first_answer_further_nodes_may_come(tmp_path):
    grid = InProcessGrid(client_app(CUSTOM), 0, tmp_path)
    with pytest.raises(UserError, match=r"After 0\.01 s, 0 clients are online"):
        Nodes(grid, 3, 2, can_connect=False).wait_until_ready(0.01)


def name_another_client(reply):
    reply.content["metrics"]["client"] = 7


def report_divergence(reply):
    reply.content["metrics"]["finite"] = 0
    reply.content["arrays"] = ArrayRecord()


def federate(tmp_path, spoils=lambda round: True, spoil=name_another_client, **options):
    """Run a federation of two clients, with bad updates if `spoils(round)` is true."""
    run_config = {"clients": 2, "method": "fedavg", "out": str(tmp_path / "runs")}
    run_config |= {**RUN, "rounds": 2, **options}
    grid = InProcessGrid(client_app(CUSTOM), 2, tmp_path / "state", run_config)

    def alter_reply(sent, reply):
        if sent.metadata.message_type == "train" and spoils(int(sent.metadata.group_id)):
            spoil(reply)
        return reply

    grid.alter_reply = alter_reply
    return serve(grid, run_config, CUSTOM)


def test_a_run_whose_updates_never_count_fails_with_the_commonest_reason(tmp_path, caplog):
    """It is not finished, so another run of this name fails as well, or adds rounds."""
    caplog.set_level("WARNING", "flwr")
    with pytest.raises(
        RunError,
        match=r"No update has counted in 2 rounds, so that nothing was learned; the commonest "
        r"reason is: it says that it is client 7\. Start again under another experiment name",
    ):
        federate(tmp_path)
    for round in (1, 2):
        assert f"Round {round}: 0 good updates, but 1 are required" in caplog.text
    assert not (tmp_path / "runs" / "fedala" / "summary.json").exists()
    with pytest.raises(RunError, match=r"No update has counted in 2 rounds.*the log says why"):
        federate(tmp_path, spoils=lambda round: False)
    result = federate(tmp_path, spoils=lambda round: False, rounds=3)
    assert [row.round for row in result.history] == [0, 1, 2, 3]
    assert result.history[2].loss != result.history[3].loss


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"min_updates": 3, "spoil": lambda reply: None}, "the log says why"),
        ({"spoil": report_divergence}, "the commonest reason is: its training diverged"),
    ],
    ids=["too few", "diverged"],
)
def test_other_runs_without_a_counted_update_fail_too(options, reason, tmp_path):
    with pytest.raises(RunError, match=f"No update has counted in 2 rounds.*{reason}"):
        federate(tmp_path, **options)


def test_one_counted_update_is_enough(tmp_path):
    result = federate(tmp_path, spoils=lambda round: round > 1)
    assert len(result.history) == 3


def test_a_run_can_end_after_some_failed_rounds_in_a_row(tmp_path):
    """Rounds 1, 3 and 4 fail. It continues with round 5."""
    bad = {1, 3, 4}
    with pytest.raises(
        RunError,
        match=r"No update has counted in 2 rounds in a row, and max_failed_rounds is 2; .*7\. "
        "To continue after round 4",
    ):
        federate(tmp_path, spoils=bad.__contains__, rounds=5, max_failed_rounds=2)
    result = federate(tmp_path, spoils=bad.__contains__, rounds=5, max_failed_rounds=2)
    assert len(result.history) == 6
