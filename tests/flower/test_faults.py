"""Faults of a federation: lost replies, bad updates, offline clients, damaged files, a crash."""

from types import SimpleNamespace

import numpy as np
import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import (  # noqa: E402
    CUSTOM,
    RUN,
    InProcessGrid,
    build_federation,
    run_in_process,
)
from flower.poison import poison  # noqa: E402
from small import Net  # noqa: E402

import fedala  # noqa: E402
from fedala import UserError  # noqa: E402
from fedala.errors import RunError  # noqa: E402
from fedala.flower import client_app  # noqa: E402
from fedala.flower.client_store import ClientStore  # noqa: E402
from fedala.flower.server import serve  # noqa: E402
from fedala.io import tensor_files  # noqa: E402


def federate(tmp_path, alter_reply=None, delivers=None, **options):
    """Run a federation of three clients.

    `alter_reply(round, client, sent, reply)` may change a reply. A client gets only the messages
    for which `delivers(round, client)` is true.
    """
    waits = {"start_timeout": 9, "round_timeout": 0.01}  # by then, all have answered
    run_config = {
        "clients": 3,
        "min_nodes": 2,
        "out": str(tmp_path / "runs"),
        **waits,
        **RUN,
        **options,
    }
    grid = InProcessGrid(client_app(CUSTOM), 3, tmp_path / "state", run_config)
    if alter_reply:
        grid.alter_reply = lambda sent, reply: alter_reply(
            int(sent.metadata.group_id or 0), sent.metadata.dst_node_id - 100, sent, reply
        )
    if delivers:
        grid.delivers = lambda sent: delivers(
            int(sent.metadata.group_id or 0), sent.metadata.dst_node_id - 100
        )
    return serve(grid, run_config, CUSTOM)


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """Return a function that runs a federation to compare with, once for each name."""
    folders = {}

    def run(name, *arguments, **options):
        if name not in folders:
            folder = tmp_path_factory.mktemp("once")
            folders[name] = folder, federate(folder, *arguments, **options)
        return folders[name]

    return run


def lose_reply(round, client, sent, reply):
    return None if (round, client) == (2, 1) else reply


def load_state(tmp_path, client, round):
    tree, _ = tensor_files.load(
        tmp_path / "state" / "fedala" / f"client-{client:05d}" / f"round-{round:06d}.safetensors"
    )
    return tree


def assert_same_state(a, b):
    assert tensor_files.pack(a) == tensor_files.pack(b)


def list_figures(result):
    return [(row.accuracy, row.loss, row.accuracy_joined) for row in result.history]


def test_a_server_needs_no_disk_space_for_the_states_of_clients(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000))
    result = federate(tmp_path, rounds=1)
    models = {path.name for path in (result.folder / "models").rglob("*.safetensors")}
    assert models == {"global.safetensors"}  # of the last round, and of the best one
    kept = {
        path.name.split("-")[0] for path in (result.folder / "checkpoint").rglob("*.safetensors")
    }
    assert kept == {"server", "best"}


@pytest.mark.parametrize("method", ["fedala", "ditto", "fedrep", "fedfomo"])
def test_a_client_whose_reply_is_lost_equals_one_that_was_offline(method, tmp_path):
    """The client has saved its new state when the reply gets lost. The server has not counted it.

    So the next round continues from the state before.
    """
    lost = federate(tmp_path / "lost", lose_reply, method=method)
    absent = federate(
        tmp_path / "absent", delivers=lambda round, client: (round, client) != (2, 1), method=method
    )
    assert list_figures(lost) == list_figures(absent)
    for client in range(3):
        assert_same_state(
            load_state(tmp_path / "lost", client, 3), load_state(tmp_path / "absent", client, 3)
        )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nan", "out.bias is not finite"),
        ("infinite", "norm.running_var is not finite"),
        ("shape", "out.bias is float32 [2], but should be float32 [3]"),
        ("type", "out.bias is float64 [3], but should be float32 [3]"),
        ("missing", "out.bias is missing"),
        ("strange", "trojan is not a part of the model"),
        ("huge", "away from the model that was sent, but max_norm is 100"),
    ],
)
def test_a_bad_update_is_dropped_and_its_node_is_named(how, message, tmp_path, caplog, run_once):
    """The round equals one without that client."""

    def alter_reply(round, client, sent, reply):
        if (round, client) == (2, 1):
            poison(reply.content["arrays"], how)
        return reply

    _, lost = run_once("lost", lose_reply, method="fedala")
    caplog.clear()
    caplog.set_level("WARNING", "flwr")
    poisoned = federate(tmp_path / "poisoned", alter_reply, method="fedala", max_norm=100)
    messages = [record.getMessage() for record in caplog.records]
    [warning] = [message for message in messages if not message.startswith("ALA blends")]
    assert "Round 2: the update of client 1 (node 101) is dropped: " in warning
    assert message in warning
    assert list_figures(poisoned) == list_figures(lost)


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
def test_updates_with_impossible_figures_are_dropped(figures, tmp_path, caplog):
    def alter_reply(round, client, sent, reply):
        if (round, client) == (1, 0):
            metrics = reply.content["metrics"]
            for name, value in figures.items():
                metrics.pop(name, None)
                if value is not None:
                    metrics[name] = value
        return reply

    caplog.set_level("WARNING", "flwr")
    federate(tmp_path, alter_reply, method="fedavg", rounds=1)
    assert "the update of client 0 (node 100) is dropped" in caplog.text


def test_with_too_few_good_updates_the_global_model_does_not_change(tmp_path, caplog):
    def alter_reply(round, client, sent, reply):
        return None if round == 2 and client > 0 else reply

    caplog.set_level("WARNING", "flwr")
    run = {"method": "fedavg", "min_updates": 2}
    result = federate(tmp_path, alter_reply, **run)
    assert "1 good updates, but 2 are required. The global model does not change" in caplog.text
    biases = {}

    def record_bias(round, client, sent, reply):
        if round and client == 0:
            biases[round] = sent.content["arrays"]["out.bias"].numpy()
        return alter_reply(round, client, sent, reply)

    federate(tmp_path / "again", record_bias, **run)
    assert np.array_equal(biases[2], biases[3])
    assert not np.array_equal(biases[3], biases[4])
    assert len(result.history) == 4


def test_a_method_that_requires_all_clients_waits_for_all(tmp_path, caplog):
    caplog.set_level("WARNING", "flwr")
    result = federate(
        tmp_path,
        lambda round, client, sent, reply: None if (round, client) == (2, 1) else reply,
        method="apple",
    )
    assert "2 good updates, but 3 are required" in caplog.text
    assert len(result.history) == 4


def test_too_few_nodes_end_the_run_with_a_message(tmp_path):
    with pytest.raises(UserError, match="3 clients are online, but 4 are required"):
        federate(tmp_path, clients=4, min_nodes=4, start_timeout=0.1)


def test_a_second_node_for_the_same_client_is_refused(tmp_path, caplog):
    caplog.set_level("WARNING", "flwr")
    run_config = {"clients": 3, "min_nodes": 2, "out": str(tmp_path / "runs"), **RUN, "rounds": 1}
    grid = InProcessGrid(client_app(CUSTOM), 3, tmp_path / "state", run_config)
    grid.node_configs[102]["partition-id"] = 1
    serve(grid, run_config, CUSTOM)
    assert "Node 102 is refused: it says that it is client 1, which is node 101." in caplog.text


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone", "another's"])
def test_a_damaged_state_is_set_aside_and_logged(damage, tmp_path, caplog):
    """The client starts from the received model. Its log and the server's say so."""
    folder = tmp_path / "state" / "fedala" / "client-00001"

    def alter_reply(round, client, sent, reply):
        if (round, client) == (2, 2):  # the last of round 2: client 1 has saved its state
            path = folder / "round-000002.safetensors"
            data = path.read_bytes()
            if damage == "gone":
                path.unlink()
            elif damage == "another's":
                path.write_bytes((folder.with_name("client-00000") / path.name).read_bytes())
            elif damage == "truncated":
                path.write_bytes(data[:-9])
            else:
                path.write_bytes(data[:-9] + bytes([data[-9] ^ 64]) + data[-8:])
        return reply

    caplog.set_level("WARNING", "flwr")
    result = federate(tmp_path, alter_reply, method="fedala")
    assert "This client has LOST its state of round 2 and starts over" in caplog.text
    assert "Round 3: client 1 had LOST its state and started over." in caplog.text
    aside = list(folder.glob("round-000002.safetensors.damaged-*"))
    assert len(aside) == (0 if damage == "gone" else 1)
    assert [row.round for row in result.history] == [0, 1, 2, 3]
    assert_weights_are_ones_if_nothing_was_learned(tmp_path)


def assert_weights_are_ones_if_nothing_was_learned(tmp_path):
    """Client 1 had equal received and local models in round 3, so ALA had nothing to learn."""
    means = [
        load_state(tmp_path, client, 3)["ala"]["weights"]["out.weight"].mean().item()
        for client in range(3)
    ]
    assert means[1] == 1
    assert means[0] < 1


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", ".hidden", "x" * 200, "a\nb", "ü"])
def test_an_experiments_name_cannot_lead_out_of_its_folder(name, tmp_path):
    with pytest.raises(UserError, match="experiment's name"):
        ClientStore(tmp_path, name, "client-00000")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fedavg,fedala"}, "one method at a time"),
        ({"lanes": "3"}, "unknown option lanes"),
        ({"evaluate": "trained"}, "initialised personal model only, .* leave out evaluate"),
        ({"metrics_every": 5}, "leave out metrics_every"),
        ({"min_nodes": 0}, "min_nodes must be at least 1"),
        ({"experiment": "../up"}, "experiment's name"),
        ({"method": "fedfomo", "max_norm": 3.0}, "max_norm does not apply to FedFomo"),
    ],
)
def test_mistakes_in_the_run_config_have_clear_messages(options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run_in_process(tmp_path, **options)


class PowerCut(BaseException):
    pass


@pytest.mark.parametrize(
    ("method", "cut"),
    [
        ("fedala", (1, 0)),
        ("fedala", (2, 1)),
        ("fedala", (3, 2)),
        ("fedala", (4, 0)),
        ("fedfomo", (2, 1)),
    ],
)
def test_a_server_that_died_continues_at_the_right_round(method, cut, tmp_path, run_once):
    """Some clients have trained the round of its death. They repeat it, from the state before."""
    messages = []

    def alter_reply(round, client, sent, reply):
        messages.append((round, client))
        if (round, client) == cut and messages.count(cut) == 1:
            raise PowerCut
        return reply

    with pytest.raises(PowerCut):
        federate(tmp_path / "cut", alter_reply, method=method)
    messages.append("restart")
    resumed = federate(tmp_path / "cut", alter_reply, method=method)
    after_restart = messages[messages.index("restart") + 1 :]
    rounds = [0, *range(cut[0], 5)]
    assert [round for round, _ in after_restart] == [round for round in rounds for _ in range(3)]
    folder, undisturbed = run_once(method, method=method)
    assert list_figures(resumed) == list_figures(undisturbed)
    for client in range(3):
        assert_same_state(load_state(tmp_path / "cut", client, 3), load_state(folder, client, 3))


def test_a_finished_experiment_does_not_run_again_and_another_needs_another_name(tmp_path):
    first = federate(tmp_path, method="fedavg", rounds=1)
    again = federate(
        tmp_path,
        delivers=lambda round, client: pytest.fail("a client gets a message"),
        method="fedavg",
        rounds=1,
    )
    assert list_figures(first) == list_figures(again)
    with pytest.raises(UserError, match=r"lr \(0\.1 → 0\.2\)"):
        federate(tmp_path, method="fedavg", rounds=1, lr=0.2)
    more = federate(tmp_path, method="fedavg", rounds=2)
    assert list_figures(more) == list_figures(
        federate(tmp_path / "other", method="fedavg", rounds=2)
    )


@pytest.mark.parametrize("on_divergence", ["skip", "reset"])
def test_a_client_that_diverges_is_dropped_as_in_the_simulation(on_divergence, tmp_path, caplog):
    """Its round does not count, and its state is not saved. The client itself tells the server."""
    caplog.set_level("WARNING", "flwr")
    options = {"method": "fedala", "lr": 1e9, "rounds": 2, "on_divergence": on_divergence}
    federated = federate(tmp_path, **options)
    here = {"dataset": build_federation(), "model": Net, "lanes": "1"}
    with pytest.warns(fedala.RunWarning, match="Some clients diverged"):
        simulated = fedala.run(**here, **{**RUN, **options})
    assert [row.diverged for row in federated.history] == [
        row.diverged for row in simulated.history
    ]
    assert sum(row.diverged for row in federated.history) > 0
    assert [row.accuracy for row in federated.history] == [
        row.accuracy for row in simulated.history
    ]
    assert (
        "The training of this client diverged in round 1. It saves and sends nothing."
        in caplog.text
    )
    assert "client 2 (seed 5, lane 0) diverged in round 1" in caplog.text
    assert not (
        tmp_path / "state" / "fedala" / "client-00002" / "round-000001.safetensors"
    ).exists()


def test_a_client_that_diverges_ends_the_run_if_the_policy_is_stop(tmp_path):
    with pytest.raises(
        RunError, match=r"Client 2 .* diverged in round 1, and on_divergence is stop"
    ):
        federate(tmp_path, method="fedala", lr=1e9, rounds=2, on_divergence="stop")
