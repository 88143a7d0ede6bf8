"""Messages arrive as they were sent, and hostile ones are refused."""

import numpy as np
import pytest
import torch

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flwr.app import Array, ArrayRecord  # noqa: E402
from small import Net  # noqa: E402

from fedala import UserError  # noqa: E402
from fedala.flower.arrays import (  # noqa: E402
    EXTRA,
    MAX_DEPTH,
    check_distance,
    flatten_tree,
    nest_leaves,
    pack_message,
    unpack_message,
    unpack_trusted_message,
)
from fedala.lanes import Message  # noqa: E402

CPU = torch.device("cpu")


def make_message():
    """Make a model and extra tensors, as one lane."""
    return Message(
        {"fc.weight": torch.arange(6.0).view(1, 2, 3), "fc.bias": torch.ones(1, 2)},
        {"control": {"fc.bias": torch.zeros(1, 2)}, "steps": torch.tensor([7])},
    )


def make_deep_tree(depth):
    tree = {"leaf": torch.ones(1, 1)}
    for _ in range(depth - 1):
        tree = {"branch": tree}
    return tree


def assert_same_tree(tree, expected):
    assert tree.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same_tree(tree[key], value)
        else:
            assert tree[key].dtype == value.dtype
            assert torch.equal(tree[key], value)


def assert_same_message(message, expected):
    assert_same_tree(message._asdict(), expected._asdict())


def to_array(value):
    return Array(np.asarray(value))


def test_a_message_arrives_in_both_directions():
    message = make_message()
    record = pack_message(message)
    assert list(record) == ["fc.weight", "fc.bias", "+extra/control/fc.bias", "+extra/steps"]
    assert record["fc.weight"].shape == (2, 3)  # without the lane
    assert_same_message(unpack_message(record, message), message)
    assert_same_message(unpack_trusted_message(record, CPU), message)


def test_a_flat_model_has_the_same_bytes_as_in_any_flower_app():
    state = Net().state_dict()
    record = pack_message(Message({name: value.unsqueeze(0) for name, value in state.items()}))
    expected = ArrayRecord(state)
    assert list(record) == list(expected)
    for name, array in expected.items():
        assert record[name].data == array.data
        assert (record[name].dtype, record[name].shape) == (array.dtype, array.shape)


@pytest.mark.parametrize(
    "message",
    [Message(), Message({"w": torch.ones(1)}), Message(extra={"control": {"w": torch.ones(1)}})],
    ids=["nothing", "only a model", "only extra tensors"],
)
def test_a_message_may_lack_a_model_or_extra_tensors(message):
    record = pack_message(message)
    assert_same_message(unpack_message(record, message), message)
    assert_same_message(unpack_trusted_message(record, CPU), message)


def test_a_dict_without_tensors_does_not_travel():
    message = Message({"w": torch.ones(1)}, {"control": {}})
    record = pack_message(message)
    assert_same_message(unpack_message(record, message), Message({"w": torch.ones(1)}))
    assert_same_message(unpack_trusted_message(record, CPU), Message({"w": torch.ones(1)}))


def test_slashes_in_the_names_of_parameters_stay():
    message = Message({"a/b": torch.ones(1, 2), "a": torch.ones(1, 1), "/": torch.ones(1)})
    record = pack_message(message)
    assert list(record) == ["a/b", "a", "/"]
    assert_same_message(unpack_message(record, message), message)
    assert_same_message(unpack_trusted_message(record, CPU), message)


def test_a_parameter_may_not_have_the_name_of_an_extra_tensor():
    for extra in ({}, {"a": torch.ones(1)}):
        with pytest.raises(UserError, match=r"the parameter \+extra/a must have another name"):
            pack_message(Message({f"{EXTRA}a": torch.zeros(1)}, extra))


def test_the_template_gives_the_order():
    """A client may send its arrays in any order."""
    message = make_message()
    shuffled = ArrayRecord(dict(reversed(pack_message(message).items())))
    unpacked = unpack_message(shuffled, message)
    assert_same_message(unpacked, message)
    assert list(unpacked.model) == list(message.model)
    assert list(unpacked.extra) == list(message.extra)


@pytest.mark.parametrize("key", ["", "/", "a/b", "/a", "a/"])
def test_keys_that_make_a_path_ambiguous_are_refused(key):
    for tree in ({key: torch.ones(1)}, {"a": {key: torch.ones(1)}}, {key: {"a": torch.ones(1)}}):
        with pytest.raises(UserError, match="is empty or contains '/'"):
            pack_message(Message(extra=tree))


def test_a_tree_may_not_be_too_deep():
    deepest = Message(extra=make_deep_tree(MAX_DEPTH))
    assert_same_message(unpack_trusted_message(pack_message(deepest), CPU), deepest)
    with pytest.raises(UserError, match=f"more than {MAX_DEPTH} levels"):
        flatten_tree(make_deep_tree(MAX_DEPTH + 1))
    with pytest.raises(UserError, match=f"not a path of 1 to {MAX_DEPTH} names"):
        nest_leaves({"a/" * MAX_DEPTH + "a": torch.ones(1)})


@pytest.mark.parametrize("path", ["", "/", "a/", "/a", "a//b", "a/" * 100_000 + "a"])
def test_a_path_with_empty_or_too_many_names_is_refused(path):
    with pytest.raises(UserError, match="is not a path"):
        nest_leaves({path: torch.ones(1)})


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["a", "a/b"], "a/b lies below a, which is a tensor"),
        (["a/b", "a"], "a is both a tensor and a branch"),
        (["x/a", "x/a/b/c"], "x/a/b/c lies below a, which is a tensor"),
        (["x/a/b/c", "x/a"], "x/a is both a tensor and a branch"),
    ],
)
def test_a_path_cannot_be_both_a_tensor_and_a_branch(paths, message):
    with pytest.raises(UserError, match=message):
        nest_leaves({path: torch.ones(1) for path in paths})
    record = ArrayRecord({f"{EXTRA}{path}": torch.ones(1) for path in paths})
    with pytest.raises(UserError, match=message):
        unpack_trusted_message(record, CPU)


#: Arrays that a hostile client adds to the message of `make_message`, or removes from it (None).
HOSTILE = {
    "a tensor with the name of a branch": (
        {"+extra/control": [1.0]},
        r"\+extra/control is not a part of the model",
    ),
    "a tensor with the name of all extra tensors": (
        {"+extra/": [1.0]},
        r"\+extra/ is not a part of the model",
    ),
    "a tensor with almost the name of all extra tensors": (
        {"+extra": [1.0]},
        r"\+extra is not a part of the model",
    ),
    "a branch with the name of a tensor": (
        {"+extra/steps/x": [1.0]},
        r"\+extra/steps/x is not a part of the model",
    ),
    "a branch instead of a tensor": (
        {"+extra/steps": None, "+extra/steps/x": [1.0]},
        r"\+extra/steps is missing",
    ),
    "an unknown tensor": ({"trojan": [1.0]}, "trojan is not a part of the model"),
    "an unknown extra tensor": (
        {"+extra/trojan": [1.0]},
        r"\+extra/trojan is not a part of the model",
    ),
    "an extra tensor in another branch": (
        {"+extra/control/fc.bias": None, "+extra/fc.bias": np.zeros(2, np.float32)},
        r"\+extra/control/fc.bias is missing",
    ),
    "an unknown branch": ({"trojan/x": [1.0]}, "trojan/x is not a part of the model"),
    "a name without its branch": (
        {"control/fc.bias": np.ones(2, np.float32)},
        "control/fc.bias is not a part of the model",
    ),
    "a second slash": ({"+extra//steps": [1.0]}, r"\+extra//steps is not a part of the model"),
    "a final slash": ({"fc.bias/": [1.0]}, "fc.bias/ is not a part of the model"),
    "an empty name": ({"": [1.0]}, " is not a part of the model"),
    "a deep name": ({"a/" * 100_000: [1.0]}, "is not a part of the model"),
    "a missing tensor": ({"fc.bias": None}, "fc.bias is missing"),
    "a wrong shape": (
        {"+extra/control/fc.bias": np.zeros(3, np.float32)},
        r"control/fc.bias is float32 \[3\], but should be float32 \[2\]",
    ),
    "a lane too many": (
        {"+extra/control/fc.bias": np.zeros((1, 2), np.float32)},
        r"control/fc.bias is float32 \[1, 2\], but should be float32 \[2\]",
    ),
    "a wrong type": (
        {"+extra/control/fc.bias": np.zeros(2)},
        r"control/fc.bias is float64 \[2\], but should be float32 \[2\]",
    ),
    "NaN": ({"fc.bias": np.full(2, np.nan, np.float32)}, "fc.bias is not finite"),
    "NaN in an extra tensor": (
        {"+extra/control/fc.bias": np.full(2, np.nan, np.float32)},
        r"\+extra/control/fc.bias is not finite",
    ),
    "infinity in an extra tensor": (
        {"+extra/control/fc.bias": np.full(2, np.inf, np.float32)},
        r"\+extra/control/fc.bias is not finite",
    ),
    "a negative counter": ({"+extra/steps": np.int64(-1)}, r"\+extra/steps is a counter"),
    "a huge counter": ({"+extra/steps": np.int64(2**53 + 1)}, r"\+extra/steps is a counter"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_messages_are_refused(name):
    changes, problem = HOSTILE[name]
    message = make_message()
    record = pack_message(message)
    for path, value in changes.items():
        if value is None:
            del record[path]
        else:
            record[path] = to_array(value)
    with pytest.raises(UserError, match=problem):
        unpack_message(record, message)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_counters_of_every_width_arrive(kind):
    """2**53, the bound of a counter, does not fit into the narrower types."""
    message = Message(extra={"steps": torch.tensor([[0, 100]], dtype=kind)})
    assert_same_message(unpack_message(pack_message(message), message), message)


def test_whole_numbers_that_are_negative_in_the_template_are_not_counters():
    template = Message(extra={"offsets": torch.tensor([[-3, 4]])})
    upload = Message(extra={"offsets": torch.tensor([[-8, 2**60]])})
    assert_same_message(unpack_message(pack_message(upload), template), upload)


def test_the_distance_is_measured_over_the_whole_model():
    """3² + 4² = 5², over two parameters. Whole numbers do not count."""
    sent = {"a": torch.zeros(1, 2), "b": torch.zeros(1, 1), "n": torch.tensor([0])}
    upload = {
        "a": torch.tensor([[0.0, 3.0]]),
        "b": torch.tensor([[4.0]]),
        "n": torch.tensor([9]),
    }
    check_distance(upload, sent, 5.0)
    with pytest.raises(UserError, match="it is 5 away from the model that was sent"):
        check_distance(upload, sent, 4.99)
