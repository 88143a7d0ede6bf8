"""One bad client costs its own update, never the run: every kind of bad reply that hostile.py has.

A run in which a client answers badly must end as one in which it fails: the same figures, the same global model, the same
states at the other clients. Each bad reply is named in one printable line of the log, and the experiment can be restarted.
A run takes one kind after another, so that a kind costs milliseconds.
"""

from dataclasses import replace

import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower import hostile  # noqa: E402
from flower.inprocess import OWN, RUN, Here  # noqa: E402

from fedala.flower import client_app  # noqa: E402
from fedala.flower.nodes import Nodes  # noqa: E402
from fedala.flower.server import serve  # noqa: E402

OPTIONS = {
    "clients": 3,
    "min_nodes": 2,
    "max_samples": 10_000,
    "start_timeout": 1,
    "round_timeout": 1,
}
FAILS = hostile.MESSAGES["an error"]


@pytest.fixture(autouse=True)
def _disk_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("fedala.io.files.flush", lambda descriptor: None)
    monkeypatch.setattr("fedala.io.files.flush_folder", lambda folder: None)


def federate(folder, kinds=(), message_type="", **options):
    """Client 1 answers messages of a type badly: each with the next of `kinds`, until there are none left."""
    run_config = {**RUN, **OPTIONS, "out": str(folder / "runs"), **options}
    apps = {node: client_app(OWN) for node in (100, 101, 102)}  # each loads its samples once
    grid = Here(
        lambda message, context: apps[context.node_id](message, context),
        3,
        folder / "state",
        run_config,
    )
    left = list(kinds)

    def meddle(sent, reply):
        is_next = (
            left and sent.metadata.dst_node_id == 101 and sent.metadata.message_type == message_type
        )
        return left.pop(0)(reply) if is_next else reply

    grid.meddle = meddle
    result = serve(grid, run_config, OWN)
    assert not left, f"{len(left)} kinds were not tried"
    return result


def figures(result):
    return [repr(replace(row, seconds=0)) for row in result.history]


def kept(folder):
    """The global model, and what the two good clients keep."""
    paths = [
        *folder.glob("runs/fedala/models/**/*.safetensors"),
        *folder.glob("state/fedala/client-0000[02]/*"),
    ]
    assert len(paths) > 4
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def check_log(records, kinds):
    """There is one line about client 1 for each bad reply, and it can be printed."""
    lines = [record.getMessage() for record in records]
    for line in lines:
        assert line.isprintable()
        assert len(line) < 500
    mine = [line for line in lines if "client 1 (node 101)" in line]
    assert len(mine) == len(kinds)
    return mine


def check_equivalence(tmp_path, caplog, kinds, message_type, **options):
    caplog.set_level("WARNING", "flwr")
    results = {}
    for name, tried in (("failed", [FAILS] * len(kinds)), ("hostile", list(kinds.values()))):
        caplog.clear()
        first = figures(federate(tmp_path / name, tried, message_type, **options))
        check_log(caplog.records, kinds)
        models = kept(tmp_path / name)
        again = figures(federate(tmp_path / name, **{**options, "rounds": options["rounds"] + 1}))
        results[name] = first, models, again, kept(tmp_path / name)
    failed, ours = results["failed"], results["hostile"]
    for number, (row, wanted) in enumerate(zip(ours[0], failed[0], strict=True)):
        assert row == wanted, f"row {number} of {list(kinds)}"
    assert ours == failed


@pytest.mark.parametrize(
    ("group", "method"),
    [("ARRAYS", "fedavg"), ("RECORDS", "fedala"), ("METRICS", "fedavg"), ("MESSAGES", "fedala")],
)
def test_bad_updates(group, method, tmp_path, caplog):
    kinds = getattr(hostile, group)
    check_equivalence(tmp_path, caplog, kinds, "train", method=method, rounds=len(kinds) + 1)


def test_bad_scores_of_what_a_round_left(tmp_path, caplog):
    """With clients outside of rounds, a reply also says what its training left."""
    kinds = {what: hostile.with_metrics(left=scores) for what, scores in hostile.SCORES.items()}
    check_equivalence(tmp_path, caplog, kinds, "train", method="fedala", join_ratio=0.7, rounds=40)


def test_bad_evaluations(tmp_path, caplog):
    """Of clients outside of a round, with the global model."""
    kinds = hostile.EVALUATE
    check_equivalence(
        tmp_path,
        caplog,
        kinds,
        "evaluate.received",
        method="fedavg",
        join_ratio=0.4,
        rounds=2 * len(kinds),
    )


@pytest.mark.parametrize(
    "kind",
    ["the start of a zip file", "scores of infinity of infinity", "diverged without training"],
)
def test_a_bad_last_evaluation(kind, tmp_path, caplog):
    kinds = {kind: hostile.EVALUATE[kind]}
    check_equivalence(tmp_path, caplog, kinds, "evaluate", method="fedala", rounds=1)


@pytest.mark.parametrize("kind", ["a size of 2**53", "objects that Flower cannot decode"])
def test_a_bad_introduction_in_a_run(kind, tmp_path):
    """The two others run without it; when it comes back mended, it takes part."""
    results = []
    for name, tried in (("failed", FAILS), ("hostile", hostile.INTRODUCE[kind])):
        first = federate(tmp_path / name, [tried], "query", method="fedala", rounds=2)
        again = federate(tmp_path / name, method="fedala", rounds=3)
        results.append((figures(first), figures(again), kept(tmp_path / name)))
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", hostile.INTRODUCE)
def test_a_bad_introduction(kind, tmp_path, caplog):
    caplog.set_level("WARNING", "flwr")
    grid = Here(client_app(OWN), 3, tmp_path / "state", {"clients": 3, **RUN})
    grid.meddle = lambda sent, reply: (
        hostile.INTRODUCE[kind](reply) if sent.metadata.dst_node_id == 101 else reply
    )
    nodes = Nodes(grid, 3, 2, max_samples=10_000, validates=False)
    nodes.wait(1)
    nodes.wait(1)
    assert nodes.online() == {0: 100, 2: 102}
    assert nodes.sizes.keys() == {0, 2}
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("Node 101 is not taken in: ")
    assert line.isprintable()
    assert len(line) < 500
