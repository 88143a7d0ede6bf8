"""A bad client costs its own update, never the run: every kind of bad reply in hostile.py.

A run in which a client answers badly must equal one in which it fails: the same figures, the same
global model, the same states at the other clients. One printable line of the log names each bad
reply, and the experiment can be restarted. A run tries one kind per round, so that each costs
milliseconds.
"""

import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower import hostile  # noqa: E402
from flower.inprocess import CUSTOM, RUN, InProcessGrid  # noqa: E402

from fedala.flower import client_app  # noqa: E402
from fedala.flower.nodes import Nodes  # noqa: E402
from fedala.flower.server import serve  # noqa: E402

OPTIONS = {
    "clients": 3,
    "min_nodes": 2,
    "max_samples": 10_000,
    "start_timeout": 1,
    "round_timeout": 1,
    "batch_size": 50,  # a step a round: what is judged is the reply
}
FAILURE = hostile.MESSAGES["an error"]


@pytest.fixture(autouse=True)
def _do_not_wait_for_the_disk(monkeypatch):
    monkeypatch.setattr("fedala.io.files.flush", lambda descriptor: None)
    monkeypatch.setattr("fedala.io.files.flush_folder", lambda folder: None)


def federate(folder, kinds=(), message_type="", **options):
    """Run a federation in which client 1 answers messages of a type with one kind after another."""
    run_config = {**RUN, **OPTIONS, "out": str(folder / "runs"), **options}
    apps = {node: client_app(CUSTOM) for node in (100, 101, 102)}  # each loads its samples once
    grid = InProcessGrid(
        lambda message, context: apps[context.node_id](message, context),
        3,
        folder / "state",
        run_config,
    )
    remaining = list(kinds)

    def alter_reply(sent, reply):
        is_hostile = sent.metadata.dst_node_id == 101 and sent.metadata.message_type == message_type
        return remaining.pop(0)(reply) if is_hostile and remaining else reply

    grid.alter_reply = alter_reply
    result = serve(grid, run_config, CUSTOM)
    assert not remaining, f"{len(remaining)} kinds were not tried"
    return result


def list_figures(result):
    return [
        {key: repr(value) for key, value in row.columns().items() if key != "seconds"}
        for row in result.history
    ]


def read_files(folder):
    """Read the global model, and the states of the two good clients."""
    paths = [
        *folder.glob("runs/fedala/models/**/*.safetensors"),
        *folder.glob("state/fedala/client-0000[02]/*"),
    ]
    assert len(paths) > 4
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def check_log(records, kinds):
    """Check that each bad reply of client 1 has one printable line."""
    lines = [record.getMessage() for record in records]
    for line in lines:
        assert line.isprintable()
        assert len(line) < 500
    about_client = [line for line in lines if "client 1 (node 101)" in line]
    assert len(about_client) == len(kinds)


def check_equivalence(tmp_path, caplog, kinds, message_type, **options):
    caplog.set_level("WARNING", "flwr")
    results = {}
    for name, tried in (("failed", [FAILURE] * len(kinds)), ("hostile", list(kinds.values()))):
        caplog.clear()
        first = list_figures(federate(tmp_path / name, tried, message_type, **options))
        check_log(caplog.records, kinds)
        models = read_files(tmp_path / name)
        again = list_figures(
            federate(tmp_path / name, **{**options, "rounds": options["rounds"] + 1})
        )
        results[name] = first, models, again, read_files(tmp_path / name)
    failed, hostile_run = results["failed"], results["hostile"]
    for number, (row, wanted) in enumerate(zip(hostile_run[0], failed[0], strict=True)):
        assert row == wanted, f"row {number} of {list(kinds)}"
    assert hostile_run == failed


@pytest.mark.parametrize(
    ("group", "method"),
    [("ARRAYS", "fedavg"), ("RECORDS", "fedala"), ("METRICS", "fedavg"), ("MESSAGES", "fedala")],
)
def test_bad_updates(group, method, tmp_path, caplog):
    kinds = getattr(hostile, group)
    check_equivalence(tmp_path, caplog, kinds, "train", method=method, rounds=len(kinds) + 1)


def test_bad_scores_of_trained_models(tmp_path, caplog):
    """If some clients are outside a round, replies also score the trained model."""
    kinds = {name: hostile.with_metrics(left=scores) for name, scores in hostile.SCORES.items()}
    check_equivalence(tmp_path, caplog, kinds, "train", method="fedala", join_ratio=0.7, rounds=40)


def test_bad_evaluations(tmp_path, caplog):
    """Clients outside a round score the global model."""
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
    """The two others run without it. When it returns repaired, it takes part."""
    results = []
    for name, tried in (("failed", FAILURE), ("hostile", hostile.INTRODUCE[kind])):
        first = federate(tmp_path / name, [tried], "query", method="fedala", rounds=2)
        again = federate(tmp_path / name, method="fedala", rounds=3)
        results.append((list_figures(first), list_figures(again), read_files(tmp_path / name)))
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", hostile.INTRODUCE)
def test_a_bad_introduction(kind, tmp_path, caplog):
    caplog.set_level("WARNING", "flwr")
    grid = InProcessGrid(client_app(CUSTOM), 3, tmp_path / "state", {"clients": 3, **RUN})
    grid.alter_reply = lambda sent, reply: (
        hostile.INTRODUCE[kind](reply) if sent.metadata.dst_node_id == 101 else reply
    )
    nodes = Nodes(grid, 3, 2, max_samples=10_000, validates=False)
    nodes.wait_until_ready(1)
    nodes.wait_until_ready(1)
    assert nodes.find_online_clients() == {0: 100, 2: 102}
    assert nodes.sizes.keys() == {0, 2}
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("Node 101 is refused: ")
    assert line.isprintable()
    assert len(line) < 500
