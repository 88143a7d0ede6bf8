"""Buffers that `state_dict` leaves out do not travel and are not saved, and results stay equal."""

from dataclasses import replace

import pytest
import torch

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import CUSTOM, RUN, build_federation, run_in_process  # noqa: E402
from flower.test_parity import assert_same_models, assert_same_rows, load_models  # noqa: E402
from small import Net, assert_close  # noqa: E402

import fedala  # noqa: E402


class TransientNet(Net):
    """Buffers that are not saved: numbers and a counter in the body, and numbers in the head."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((1, 6, 6), 0.3), persistent=False)
        self.hidden.register_buffer("scale", torch.tensor(2), persistent=False)
        self.out.register_buffer("offset", torch.tensor([1.0, -1.0, 0.5]), persistent=False)

    def forward(self, x):
        return super().forward((x - self.mean) * self.hidden.scale) + self.out.offset


TRANSIENT = {"mean", "hidden.scale", "out.offset"}
METHODS = ["fedavg", "fedala", "fedrep", "fedamp", "fedfomo", "apple", "ditto+ala"]


def run_both(tmp_path, model, **options):
    options = {"precision": "float64", "rounds": 2, **options}
    grid, federated = run_in_process(tmp_path, custom=replace(CUSTOM, model=model), **options)
    simulated = fedala.run(dataset=build_federation(), model=model, lanes="1", **{**RUN, **options})
    return grid, federated, simulated


def assert_saved(models, method):
    """Assert that models load strictly, as they were saved."""
    assert models
    for client, model in models.items():
        if method == "fedrep" and client is None:  # it has no head
            names = {n for n in TransientNet().state_dict() if not n.startswith("out.")}
            assert model.keys() == names
        else:
            TransientNet().double().load_state_dict(model)


@pytest.mark.parametrize("method", METHODS)
def test_transient_buffers_are_neither_sent_nor_saved(method, tmp_path):
    grid, federated, simulated = run_both(tmp_path, TransientNet, method=method)
    assert_same_rows(federated.history, simulated.history)
    there = load_models(tmp_path)
    assert_same_models(there, simulated.models, 1e-10)
    assert_saved(there, method)
    assert_saved({client: model for (_, client), model in simulated.models.items()}, method)
    sent = set()
    for message in [*grid.sent, *grid.replies]:
        for record in message.content.array_records.values():
            sent |= record.keys()
    assert "hidden.weight" in sent
    assert not TRANSIENT & sent


def test_transient_buffers_do_not_count_as_sent(tmp_path):
    _, federated, simulated = run_both(tmp_path, TransientNet, method="fedavg", rounds=1)
    size = sum(value.numel() for value in TransientNet().state_dict().values())
    for row in (federated.history[0], simulated.history[0]):
        assert (row.sent, row.uploaded) == (size, size)


@pytest.mark.parametrize("method", ["fedavg", "fedala", "fedrep"])
def test_absent_clients_are_scored_with_transient_buffers(method, tmp_path):
    _, federated, simulated = run_both(
        tmp_path, TransientNet, method=method, join_ratio=0.5, rounds=4
    )
    assert_same_rows(federated.history, simulated.history)


class CountingNet(Net):
    """Statistics that are not saved, but change with each training step."""

    def __init__(self):
        super().__init__()
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.norm.register_buffer(name, self.norm._buffers.pop(name), persistent=False)


@pytest.mark.parametrize("method", METHODS)
def test_transient_buffers_that_change_equal_the_simulation(method, tmp_path):
    _, federated, simulated = run_both(tmp_path, CountingNet, method=method)
    assert_same_rows(federated.history, simulated.history)
    assert_same_models(load_models(tmp_path), simulated.models, 1e-10)


@pytest.mark.parametrize("method", ["fedala", "fedfomo"])
def test_a_restarted_server_continues_with_transient_buffers(method, tmp_path):
    run_in_process(
        tmp_path,
        custom=replace(CUSTOM, model=CountingNet),
        method=method,
        precision="float64",
        rounds=1,
    )
    _, federated, simulated = run_both(tmp_path, CountingNet, method=method)
    assert_same_rows(federated.history, simulated.history)
    assert_same_models(load_models(tmp_path), simulated.models, 1e-10)


class RandomNet(CountingNet):
    """A buffer that is not saved and depends on the seed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.randn(1, 6, 6), persistent=False)

    def forward(self, x):
        return super().forward(x - self.mean)


@pytest.mark.parametrize("method", METHODS)
def test_transient_buffers_are_independent_of_lanes_and_seeds(method):
    """Each run has its own initial model, and so its own buffers."""
    options = {**RUN, "method": method, "precision": "float64", "rounds": 2}
    results = [
        fedala.run(dataset=build_federation(), model=RandomNet, **{**options, **more})
        for more in ({"seeds": 2, "lanes": "6"}, {"seeds": 2, "lanes": "1"}, {"seed": 6})
    ]
    for key, model in results[0].models.items():
        assert_close(model, results[1].models[key], 1e-10)
    for key, model in results[2].models.items():
        assert_close(model, results[0].models[key], 1e-10)
