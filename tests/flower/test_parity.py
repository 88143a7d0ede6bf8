"""A federation equals the simulation: the same figures in every round, and the same models."""

import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import RUN, build_federation, run_in_process  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from small import QUICK, Net, assert_close  # noqa: E402

import fedala  # noqa: E402
from fedala.methods import catalogue  # noqa: E402


def assert_same_rows(there, here):
    assert len(there) == len(here)
    for a, b in zip(there, here, strict=True):
        cells, wanted = a.columns(), b.columns()
        assert cells.pop("asked") == cells.pop("answered")  # columns of a federation alone
        assert cells.keys() == wanted.keys()
        for key in cells.keys() - {"seconds"}:
            assert cells[key] == pytest.approx(wanted[key], rel=1e-6, nan_ok=True), (
                f"{key} of round {b.round}"
            )


def load_models(tmp_path):
    """Load the server's global model, and each client's personal one from its own files."""
    models = {}
    for path in (tmp_path / "runs" / "fedala" / "models").rglob("*.safetensors"):
        assert path.name == "global.safetensors"
        if "best" not in path.parts:
            models[None] = load_file(path)
    for client in range(3):
        path = tmp_path / "state" / "fedala" / f"client-{client:05d}" / "model.safetensors"
        if path.exists():
            models[client] = load_file(path)
    return models


def assert_same_models(models, simulated, tolerance=1e-6):
    assert {(RUN["seed"], client) for client in models} == simulated.keys()
    for client, model in models.items():
        assert_close(model, simulated[RUN["seed"], client], tolerance)


@pytest.mark.parametrize("method", [*catalogue(), "ditto+ala", "fedrep+ala", "pfedme+ala"])
def test_a_federation_equals_the_simulation(method, tmp_path):
    options = {"method": method, "set": QUICK.get(method, {})}
    _, federated = run_in_process(tmp_path, **options)
    simulated = fedala.run(dataset=build_federation(), model=Net, lanes="1", **RUN, **options)
    assert_same_rows(federated.history, simulated.history)
    assert_same_models(load_models(tmp_path), simulated.models)


def test_augmented_and_normalised_images_are_the_same(tmp_path):
    options = {"method": "fedrep+ala", "augment": "flip,crop:2", "normalize": "0.4/0.3"}
    _, federated = run_in_process(tmp_path, **options)
    simulated = fedala.run(dataset=build_federation(), model=Net, lanes="1", **RUN, **options)
    assert_same_rows(federated.history, simulated.history)
    assert_same_models(load_models(tmp_path), simulated.models)


def test_each_node_shifts_its_own_samples_as_the_simulation_does(tmp_path):
    """A node knows its number and, from the run config, how many clients there are."""
    options = {**RUN, "method": "fedavg", "rounds": 1, "feature_shift": "noise:0.5"}
    _, federated = run_in_process(tmp_path, **options)
    simulated = fedala.run(dataset=build_federation(), model=Net, lanes="1", **options)
    assert_same_rows(federated.history, simulated.history)
    plain = fedala.run(dataset=build_federation(), model=Net, **{**options, "feature_shift": None})
    assert plain.history[-1].loss != simulated.history[-1].loss


@pytest.mark.parametrize(
    ("method", "join_ratio"), [("fedala", 1.0), ("ditto", 1.0), ("fedavg-c", 1.0), ("fedavg", 0.5)]
)
def test_a_client_keeps_its_optimizer_between_rounds(method, join_ratio, tmp_path):
    options = {"method": method, "set": QUICK.get(method, {}), "join_ratio": join_ratio}
    options |= {"optimizer": "adamw", "keep_optimizer": True, "lr": 0.02, "local_steps": 3}
    options |= {"schedule": "cosine", "clip": 0.5, "augment": "flip"}
    _, federated = run_in_process(tmp_path, **options)
    simulated = fedala.run(dataset=build_federation(), model=Net, lanes="1", **{**RUN, **options})
    assert_same_rows(federated.history, simulated.history)


@pytest.mark.parametrize(
    ("method", "eval_clients"),
    [
        ("fedala", "all"),
        ("fedala", "joined"),
        ("fedavg", "joined"),
        ("fedrep", "all"),
        ("fedfomo", "joined"),
        ("local", "all"),
    ],
)
def test_a_federation_equals_the_simulation_if_only_some_clients_join(
    method, eval_clients, tmp_path
):
    options = {
        "method": method,
        "join_ratio": 0.5,
        "rounds": 5,
        "eval_clients": eval_clients,
        "eval_every": 2,
    }
    _, federated = run_in_process(tmp_path, **options)
    simulated = fedala.run(dataset=build_federation(), model=Net, lanes="1", **{**RUN, **options})
    assert_same_rows(federated.history, simulated.history)


def test_a_named_dataset_is_divided_in_the_same_way(tmp_path):
    options = {
        "method": "fedala",
        "dataset": "digits",
        "partition": "dir:0.5",
        "rounds": 1,
        "batch_size": 50,
        "resize": 16,
    }
    _, federated = run_in_process(tmp_path, custom=None, nodes=2, **options)
    simulated = fedala.run(lanes="1", clients=2, **{**RUN, **options})
    assert_same_rows(federated.history, simulated.history)


def test_messages_hold_only_the_arrays_that_the_method_declares(tmp_path):
    """FedRep's head and ALA's W stay at the clients. FedFomo sends nothing, then model stacks."""
    grid, _ = run_in_process(tmp_path / "fedrep", method="fedrep+ala")
    for message in [*grid.sent, *grid.replies]:
        for record in message.content.array_records.values():
            assert set(record) <= {n for n in Net().state_dict() if not n.startswith("out.")}
    grid, _ = run_in_process(tmp_path / "fedfomo", method="fedfomo")
    shapes = []
    for message in grid.sent:
        for record in message.content.array_records.values():
            shape = list(record["out.bias"].shape) if record else None
            shapes.append((message.metadata.group_id, shape))
    expected = [("1", None)] * 3 + [("2", [3, 3])] * 3 + [("3", [3, 3])] * 3 + [("4", [3, 3])] * 3
    assert shapes == expected


def test_an_evaluation_does_not_train_or_save_states(tmp_path):
    grid, _ = run_in_process(tmp_path, method="fedala")
    last = [m for m in grid.sent if m.metadata.group_id == "4"]
    assert {m.metadata.message_type for m in last} == {"evaluate"}
    assert all(not r.content["arrays"] for r in grid.replies[-3:])
    for client in range(3):
        files = sorted((tmp_path / "state" / "fedala" / f"client-{client:05d}").glob("round-*"))
        assert [file.stem for file in files] == ["round-000002", "round-000003"]
