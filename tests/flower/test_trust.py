"""Who believes whom: a node reads what its own operator names, a number belongs to one node, and errors tell no content."""

import hashlib
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import OWN, RUN, Here  # noqa: E402

from fedala import UserError  # noqa: E402
from fedala.flower import client_app  # noqa: E402
from fedala.flower.experiment import data_at_nodes, read_own, with_absolute_paths  # noqa: E402
from fedala.flower.nodes import Nodes  # noqa: E402
from fedala.flower.records import decode, to_record  # noqa: E402
from fedala.flower.server import serve  # noqa: E402
from fedala.io import tensor_files  # noqa: E402
from fedala.runs.config import Config  # noqa: E402


def introduced(tmp_path, run_config, own=None, **node_config):
    """What a node answers when it is asked who it is."""
    grid = Here(client_app(own), 1, tmp_path / "state", {"clients": 2, **RUN, **run_config})
    grid.node_configs[100] |= {name.replace("_", "-"): value for name, value in node_config.items()}
    Nodes(grid, 2, 0).wait(0.01)
    [reply] = grid.replies
    return reply


@pytest.fixture
def data(tmp_path):
    """A dataset of 40 images, as an .npz of the user's own and as a copy of mnist."""
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
def test_a_run_config_does_not_choose_files_at_a_node(
    node_config, patients, data, tmp_path, monkeypatch, caplog
):
    """The file is not even opened, and the error that leaves the node names neither it nor what is in it."""
    opened, is_watching = [], [True]
    sys.addaudithook(
        lambda event, what: opened.append(str(what[0])) if is_watching and event == "open" else None
    )
    monkeypatch.chdir(tmp_path)
    reply = introduced(tmp_path, {"dataset": str(patients)}, **node_config)
    (tmp_path / "noticed").write_text("")
    is_watching.clear()  # a hook stays for as long as the process does
    assert str(tmp_path / "noticed") in opened
    assert reply.has_error()
    assert reply.error.reason.endswith(":<'UserError; the node's own log says why'>")
    assert str(patients) not in opened
    assert "start it with --node-config" in caplog.text  # which is the node's own log


@pytest.mark.parametrize(
    "what", ["an error of reading", "an error of the model", "an error of one's own data"]
)
def test_an_error_leaves_a_node_as_its_class_alone(what, patients, tmp_path, caplog):
    def fails(context):
        raise KeyError("Jane Doe")

    if what == "an error of reading":
        reply = introduced(tmp_path, {}, dataset=str(patients))
    elif what == "an error of the model":
        reply = introduced(tmp_path, {"model": "fasttext"})
    else:
        reply = introduced(tmp_path, {}, own=type(OWN)(OWN.model, fails, OWN.shape, OWN.classes))
    said = reply.error.reason
    assert said.endswith("; the node's own log says why'>")
    for secret in ("Jane", "diagnosis", "patients", str(tmp_path)):
        assert secret not in said
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("dataset", ["mnist", "hub:owner/name", "own.npz", "~/own.npz", "data"])
def test_what_a_node_has_not_been_told_to_read_is_neither_read_nor_fetched(
    dataset, monkeypatch, tmp_path, data
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "fedala.flower.experiment.load", lambda *arguments: pytest.fail("it is loaded")
    )
    with pytest.raises(UserError, match="this node reads only what its own config names"):
        read_own(Config(dataset=dataset, data_dir=str(data)), {"partition-id": 0})


def test_a_node_reads_what_its_own_config_names(data, tmp_path):
    where = str(data / "own.npz")
    asked = Config(dataset="/srv/patients.csv", data_dir="/srv", clients=2, partition="iid")
    assert read_own(asked, {"dataset": where}).dataset.name == where
    named = Config(dataset="mnist", data_dir="/srv", clients=2, partition="iid")
    assert len(read_own(named, {"data-dir": str(data)}).dataset.y) == 40
    assert read_own(Config(), {}).dataset.name == "digits"


def test_a_partition_file_is_the_nodes_own(tmp_path):
    theirs = tmp_path / "theirs.json"
    with pytest.raises(UserError, match="this node reads only what its own config names"):
        read_own(Config(partition=str(theirs), clients=None), {})
    with pytest.raises(UserError, match=r"mine\.json"):
        read_own(
            Config(partition=str(theirs), clients=None), {"partition": str(tmp_path / "mine.json")}
        )


def test_in_flowers_simulation_the_run_config_is_the_users_own(data, monkeypatch):
    """Everything is on one machine there, and its nodes have no config that could be set."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    config = Config(dataset=str(data / "own.npz"), clients=2, partition="iid")
    assert len(read_own(config, {"partition-id": 0, "num-partitions": 2}).dataset.y) == 40


def test_the_demo_tells_its_nodes_what_to_read(data, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = with_absolute_paths(Config(dataset="data/own.npz", partition="parts.json"))
    assert data_at_nodes(config) == {
        "dataset": str(data / "own.npz"),
        "partition": str(tmp_path / "parts.json"),
    }
    config = with_absolute_paths(Config(dataset="mnist", data_dir="data"))
    assert data_at_nodes(config) == {"dataset": "mnist", "data-dir": str(data)}
    assert data_at_nodes(with_absolute_paths(Config())) == {}
    assert with_absolute_paths(Config(dataset="hub:a/b")).dataset == "hub:a/b"


# --- numbers and keys ------------------------------------------------------------------------------------------------


def federate(tmp_path, nodes, **options):
    """A federation of these nodes, by id, each with the number of the client that it says it is."""
    config = {
        "clients": 3,
        "min_nodes": 2,
        "start_timeout": 1,
        "round_timeout": 0.01,
        "method": "fedala",
    }
    run_config = {**RUN, **config, "out": str(tmp_path / "runs"), **options}
    grid = Here(client_app(OWN), 3, tmp_path / "state", run_config)
    config = grid.node_configs[100]
    grid.node_configs = {node: {**config, "partition-id": client} for node, client in nodes.items()}
    result = serve(grid, run_config, OWN)
    return {m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"}, result


def test_another_node_cannot_take_the_number_of_a_client_that_is_not_there(tmp_path, caplog):
    """Neither in the run in which the client was seen, nor in one that goes on with it; and `rebind` lets it."""
    caplog.set_level("WARNING", "flwr")
    far = 2**64 - 7  # node ids have 64 bits
    federate(tmp_path, {100: 0, far: 1, 102: 2}, rounds=1)
    asked, _ = federate(tmp_path, {100: 0, 666: 1, 102: 2}, rounds=2)
    assert asked == {100, 102}
    said = f"Node 666 is not taken in: it says that it is client 1, a number that belongs to node {far}"
    assert said in caplog.text
    asked, _ = federate(tmp_path, {100: 0, 666: 1, 102: 2}, rounds=3, rebind=True)
    assert asked == {100, 666, 102}
    asked, _ = federate(tmp_path, {100: 0, far: 1, 102: 2}, rounds=4)
    assert asked == {100, 102}


def test_a_node_cannot_take_one_number_after_another(tmp_path, caplog):
    caplog.set_level("WARNING", "flwr")
    nodes = Nodes(grid := Here(client_app(OWN), 3, tmp_path / "state", {"clients": 3, **RUN}), 3, 1)
    del grid.node_configs[102]
    nodes.wait(1)
    grid.node_configs[101]["partition-id"] = 2
    nodes.forget(1)
    nodes.wait(1)
    assert nodes.online() == {0: 100}
    assert (
        "Node 101 is not taken in: it says that it is client 2, and it is client 1" in caplog.text
    )


def test_a_checkpoint_from_before_numbers_were_bound_is_restored(tmp_path):
    """And one that speaks of clients that there are not is another federation's."""
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
    asked, _ = federate(tmp_path, {100: 0, 666: 1, 102: 2}, rounds=2)
    assert asked == {100, 666, 102}


def test_a_node_that_does_not_answer_is_asked_once(tmp_path, caplog):
    caplog.set_level("WARNING", "flwr")
    grid = Here(client_app(OWN), 3, tmp_path / "state", {"clients": 3, **RUN})
    asked = []
    grid.asks = lambda message: (
        asked.append(message.metadata.dst_node_id) or message.metadata.dst_node_id != 101
    )
    nodes = Nodes(grid, 3, 2)
    nodes.wait(0.01)
    nodes.wait(0.01)
    assert asked == [100, 101, 102]
    assert "Node 101 is not taken in: it has not answered within 1 s." in caplog.text


# --- what honest clients send ----------------------------------------------------------------------------------------


def test_a_client_that_has_other_data_now_is_asked_again(tmp_path, caplog):
    """Its round is lost, and from the next one on it counts with the samples that it has."""
    caplog.set_level("INFO", "flwr")
    config = {"clients": 3, "min_nodes": 2, "round_timeout": 0.01, "method": "fedavg"}
    run_config = {**RUN, **config, "out": str(tmp_path / "runs")}
    grown = []

    def samples(context):
        data = OWN.data(context)
        more = context.node_config["partition-id"] == 1 and grown
        return type(data)("own", data.x.repeat(2, 1, 1, 1), data.y.repeat(2), 3) if more else data

    own = type(OWN)(OWN.model, samples, OWN.shape, OWN.classes)
    grid = Here(client_app(own), 3, tmp_path / "state", run_config)
    grid.asks = lambda message: (
        grown.append(1) or True if message.metadata.group_id == "2" else True
    )
    serve(grid, run_config, own)
    dropped = [r.getMessage() for r in caplog.records if "is dropped" in r.getMessage()]
    assert dropped == [
        "Round 2: the update of client 1 (node 101) is dropped: its numbers of samples are not those that it introduced "
        "itself with."
    ]
    assert "Node 101 is client 1, with 34 training samples." in caplog.text


def test_a_loss_that_is_not_finite_is_told_and_costs_no_update(tmp_path, caplog):
    """It is what an honest client's model may come to on a sample that is far out; the figures show it, as a simulation's do."""
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
        grid = Here(client_app(OWN), 3, tmp_path / "state", run_config)

        def meddle(sent, reply, loss=loss):
            if (
                loss is not None
                and sent.metadata.dst_node_id == 101
                and sent.metadata.message_type == "train"
            ):
                scores = reply.content["metrics"]["scores"]
                reply.content["metrics"]["scores"] = [scores[0], loss, scores[2]]
            return reply

        grid.meddle = meddle
        result = serve(grid, run_config, OWN)
        models = [path.read_bytes() for path in result.folder.rglob("global.safetensors")]
        results.append((models, [row.accuracy for row in result.history]))
        if loss is not None:
            [line] = [record.getMessage() for record in caplog.records]
            assert line.startswith(
                "Round 1: the loss of client 1 (node 101) on its test samples is not finite"
            )
            assert not np.isfinite(result.history[0].loss)
            caplog.clear()
    assert results[0] == results[1] == results[2]


def test_every_type_of_number_that_a_model_may_hold_arrives():
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
    found = decode(to_record(model), model)
    assert all(
        torch.equal(found[name], value) and found[name].dtype == value.dtype
        for name, value in model.items()
    )


def test_a_truth_value_that_is_neither_is_refused():
    record = to_record({"mask": torch.tensor([[True, False]])})
    record["mask"].data = record["mask"].data[:-1] + b"\x07"
    with pytest.raises(UserError, match="neither true nor false"):
        decode(record, {"mask": torch.tensor([[True, False]])})
