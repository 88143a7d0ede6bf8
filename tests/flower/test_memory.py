"""A server aggregates large uploads with little more memory than they take."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from fedala.flower.arrays import pack_message, unpack_message  # noqa: E402
from fedala.lanes import Message, Uploads  # noqa: E402
from fedala.lanes.uploads import BLOCKS, Piece  # noqa: E402
from fedala.methods import ServerRound, make  # noqa: E402

CLIENTS = 20
MODEL = 4 * 2**20
#: Bytes for biases, indices and the like.
SMALL = 2**16


def make_upload(client):
    weight = torch.full((1, 1024, 1024), float(client))
    return Message({"fc.weight": weight, "fc.bias": torch.full((1, 3), float(client))})


def make_uploads(*, together):
    """Make uploads of 4 MiB each: in one tensor, or as a server decodes them."""
    made = [make_upload(client) for client in range(CLIENTS)]
    lanes = list(range(CLIENTS))
    if together:
        stacked = {name: torch.cat([m.model[name] for m in made]) for name in made[0].model}
        pieces = [Piece(Message(stacked), lanes, lanes)]
    else:
        decoded = [unpack_message(pack_message(message), made[0]) for message in made]
        pieces = [Piece(message, [0], [client]) for client, message in enumerate(decoded)]
    return Uploads(lanes, torch.ones(CLIENTS, dtype=torch.float64), pieces)


def measure_peak(function):
    """Return the most bytes of tensors that a function had allocated at a time, and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    allocations = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    allocated = peak = 0
    for _, change in sorted(allocations):
        allocated += change
        peak = max(peak, allocated)
    assert peak >= MODEL, "the result itself was not measured"
    return peak, result


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("block", [BLOCKS["cpu"], BLOCKS["cuda"]])
def test_an_average_copies_one_block_of_the_uploads_at_a_time(block, together, monkeypatch):
    """The 80 MiB of uploads are not copied: only the result, in parts and as a whole."""
    monkeypatch.setitem(BLOCKS, "cpu", block)
    uploads = make_uploads(together=together)
    server_round = ServerRound(0, 1, 1, range(CLIENTS), [1] * CLIENTS)
    peak, server = measure_peak(lambda: make("fedavg").aggregate({}, uploads, server_round))
    assert peak <= block + 2 * MODEL + SMALL
    for value in server["global"].values():
        assert torch.allclose(value, torch.tensor(9.5))


@pytest.mark.parametrize("together", [False, True])
def test_a_stack_of_uploads_is_copied_once(together):
    uploads = make_uploads(together=together)
    peak, stacked = measure_peak(uploads.stack)
    assert peak <= CLIENTS * MODEL + SMALL
    for value in stacked.model.values():
        assert torch.equal(value.flatten(1)[:, 0], torch.arange(float(CLIENTS)))
