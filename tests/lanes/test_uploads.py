"""The mean of the uploads: to the bit that of one stack, without making the stack."""

import itertools
from collections import Counter

import pytest
import torch
from small import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from fedala.lanes import Message, Uploads
from fedala.lanes.messages import count_numbers_per_lane
from fedala.lanes.trees import count_bytes, leaves, take, tree_map
from fedala.lanes.uploads import Piece

#: Lanes that do not count (another run's, or diverged) stand between those that do.
LAYOUTS = {
    "one piece": [[4, 0, 3, 1, 2]],
    "one piece with lanes left out": [[None, 4, 0, None, 3, 1, 2, None]],
    "two pieces": [[3, 1], [4, 0, 2]],
    "two pieces with lanes left out": [[3, None, 1], [None, 4, 0, 2]],
    "one lane each": [[2], [0], [4], [1], [3]],
}
CLIENTS = range(5)


def make_message(lanes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(lanes, *shape, generator=generator, dtype=dtype)

    counts = torch.randint(0, 99, (lanes,), generator=generator)
    model = {"conv": draw(3, 2, 3, 3), "bias": draw(7), "scalar": draw(), "count": counts}
    return Message({**model, "empty": draw(0, 4)}, {"c": {"conv": draw(3, 2, 3, 3)}})


def make_uploads(layout, dtype=torch.float32):
    """Return uploads of the layout, and each client's message by its number."""
    pieces, own = [], {}
    for number, clients in enumerate(layout):
        message = make_message(len(clients), dtype, number)
        lanes = [lane for lane, client in enumerate(clients) if client is not None]
        pieces.append(Piece(message, lanes, [clients[lane] for lane in lanes]))
        own |= {clients[lane]: take(message, slice(lane, lane + 1)) for lane in lanes}
    weights = torch.tensor([13.0, 5.0, 0.0, 22.0, 8.0], dtype=torch.float64)
    return Uploads(CLIENTS, weights, pieces), [own[client] for client in CLIENTS]


def average_stack(stack, weights):
    """Return the mean over one stack of all uploads."""
    share = weights / weights.sum()

    def mean(value):
        if not value.is_floating_point():
            return value[:1]
        return torch.tensordot(share.to(value.dtype), value, 1)[None]

    return tree_map(mean, stack)


def assert_equal(found, expected, tolerance=0.0):
    pairs = zip(leaves(found), leaves(expected), strict=True)
    for (path, a), (other, b) in pairs:
        assert path == other
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), path


def use_blocks(monkeypatch, columns):
    monkeypatch.setattr("fedala.lanes.uploads.choose_columns", lambda value, lanes: columns)


@pytest.mark.parametrize("columns", [1000, 25, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mean_is_that_of_one_stack(layout, dtype, columns, monkeypatch):
    """To the bit in one block. Processors round the ends of narrow blocks differently."""
    tolerance = 0.0 if columns == 1000 else 10 * torch.finfo(dtype).eps
    use_blocks(monkeypatch, columns)
    uploads, own = make_uploads(LAYOUTS[layout], dtype)
    stack = tree_map(lambda *values: torch.cat(values), *own)
    for weights in (None, torch.ones(5, dtype=torch.float64)):
        found = uploads.average(weights)
        expected = average_stack(stack, uploads.weights if weights is None else weights)
        assert_equal(found, expected, tolerance)
    assert torch.equal(found.model["count"], own[0].model["count"])


def test_large_parameters_in_blocks_are_the_whole(monkeypatch):
    """Many columns, and remainders of every length. Processors round some lengths differently."""
    pieces = [
        Piece({"w": torch.randn(6, 3, 1001).double()}, range(6), range(n, n + 6)) for n in (0, 6)
    ]
    uploads = Uploads(range(12), torch.arange(1.0, 13.0).double(), pieces)
    whole = uploads.average()
    for columns in (2, 3, 19, 158, 1501, 3002, 3003):
        use_blocks(monkeypatch, columns)
        assert_close(uploads.average(), whole, 1e-14)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stack_and_the_iteration_are_in_the_order_of_the_clients(layout):
    uploads, own = make_uploads(LAYOUTS[layout])
    assert len(uploads) == 5
    assert_equal(uploads.stack(), tree_map(lambda *values: torch.cat(values), *own))
    assert [client for client, _ in uploads] == list(CLIENTS)
    for (_, message), expected in zip(uploads, own, strict=True):
        assert_equal(message, expected)
    before = uploads.pieces[0].message.model["bias"].clone()
    uploads.stack().model["bias"].zero_()
    uploads.average().model["bias"].zero_()
    assert torch.equal(uploads.pieces[0].message.model["bias"], before)


class RecordSizes(TorchDispatchMode):
    """Records the bytes of every tensor that is made, but not of views."""

    def __init__(self):
        super().__init__()
        self.sizes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple | list) else [result]
        flat = itertools.chain.from_iterable(
            value if isinstance(value, tuple | list) else [value] for value in args
        )
        known = {v.untyped_storage().data_ptr() for v in flat if isinstance(v, torch.Tensor)}
        for value in outputs:
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.untyped_storage().data_ptr() not in known:
                self.sizes[str(func), count_bytes(value)] += 1
        return result


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("lanes", [1, 4, 32])
def test_the_mean_takes_little_more_memory_than_itself(lanes, channels_last, monkeypatch):
    """32 clients upload 32 times the model. A mean makes no tensor larger than model or block."""
    block = 2**16
    use_blocks(monkeypatch, block // (32 * 4))
    shape = (64, 32, 3, 3)
    model_bytes = 4 * 64 * 32 * 3 * 3
    pieces = []
    for first in range(0, 32, lanes):
        value = torch.randn(lanes, *shape)
        if channels_last:
            value = value.movedim(2, -1).contiguous().movedim(-1, 2)
        clients = range(first, first + lanes)
        pieces.append(Piece(Message({"w": value}), range(lanes), clients))
    uploads = Uploads(range(32), torch.ones(32, dtype=torch.float64), pieces)
    with RecordSizes() as record:
        found = uploads.average()
    assert max(size for _, size in record.sizes) <= max(block, model_bytes)
    assert sum(n for (_, size), n in record.sizes.items() if size >= model_bytes) <= 2  # the result
    values = torch.cat([piece.message.model["w"] for piece in pieces])
    share = (uploads.weights / 32).float()
    assert torch.equal(found.model["w"], torch.tensordot(share, values.contiguous(), 1)[None])


def test_extra_tensors_are_counted():
    message = make_message(3)
    assert count_numbers_per_lane(message) == 54 + 7 + 1 + 1 + 0 + 54
    assert count_numbers_per_lane(Message()) == 0


def test_messages_do_not_share_what_is_not_given():
    """A method that fills an empty message must not fill those of all others."""
    filled = Message()
    filled.model["weight"] = filled.extra["number"] = torch.ones(1)
    assert Message() == ({}, {})
    assert take(Message(extra={"number": torch.ones(2)}), [0])._fields == ("model", "extra")
