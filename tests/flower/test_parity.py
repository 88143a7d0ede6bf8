"""A federation gives what the simulation gives: the same figures in every round, the same models in the end."""

import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import RUN, in_process, together  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from small import QUICK, Net, assert_close  # noqa: E402

import fedala  # noqa: E402
from fedala.methods import catalogue  # noqa: E402


def same_rows(there, here):
    assert len(there) == len(here)
    for a, b in zip(there, here, strict=True):
        cells, wanted = a.columns(), b.columns()
        assert cells.keys() == wanted.keys()
        for key in cells.keys() - {"seconds"}:
            assert cells[key] == pytest.approx(wanted[key], rel=1e-6, nan_ok=True), (
                f"{key} of round {b.round}"
            )


def same_models(folder, state, simulated, method):
    """The server's global model, and each client's personal one, which only the client has."""
    found = {}
    for path in (folder / "models").rglob("*.safetensors"):
        assert path.name == "global.safetensors"
        found[None] = load_file(path)
    for client in range(3):
        path = state / "fedala" / f"client-{client:05d}" / "model.safetensors"
        if path.exists():
            found[client] = load_file(path)
    assert {(RUN["seed"], client) for client in found} == simulated.keys()
    for client, model in found.items():
        assert_close(model, simulated[RUN["seed"], client], 1e-6)


@pytest.mark.parametrize("method", [*catalogue(), "ditto+ala", "fedrep+ala", "pfedme+ala"])
def test_a_federation_is_the_simulation(method, tmp_path):
    options = {"method": method, "set": QUICK.get(method, {})}
    _, federated = in_process(tmp_path, **options)
    simulated = fedala.run(dataset=together(), model=Net, lanes="1", **RUN, **options)
    same_rows(federated.history, simulated.history)
    same_models(tmp_path / "runs" / "fedala", tmp_path / "state", simulated.models, method)


@pytest.mark.parametrize("method", ["fedavg", "fedala", "fedrep", "fedfomo", "local"])
@pytest.mark.parametrize("eval_clients", ["all", "joined"])
def test_and_where_only_some_join(method, eval_clients, tmp_path):
    options = {
        "method": method,
        "join_ratio": 0.5,
        "rounds": 5,
        "eval_clients": eval_clients,
        "eval_every": 2,
    }
    _, federated = in_process(tmp_path, **options)
    simulated = fedala.run(dataset=together(), model=Net, lanes="1", **{**RUN, **options})
    same_rows(federated.history, simulated.history)


def test_a_named_dataset_is_divided_the_same_way_everywhere(tmp_path):
    options = {
        "method": "fedala",
        "dataset": "digits",
        "partition": "dir:0.5",
        "rounds": 1,
        "batch_size": 50,
    }
    _, federated = in_process(tmp_path, own=None, nodes=2, **options)
    simulated = fedala.run(lanes="1", clients=2, **{**RUN, **options})
    same_rows(federated.history, simulated.history)


def test_what_travels_is_what_the_method_declares(tmp_path):
    """FedRep's head and ALA's weights stay where they are; FedFomo's first round sends nothing, later ones one stack."""
    grid, _ = in_process(tmp_path / "fedrep", method="fedrep+ala")
    for message in [*grid.sent, *grid.replies]:
        for record in message.content.array_records.values():
            assert set(record) <= {n for n in Net().state_dict() if not n.startswith("out.")}
    grid, _ = in_process(tmp_path / "fedfomo", method="fedfomo")
    shapes = [
        (message.metadata.group_id, list(record["out.bias"].shape) if record else None)
        for message in grid.sent
        for record in message.content.array_records.values()
    ]
    assert shapes == [("1", None)] * 3 + [(r, [3, 3]) for r in "234" for _ in range(3)]


def test_an_evaluation_trains_nothing_and_keeps_no_state(tmp_path):
    grid, _ = in_process(tmp_path, method="fedala")
    last = [m for m in grid.sent if m.metadata.group_id == "4"]
    assert {m.metadata.message_type for m in last} == {"evaluate"}
    assert all(not r.content["arrays"] for r in grid.replies[-3:])
    for client in range(3):
        files = sorted((tmp_path / "state" / "fedala" / f"client-{client:05d}").glob("round-*"))
        assert [file.stem for file in files] == ["round-000002", "round-000003"]
