"""Trust between server and nodes.

A node reads only the data that its operator names, a number belongs to one node, and an error that
leaves a node does not quote data.
"""

import hashlib
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import CUSTOM, RUN, InProcessGrid  # noqa: E402

from fedala import UserError  # noqa: E402
from fedala.flower import client_app  # noqa: E402
from fedala.flower.arrays import pack_message, unpack_message  # noqa: E402
from fedala.flower.experiment import (  # noqa: E402
    build_node_config,
    make_paths_absolute,
    read_node_samples,
)
from fedala.flower.nodes import Nodes  # noqa: E402
from fedala.flower.server import serve  # noqa: E402
from fedala.io import tensor_files  # noqa: E402
from fedala.lanes import Message  # noqa: E402
from fedala.runs.config import Config  # noqa: E402


def query_node(tmp_path, run_config, custom=None, **node_config):
    """Return the reply of a node that is asked who it is."""
    grid = InProcessGrid(
        client_app(custom), 1, tmp_path / "state", {"clients": 2, **RUN, **run_config}
    )
    grid.node_configs[100] |= {name.replace("_", "-"): value for name, value in node_config.items()}
    Nodes(grid, 2, 0).wait_until_ready(0.01)
    [reply] = grid.replies
    return reply


@pytest.fixture
def data(tmp_path):
    """Write a dataset of 40 images, as an own .npz file and as a copy of mnist."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 255, (40, 28, 28), dtype=np.uint8), np.arange(40) % 10
    (tmp_path / "data").mkdir()
    for name in ("own", "mnist"):
        np.savez(tmp_path / "data" / f"{name}.npz", x=x, y=y)
    return tmp_path / "data"


@pytest.fixture
def patients(tmp_path):
    path = tmp_path / "patients.csv"
    path.write_text("name,diagnosis\nJane Doe,secret\n")
    return path


@pytest.mark.parametrize(
    "node_config", [{}, {"data_dir": "data"}], ids=["without data-dir", "with data-dir"]
)
def test_a_run_config_cannot_choose_files_of_a_node(
    node_config, patients, data, tmp_path, monkeypatch, caplog
):
    """The file is not opened. The error that leaves the node does not name or quote it."""
    opened, is_watching = [], [True]
    sys.addaudithook(
        lambda event, args: opened.append(str(args[0])) if is_watching and event == "open" else None
    )
    monkeypatch.chdir(tmp_path)
    reply = query_node(tmp_path, {"dataset": str(patients)}, **node_config)
    (tmp_path / "witness").write_text("")
    is_watching.clear()  # a hook cannot be removed
    assert str(tmp_path / "witness") in opened
    assert reply.has_error()
    assert reply.error.reason.endswith(":<'UserError; the node's own log says why'>")
    assert str(patients) not in opened
    assert "start it with --node-config" in caplog.text  # the node's own log


@pytest.mark.parametrize("source", ["reading", "the model", "custom data"])
def test_only_the_class_of_an_error_leaves_a_node(source, patients, tmp_path, caplog):
    def fail(context):
        raise KeyError("Jane Doe")

    if source == "reading":
        reply = query_node(tmp_path, {}, dataset=str(patients))
    elif source == "the model":
        reply = query_node(tmp_path, {"model": "fasttext"})
    else:
        reply = query_node(
            tmp_path, {}, custom=type(CUSTOM)(CUSTOM.model, fail, CUSTOM.shape, CUSTOM.classes)
        )
    reason = reply.error.reason
    assert reason.endswith("; the node's own log says why'>")
    for secret in ("Jane", "diagnosis", "patients", str(tmp_path)):
        assert secret not in reason
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("dataset", ["mnist", "hub:owner/name", "own.npz", "~/own.npz", "data"])
def test_a_node_does_not_read_or_download_data_that_its_config_does_not_name(
    dataset, monkeypatch, tmp_path, data
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "fedala.flower.experiment.load_dataset", lambda *arguments: pytest.fail("it is loaded")
    )
    with pytest.raises(UserError, match="this node reads only what its own config names"):
        read_node_samples(Config(dataset=dataset, data_dir=str(data)), {"partition-id": 0})


def test_a_node_reads_what_its_own_config_names(data, tmp_path):
    path = str(data / "own.npz")
    requested = Config(dataset="/srv/patients.csv", data_dir="/srv", clients=2, partition="iid")
    assert read_node_samples(requested, {"dataset": path}).dataset.name == path
    named = Config(dataset="mnist", data_dir="/srv", clients=2, partition="iid")
    assert len(read_node_samples(named, {"data-dir": str(data)}).dataset.y) == 40
    assert read_node_samples(Config(), {}).dataset.name == "digits"


def test_a_node_reads_only_its_own_partition_file(tmp_path):
    other = tmp_path / "theirs.json"
    with pytest.raises(UserError, match="this node reads only what its own config names"):
        read_node_samples(Config(partition=str(other), clients=None), {})
    with pytest.raises(UserError, match=r"mine\.json"):
        read_node_samples(
            Config(partition=str(other), clients=None), {"partition": str(tmp_path / "mine.json")}
        )


def test_in_flowers_simulation_nodes_read_the_data_of_the_run_config(data, monkeypatch):
    """There, everything is on one machine, and users cannot set the config of a node."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    config = Config(dataset=str(data / "own.npz"), clients=2, partition="iid")
    assert len(read_node_samples(config, {"partition-id": 0, "num-partitions": 2}).dataset.y) == 40


def test_the_demo_names_the_data_in_its_node_configs(data, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = make_paths_absolute(Config(dataset="data/own.npz", partition="parts.json"))
    assert build_node_config(config) == {
        "dataset": str(data / "own.npz"),
        "partition": str(tmp_path / "parts.json"),
    }
    config = make_paths_absolute(Config(dataset="mnist", data_dir="data"))
    assert build_node_config(config) == {"dataset": "mnist", "data-dir": str(data)}
    assert build_node_config(make_paths_absolute(Config())) == {}
    assert make_paths_absolute(Config(dataset="hub:a/b")).dataset == "hub:a/b"


# --- numbers and keys ---


def federate(tmp_path, nodes, **options):
    """Run a federation of nodes, {id: client}; return the nodes that trained, and the result."""
    config = {
        "clients": 3,
        "min_nodes": 2,
        "start_timeout": 1,
        "round_timeout": 0.01,
        "method": "fedala",
    }
    run_config = {**RUN, **config, "out": str(tmp_path / "runs"), **options}
    grid = InProcessGrid(client_app(CUSTOM), 3, tmp_path / "state", run_config)
    config = grid.node_configs[100]
    grid.node_configs = {node: {**config, "partition-id": client} for node, client in nodes.items()}
    result = serve(grid, run_config, CUSTOM)
    trained = {m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"}
    return trained, result


def test_another_node_cannot_take_the_number_of_an_offline_client(tmp_path, caplog):
    """Neither in the same run nor in a resumed one, unless `rebind` allows it."""
    caplog.set_level("WARNING", "flwr")
    large = 2**64 - 7  # node ids have 64 bits
    federate(tmp_path, {100: 0, large: 1, 102: 2}, rounds=1)
    trained, _ = federate(tmp_path, {100: 0, 666: 1, 102: 2}, rounds=2)
    assert trained == {100, 102}
    reason = f"it says that it is client 1, a number that belongs to node {large}"
    assert f"Node 666 is refused: {reason}" in caplog.text
    trained, _ = federate(tmp_path, {100: 0, 666: 1, 102: 2}, rounds=3, rebind=True)
    assert trained == {100, 666, 102}
    trained, _ = federate(tmp_path, {100: 0, large: 1, 102: 2}, rounds=4)
    assert trained == {100, 102}


def test_a_node_cannot_take_one_number_after_another(tmp_path, caplog):
    caplog.set_level("WARNING", "flwr")
    nodes = Nodes(
        grid := InProcessGrid(client_app(CUSTOM), 3, tmp_path / "state", {"clients": 3, **RUN}),
        3,
        1,
    )
    del grid.node_configs[102]
    nodes.wait_until_ready(1)
    grid.node_configs[101]["partition-id"] = 2
    nodes.forget_introduction(1)
    nodes.wait_until_ready(1)
    assert nodes.find_online_clients() == {0: 100}
    assert "Node 101 is refused: it says that it is client 2, but it is client 1" in caplog.text


def test_a_checkpoint_without_owners_of_numbers_is_restored(tmp_path):
    """A checkpoint with clients that do not exist belongs to another federation."""
    _, first = federate(tmp_path, {100: 0, 101: 1, 102: 2}, rounds=1)
    [server] = first.folder.rglob("checkpoint/**/server-1.safetensors")
    state, _ = tensor_files.load(server)
    assert state["bound"].tolist() == [[0, 100], [1, 101], [2, 102]]

    def rewrite(state):
        digest = tensor_files.save(server, state)
        [manifest] = server.parent.glob("0000001.json")
        text = json.loads(manifest.read_text())["checkpoint"]
        values = json.loads(text)
        values["server"][1] = digest
        text = json.dumps(values)
        manifest.write_text(
            json.dumps({"checksum": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": text})
        )

    rewrite({**state, "counted": torch.tensor([[7, 1]])})
    with pytest.raises(UserError, match="does not fit this run"):
        federate(tmp_path, {100: 0, 101: 1, 102: 2}, rounds=2)
    rewrite({name: value for name, value in state.items() if name != "bound"})
    trained, _ = federate(tmp_path, {100: 0, 666: 1, 102: 2}, rounds=2)
    assert trained == {100, 666, 102}


def test_a_node_that_does_not_answer_is_queried_once(tmp_path, caplog):
    caplog.set_level("WARNING", "flwr")
    grid = InProcessGrid(client_app(CUSTOM), 3, tmp_path / "state", {"clients": 3, **RUN})
    queried = []
    grid.delivers = lambda message: (
        queried.append(message.metadata.dst_node_id) or message.metadata.dst_node_id != 101
    )
    nodes = Nodes(grid, 3, 2)
    nodes.wait_until_ready(0.01)
    nodes.wait_until_ready(0.01)
    assert queried == [100, 101, 102]
    assert "Node 101 is refused: it did not answer within 1 s." in caplog.text


# --- replies of honest clients ---


def test_a_client_whose_data_changed_is_queried_again(tmp_path, caplog):
    """Its round is lost. From the next round, it counts with its new samples."""
    caplog.set_level("INFO", "flwr")
    config = {"clients": 3, "min_nodes": 2, "round_timeout": 0.01, "method": "fedavg"}
    run_config = {**RUN, **config, "out": str(tmp_path / "runs")}
    has_grown = []

    def read_samples(context):
        data = CUSTOM.data(context)
        more = context.node_config["partition-id"] == 1 and has_grown
        return type(data)("own", data.x.repeat(2, 1, 1, 1), data.y.repeat(2), 3) if more else data

    custom = type(CUSTOM)(CUSTOM.model, read_samples, CUSTOM.shape, CUSTOM.classes)
    grid = InProcessGrid(client_app(custom), 3, tmp_path / "state", run_config)
    grid.delivers = lambda message: (
        has_grown.append(1) or True if message.metadata.group_id == "2" else True
    )
    serve(grid, run_config, custom)
    dropped = [r.getMessage() for r in caplog.records if "is dropped" in r.getMessage()]
    assert dropped == [
        "Round 2: the update of client 1 (node 101) is dropped: its numbers of samples differ from "
        "those of its introduction."
    ]
    assert "Node 101 is client 1, with 34 training samples." in caplog.text


def test_a_loss_that_is_not_finite_is_logged_and_the_update_counts(tmp_path, caplog):
    """An honest client's model may have such a loss on an unusual sample, as in a simulation."""
    caplog.set_level("WARNING", "flwr")
    results = []
    for loss in (None, float("nan"), float("inf")):
        run_config = {
            **RUN,
            "clients": 3,
            "rounds": 1,
            "out": str(tmp_path / f"runs-{loss}"),
            "method": "fedavg",
        }
        grid = InProcessGrid(client_app(CUSTOM), 3, tmp_path / "state", run_config)

        def alter_reply(sent, reply, loss=loss):
            is_update = sent.metadata.message_type == "train" and sent.metadata.dst_node_id == 101
            if is_update and loss is not None:
                scores = reply.content["metrics"]["scores"]
                reply.content["metrics"]["scores"] = [scores[0], loss, scores[2]]
            return reply

        grid.alter_reply = alter_reply
        result = serve(grid, run_config, CUSTOM)
        models = [path.read_bytes() for path in result.folder.glob("models/fed*/*/global.*")]
        results.append((models, [row.accuracy for row in result.history]))
        if loss is not None:
            [line] = [record.getMessage() for record in caplog.records]
            assert line.startswith(
                "Round 1: the loss of client 1 (node 101) on its test samples is not finite"
            )
            assert not np.isfinite(result.history[0].loss)
            caplog.clear()
    assert results[0] == results[1] == results[2]


def test_every_type_of_number_in_a_model_arrives():
    kinds = (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
    model = {str(kind): torch.tensor([[[1, 0, 1]]]).to(kind) for kind in kinds}
    model |= {"none": torch.zeros(1, 0, 3), "one": torch.tensor([2.5])}
    unpacked = unpack_message(pack_message(Message(model)), Message(model)).model
    assert all(
        torch.equal(unpacked[name], value) and unpacked[name].dtype == value.dtype
        for name, value in model.items()
    )


def test_a_truth_value_that_is_neither_is_refused():
    message = Message({"mask": torch.tensor([[True, False]])})
    record = pack_message(message)
    record["mask"].data = record["mask"].data[:-1] + b"\x07"
    with pytest.raises(UserError, match="neither true nor false"):
        unpack_message(record, message)
