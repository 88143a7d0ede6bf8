"""Trees of tensors arrive as they were sent, and hostile ones are refused."""

import numpy as np
import pytest
import torch

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flwr.app import Array, ArrayRecord  # noqa: E402
from small import Net  # noqa: E402

from fedala import UserError  # noqa: E402
from fedala.flower.arrays import (  # noqa: E402
    MAX_DEPTH,
    check_distance,
    flatten_tree,
    nest_leaves,
    pack_tree,
    unpack_tree,
    unpack_trusted_tree,
)

CPU = torch.device("cpu")


def make_tree():
    """Make a model and extra tensors, as one lane."""
    return {
        "model": {"fc.weight": torch.arange(6.0).view(1, 2, 3), "fc.bias": torch.ones(1, 2)},
        "extra": {"control": {"fc.bias": torch.zeros(1, 2)}, "steps": torch.tensor([7])},
    }


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


def to_array(value):
    return Array(np.asarray(value))


def test_a_tree_arrives_in_both_directions():
    tree = make_tree()
    record = pack_tree(tree)
    assert list(record) == [
        "model/fc.weight",
        "model/fc.bias",
        "extra/control/fc.bias",
        "extra/steps",
    ]
    assert record["model/fc.weight"].shape == (2, 3)  # without the lane
    assert_same_tree(unpack_tree(record, tree), tree)
    assert_same_tree(unpack_trusted_tree(record, CPU), tree)


def test_a_flat_model_has_the_same_bytes_as_in_any_flower_app():
    state = Net().state_dict()
    record = pack_tree({name: value.unsqueeze(0) for name, value in state.items()})
    expected = ArrayRecord(state)
    assert list(record) == list(expected)
    for name, array in expected.items():
        assert record[name].data == array.data
        assert (record[name].dtype, record[name].shape) == (array.dtype, array.shape)


@pytest.mark.parametrize("tree", [{}, {"extra": {}}, {"model": {"w": torch.ones(1)}, "extra": {}}])
def test_empty_branches_come_from_the_template(tree):
    record = pack_tree(tree)
    assert_same_tree(unpack_tree(record, tree), tree)
    full = {key: value for key, value in tree.items() if value}
    assert_same_tree(unpack_trusted_tree(record, CPU), full)


def test_the_template_gives_the_order():
    """A client may send its arrays in any order."""
    tree = make_tree()
    shuffled = ArrayRecord(dict(reversed(pack_tree(tree).items())))
    assert_same_tree(unpack_tree(shuffled, tree), tree)


@pytest.mark.parametrize("key", ["", "/", "a/b", "/a", "a/"])
def test_keys_that_make_a_path_ambiguous_are_refused(key):
    for tree in ({key: torch.ones(1)}, {"a": {key: torch.ones(1)}}, {key: {"a": torch.ones(1)}}):
        with pytest.raises(UserError, match="is empty or contains '/'"):
            pack_tree(tree)


def test_a_tree_may_not_be_too_deep():
    deepest = make_deep_tree(MAX_DEPTH)
    assert_same_tree(unpack_trusted_tree(pack_tree(deepest), CPU), deepest)
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


#: Arrays that a hostile client adds to the tree of `make_tree`, or removes from it (None).
HOSTILE = {
    "a tensor with the name of a branch": ({"model": [1.0]}, "model is not a part of the model"),
    "a branch with the name of a tensor": (
        {"extra/steps/x": [1.0]},
        "extra/steps/x is not a part of the model",
    ),
    "a branch instead of a tensor": (
        {"extra/steps": None, "extra/steps/x": [1.0]},
        "extra/steps is missing",
    ),
    "an unknown tensor": ({"model/trojan": [1.0]}, "model/trojan is not a part of the model"),
    "an unknown branch": ({"trojan/x": [1.0]}, "trojan/x is not a part of the model"),
    "a name without its branch": (
        {"fc.bias": np.ones(2, np.float32)},
        "fc.bias is not a part of the model",
    ),
    "a second slash": ({"model//fc.bias": [1.0]}, "model//fc.bias is not a part of the model"),
    "a final slash": ({"model/fc.bias/": [1.0]}, "model/fc.bias/ is not a part of the model"),
    "an empty name": ({"": [1.0]}, " is not a part of the model"),
    "a deep name": ({"a/" * 100_000: [1.0]}, "is not a part of the model"),
    "a missing tensor": ({"model/fc.bias": None}, "model/fc.bias is missing"),
    "a wrong shape": (
        {"extra/control/fc.bias": np.zeros(3, np.float32)},
        r"control/fc.bias is float32 \[3\], but should be float32 \[2\]",
    ),
    "a lane too many": (
        {"extra/control/fc.bias": np.zeros((1, 2), np.float32)},
        r"control/fc.bias is float32 \[1, 2\], but should be float32 \[2\]",
    ),
    "a wrong type": (
        {"extra/control/fc.bias": np.zeros(2)},
        r"control/fc.bias is float64 \[2\], but should be float32 \[2\]",
    ),
    "NaN": ({"model/fc.bias": np.full(2, np.nan, np.float32)}, "model/fc.bias is not finite"),
    "infinity in an extra tensor": (
        {"extra/control/fc.bias": np.full(2, np.inf, np.float32)},
        "extra/control/fc.bias is not finite",
    ),
    "a negative counter": ({"extra/steps": np.int64(-1)}, "extra/steps is a counter"),
    "a huge counter": ({"extra/steps": np.int64(2**53 + 1)}, "extra/steps is a counter"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_trees_are_refused(name):
    changes, message = HOSTILE[name]
    tree = make_tree()
    record = pack_tree(tree)
    for path, value in changes.items():
        if value is None:
            del record[path]
        else:
            record[path] = to_array(value)
    with pytest.raises(UserError, match=message):
        unpack_tree(record, tree)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_counters_of_every_width_arrive(kind):
    """2**53, the bound of a counter, does not fit into the narrower types."""
    tree = {"steps": torch.tensor([[0, 100]], dtype=kind)}
    assert_same_tree(unpack_tree(pack_tree(tree), tree), tree)


def test_whole_numbers_that_are_negative_in_the_template_are_not_counters():
    tree = {"offsets": torch.tensor([[-3, 4]])}
    upload = {"offsets": torch.tensor([[-8, 2**60]])}
    assert_same_tree(unpack_tree(pack_tree(upload), tree), upload)


def test_the_distance_is_measured_over_the_whole_tree():
    """3² + 4² = 5², over two branches. Whole numbers do not count."""
    sent = {"a": {"x": torch.zeros(1, 2)}, "b": torch.zeros(1, 1), "n": torch.tensor([0])}
    upload = {
        "a": {"x": torch.tensor([[0.0, 3.0]])},
        "b": torch.tensor([[4.0]]),
        "n": torch.tensor([9]),
    }
    check_distance(upload, sent, 5.0)
    with pytest.raises(UserError, match="it is 5 away from the model that was sent"):
        check_distance(upload, sent, 4.99)
