"""What goes wrong in a federation: lost replies, bad updates, clients that are not there, damaged files, a dead server."""

from types import SimpleNamespace

import numpy as np
import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import OWN, RUN, Here, in_process, together  # noqa: E402
from flower.poison import poison  # noqa: E402
from small import Net  # noqa: E402

import fedala  # noqa: E402
from fedala import UserError  # noqa: E402
from fedala.errors import RunError  # noqa: E402
from fedala.flower import client_app  # noqa: E402
from fedala.flower.client_store import Kept  # noqa: E402
from fedala.flower.server import serve  # noqa: E402
from fedala.io import tensor_files  # noqa: E402


def federate(tmp_path, meddle=None, asks=None, **options):
    """A federation of three whose replies `meddle(round, client, sent, reply)` may change; who is not asked is not there."""
    waits = {"start_timeout": 9, "round_timeout": 0.01}  # everybody has answered by then
    run_config = {
        "clients": 3,
        "min_nodes": 2,
        "out": str(tmp_path / "runs"),
        **waits,
        **RUN,
        **options,
    }
    grid = Here(client_app(OWN), 3, tmp_path / "state", run_config)
    if meddle:
        grid.meddle = lambda sent, reply: meddle(
            int(sent.metadata.group_id or 0), sent.metadata.dst_node_id - 100, sent, reply
        )
    if asks:
        grid.asks = lambda sent: asks(
            int(sent.metadata.group_id or 0), sent.metadata.dst_node_id - 100
        )
    return serve(grid, run_config, OWN)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Federations to compare with, each run once."""
    folders = {}

    def of(name, *arguments, **options):
        if name not in folders:
            folder = tmp_path_factory.mktemp("known")
            folders[name] = folder, federate(folder, *arguments, **options)
        return folders[name]

    return of


def lose(round, client, sent, reply):
    return None if (round, client) == (2, 1) else reply


def model_state(tmp_path, client, round):
    tree, _ = tensor_files.load(
        tmp_path / "state" / "fedala" / f"client-{client:05d}" / f"round-{round:06d}.safetensors"
    )
    return tree


def assert_same_state(a, b):
    assert tensor_files.pack(a) == tensor_files.pack(b)


def figures(result):
    return [(row.accuracy, row.loss, row.accuracy_joined) for row in result.history]


def test_a_server_needs_no_room_for_what_its_clients_keep(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000))
    result = federate(tmp_path, rounds=1)
    assert [path.name for path in (result.folder / "models").rglob("*.safetensors")] == [
        "global.safetensors"
    ]
    assert [path.name for path in (result.folder / "checkpoint").rglob("*.safetensors")] == [
        "server-1.safetensors"
    ]


@pytest.mark.parametrize("method", ["fedala", "ditto", "fedrep", "fedfomo"])
def test_a_reply_that_is_lost_is_a_round_that_the_client_was_not_part_of(method, tmp_path):
    """The client has trained and kept its new state when the reply gets lost; the server has not counted it, so neither does
    the client: the next round goes on from the state before, and everything is as if it had not been asked at all."""
    lost = federate(tmp_path / "lost", lose, method=method)
    absent = federate(
        tmp_path / "absent", asks=lambda round, client: (round, client) != (2, 1), method=method
    )
    assert figures(lost) == figures(absent)
    for client in range(3):
        assert_same_state(
            model_state(tmp_path / "lost", client, 3), model_state(tmp_path / "absent", client, 3)
        )


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("nan", "out.bias is not finite"),
        ("infinite", "norm.running_var is not finite"),
        ("shape", "out.bias is float32 [2], and should be float32 [3]"),
        ("type", "out.bias is float64 [3], and should be float32 [3]"),
        ("missing", "out.bias is missing"),
        ("strange", "trojan is not a part of the model"),
        ("huge", "away from what was sent, and max_norm is 100"),
    ],
)
def test_a_bad_update_is_dropped_and_its_node_is_named(how, sentence, tmp_path, caplog, known):
    """The round goes on, as it would have gone without that client."""

    def meddle(round, client, sent, reply):
        if (round, client) == (2, 1):
            poison(reply.content["arrays"], how)
        return reply

    _, lost = known("lost", lose, method="fedala")
    caplog.clear()
    caplog.set_level("WARNING", "flwr")
    poisoned = federate(tmp_path / "poisoned", meddle, method="fedala", max_norm=100)
    [warning] = [record.getMessage() for record in caplog.records]
    assert "Round 2: the update of client 1 (node 101) is dropped: " in warning
    assert sentence in warning
    assert figures(poisoned) == figures(lost)


@pytest.mark.parametrize(
    "figures",
    [
        {"scores": [1.0]},
        {"scores": [float("nan")] * 3},
        {"scores": [9.0, 1.0, 8.0]},
        {"scores": None},
        {"note.accuracy": 1.0},
        {"note.a\nb": 1.0},
        {"client": 2},
    ],
)
def test_figures_that_make_no_sense_are_dropped(figures, tmp_path, caplog):
    def meddle(round, client, sent, reply):
        if (round, client) == (1, 0):
            metrics = reply.content["metrics"]
            for name, value in figures.items():
                metrics.pop(name, None)
                if value is not None:
                    metrics[name] = value
        return reply

    caplog.set_level("WARNING", "flwr")
    federate(tmp_path, meddle, method="fedavg", rounds=1)
    assert "the update of client 0 (node 100) is dropped" in caplog.text


def test_with_too_few_good_updates_the_global_model_stays(tmp_path, caplog):
    def meddle(round, client, sent, reply):
        return None if round == 2 and client > 0 else reply

    caplog.set_level("WARNING", "flwr")
    run = {"method": "fedavg", "min_updates": 2}
    result = federate(tmp_path, meddle, **run)
    assert "1 good updates, and 2 are needed: the global model stays" in caplog.text
    seen = []
    federate(tmp_path / "again", lambda round, client, sent, reply: (
        seen.append((round, client, sent.content["arrays"]["out.bias"].numpy())) if round else None,
        meddle(round, client, sent, reply),
    )[1], **run)  # fmt: skip
    sent = {round: bias for round, client, bias in seen if client == 0}
    assert np.array_equal(sent[2], sent[3])
    assert not np.array_equal(sent[3], sent[4])
    assert len(result.history) == 4


def test_a_method_that_needs_everybody_waits_for_everybody(tmp_path, caplog):
    caplog.set_level("WARNING", "flwr")
    result = federate(
        tmp_path,
        lambda round, client, sent, reply: None if (round, client) == (2, 1) else reply,
        method="apple",
    )
    assert "2 good updates, and 3 are needed" in caplog.text
    assert len(result.history) == 4


def test_too_few_nodes_end_the_run_with_a_sentence(tmp_path):
    with pytest.raises(UserError, match="there are 3 clients, and 4 are needed"):
        federate(tmp_path, clients=4, min_nodes=4, start_timeout=0.1)


def test_two_nodes_that_say_they_are_the_same_client(tmp_path, caplog):
    caplog.set_level("WARNING", "flwr")
    run_config = {"clients": 3, "min_nodes": 2, "out": str(tmp_path / "runs"), **RUN, "rounds": 1}
    grid = Here(client_app(OWN), 3, tmp_path / "state", run_config)
    grid.node_configs[102]["partition-id"] = 1
    serve(grid, run_config, OWN)
    assert (
        "Node 102 is not taken in: it says that it is client 1, which is node 101." in caplog.text
    )


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone", "another's"])
def test_a_damaged_state_is_set_aside_and_survived_loudly(damage, tmp_path, caplog):
    """The client falls back to the received model and says so, and so does the server."""
    folder = tmp_path / "state" / "fedala" / "client-00001"

    def meddle(round, client, sent, reply):
        if (round, client) == (
            2,
            2,
        ):  # the last of round 2: client 1 has its state of round 2 on the disk
            path = folder / "round-000002.safetensors"
            data = path.read_bytes()
            if damage == "gone":
                path.unlink()
            elif damage == "another's":
                path.write_bytes((folder.with_name("client-00000") / path.name).read_bytes())
            else:
                path.write_bytes(
                    data[:-9]
                    if damage == "truncated"
                    else data[:-9] + bytes([data[-9] ^ 64]) + data[-8:]
                )
        return reply

    caplog.set_level("WARNING", "flwr")
    result = federate(tmp_path, meddle, method="fedala")
    assert "This client has LOST its state of round 2 and starts over" in caplog.text
    assert "Round 3: client 1 had LOST its state and started over." in caplog.text
    aside = list(folder.glob("round-000002.safetensors.damaged-*"))
    assert len(aside) == (0 if damage == "gone" else 1)
    assert [row.round for row in result.history] == [0, 1, 2, 3]
    assert_weights_are_ones_where_nothing_was_learned(tmp_path)


def assert_weights_are_ones_where_nothing_was_learned(tmp_path):
    """Received and local model were one and the same in round 3, so ALA had nothing to learn; in the others it had."""
    means = [
        model_state(tmp_path, client, 3)["ala"]["weights"]["out.weight"].mean().item()
        for client in range(3)
    ]
    assert means[1] == 1
    assert means[0] < 1


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", ".hidden", "x" * 200, "a\nb", "ü"])
def test_an_experiments_name_cannot_lead_anywhere_else(name, tmp_path):
    with pytest.raises(UserError, match="experiment's name"):
        Kept(tmp_path, name, "client-00000")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "fedavg,fedala"}, "one method at a time"),
        ({"lanes": "3"}, "unknown option lanes"),
        ({"min_nodes": 0}, "min_nodes must be at least 1"),
        ({"experiment": "../up"}, "experiment's name"),
        ({"method": "fedfomo", "max_norm": 3.0}, "max_norm has no meaning for FedFomo"),
    ],
)
def test_mistakes_in_the_run_config_are_sentences(options, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        in_process(tmp_path, **options)


class PowerCut(BaseException):
    pass


@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("fedala", (1, 0)),
        ("fedala", (2, 1)),
        ("fedala", (3, 2)),
        ("fedala", (4, 0)),
        ("fedfomo", (2, 1)),
    ],
)
def test_a_server_that_died_goes_on_at_the_right_round(method, where, tmp_path, known):
    """Some clients have trained the round in which it died: they do it again, from the state before it."""
    asked = []

    def meddle(round, client, sent, reply):
        asked.append((round, client))
        if (round, client) == where and asked.count(where) == 1:
            raise PowerCut
        return reply

    with pytest.raises(PowerCut):
        federate(tmp_path / "cut", meddle, method=method)
    asked.append("again")
    resumed = federate(tmp_path / "cut", meddle, method=method)
    again = asked[asked.index("again") + 1 :]
    assert [round for round, _ in again] == [0] * 3 + [
        r for r in range(where[0], 5) for _ in range(3)
    ]
    folder, undisturbed = known(method, method=method)
    assert figures(resumed) == figures(undisturbed)
    for client in range(3):
        assert_same_state(model_state(tmp_path / "cut", client, 3), model_state(folder, client, 3))


def test_an_experiment_that_is_finished_stays_so_and_another_one_needs_another_name(tmp_path):
    first = federate(tmp_path, method="fedavg", rounds=1)
    again = federate(
        tmp_path,
        asks=lambda round, client: pytest.fail("somebody is asked"),
        method="fedavg",
        rounds=1,
    )
    assert figures(first) == figures(again)
    with pytest.raises(UserError, match=r"lr \(0\.1 → 0\.2\)"):
        federate(tmp_path, method="fedavg", rounds=1, lr=0.2)
    more = federate(tmp_path, method="fedavg", rounds=2)
    assert figures(more) == figures(federate(tmp_path / "other", method="fedavg", rounds=2))


@pytest.mark.parametrize("on_divergence", ["skip", "reset"])
def test_a_client_that_diverges_is_left_out_as_in_the_simulation(on_divergence, tmp_path, caplog):
    """Its round does not count, and nothing of it is kept; the server hears so from the client itself."""
    caplog.set_level("WARNING", "flwr")
    options = {"method": "fedala", "lr": 1e9, "rounds": 2, "on_divergence": on_divergence}
    federated = federate(tmp_path, **options)
    simulated = fedala.run(dataset=together(), model=Net, lanes="1", **{**RUN, **options})
    assert [row.diverged for row in federated.history] == [
        row.diverged for row in simulated.history
    ]
    assert sum(row.diverged for row in federated.history) > 0
    assert [row.accuracy for row in federated.history] == [
        row.accuracy for row in simulated.history
    ]
    assert (
        "This client's training diverged in round 1: nothing of it is kept or sent." in caplog.text
    )
    assert "client 2 (seed 5, lane 0) diverged in round 0" in caplog.text
    assert not (
        tmp_path / "state" / "fedala" / "client-00002" / "round-000001.safetensors"
    ).exists()


def test_or_the_run_ends_where_that_is_asked_for(tmp_path):
    with pytest.raises(
        RunError, match=r"Client 2 .* diverged in round 0, and on_divergence is stop"
    ):
        federate(tmp_path, method="fedala", lr=1e9, rounds=2, on_divergence="stop")
