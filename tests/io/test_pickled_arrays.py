"""Arrays are read out of a pickle as Python reads them; nothing that a pickle names is called."""

import builtins
import os
import pickle
import pickletools
import struct
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedala.errors import UserError
from fedala.io import pickled_arrays, untrusted
from fedala.io.pickled_arrays import PickledArray, read_pickled_arrays

STORED = 10**6


def read(data):
    return read_pickled_arrays(data, STORED, "x.npz")


def unwrap(value):
    """Put arrays in the place of what the reader returns for them."""
    if isinstance(value, PickledArray):
        if value.numbers is not None:
            return value.numbers
        whole = np.empty(len(value.objects), dtype=object)
        for i, item in enumerate(value.objects):
            whole[i] = unwrap(item)
        return whole.reshape(value.shape)
    if isinstance(value, dict):
        return {key: unwrap(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(unwrap, value))
    return value


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        native = one.astype(one.dtype.newbyteorder("="))  # NumPy turns bytes as it unpickles
        assert (native.dtype, one.shape) == (other.dtype.newbyteorder("="), other.shape)
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**200), 2**200), st.floats(allow_nan=False),
    st.text(max_size=300), st.binary(max_size=300),
)  # fmt: skip
kinds = st.one_of(
    arrays.boolean_dtypes(), arrays.integer_dtypes(endianness="?"),
    arrays.floating_dtypes(sizes=(16, 32, 64), endianness="?"), arrays.unicode_string_dtypes(),
)  # fmt: skip
numbers = arrays.arrays(kinds, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
trees = st.recursive(
    st.one_of(plain, numbers, numbers.map(np.asfortranarray)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner, inner, inner),
        st.tuples(inner),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(trees, st.sampled_from([3, 4, 5]))
def test_plain_pickles_are_read_as_python_reads_them(tree, protocol):
    data = pickle.dumps(tree, protocol)
    assert_same(unwrap(read(data)), pickle.loads(data))


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_shared_objects_scalars_and_arrays_of_objects(protocol):
    shared = np.arange(6.0)
    tree = {
        "x": [shared, shared, [shared]],
        "y": np.array([[1, 2], 1], dtype=object),
        "z": [np.float32(0.5), np.int64(3), np.str_("a")],
    }
    found = unwrap(read(pickle.dumps(tree, protocol)))
    assert found["y"].tolist() == [[1, 2], 1]
    assert found["z"] == [0.5, 3, "a"]
    assert found["x"][2][0].tolist() == shared.tolist()


@pytest.mark.parametrize("core", ["core", "_core"])
def test_both_names_of_numpys_inner_module_are_known(core):
    """NumPy 1 writes numpy.core, NumPy 2 numpy._core."""
    data = pickle.dumps(np.arange(3), 3).replace(b"numpy._core", b"numpy." + core.encode())
    assert unwrap(read(data)).tolist() == [0, 1, 2]


class Call:
    """Something whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (Evil(), r"posix\.system|nt\.system"),
        (Call(eval, "open('evil', 'w')"), r"builtins\.eval"),
        (Call(builtins.__import__, "os"), r"builtins\.__import__"),
        (Call(getattr, "", "join"), r"builtins\.getattr"),
        (Call(np.load, "evil"), r"numpy\.load"),
        (Call(np.lib.format.open_memmap, "evil", "w+"), "open_memmap"),
        (Call(np.fromfile, "/etc/passwd"), "fromfile"),
        (Call(np.arange, 10**12), r"\.arange"),
        (Fraction(1, 2), r"fractions\.Fraction"),
        (OrderedDict(a=1), r"collections\.OrderedDict"),
        ({1, 2}, r"instruction EMPTY_SET|builtins\.set"),
        (bytearray(b"x"), r"builtins\.bytearray|BYTEARRAY"),
        (np.zeros(2, "M8[s]"), "type M8"),
        (np.zeros(2, "V3"), "type V3"),
        (np.zeros(2, complex), "type c16"),
        (np.zeros(2, [("a", int)]), "type V8"),
        (np.zeros(2).view(np.recarray), r"numpy\.rec|recarray"),
        (np.ma.zeros(2), "ma"),
        (np.random.default_rng(0), r"numpy\.random"),
        ({1: 2}, "keys are not texts"),
        (1 << 3000, "instruction LONG4"),
        (print, r"builtins\.print"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("protocol", [3, 4])
def test_everything_else_is_refused_by_its_name_and_never_called(
    what, says, protocol, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"holds a pickle with .*({says}).*could run a program"):
        read(pickle.dumps({"x": [what], "y": 1}, protocol))
    assert list(tmp_path.iterdir()) == []


def test_names_are_never_looked_up(monkeypatch):
    """Not even the functions of NumPy that are on the list are called."""
    for name in ("_reconstruct", "scalar"):
        monkeypatch.setattr(np._core.multiarray, name, None)
    data = pickletools.optimize(b"\x80\x03cnumpy._core.multiarray\n_reconstruct\n.")
    assert not callable(read(data))


@pytest.mark.parametrize(
    "body",
    [
        b"cos\nsystem\n(X\x01\x00\x00\x00atR",  # protocol 0 and 1
        b"(X\x01\x00\x00\x00aios\nsystem\n",  # INST
        b"(cos\nsystem\nX\x01\x00\x00\x00ao",  # OBJ
        b"\x82\x01",  # EXT1
        b"Pname\n",  # PERSID
        b"X\x04\x00\x00\x00nameQ",  # BINPERSID
        b"cnumpy\ndtype\n)\x81",  # NEWOBJ
        b"X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93",  # STACK_GLOBAL
        b"]X\x06\x00\x00\x00system\x93",  # a name that is not text
        b"cnumpy\ndtype\nX\x02\x00\x00\x00f8\x85R}X\x01\x00\x00\x00ab",  # a state that is not one
        b"cnumpy\nndarray\n)R",
        b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\ndtype\n)C\x01b\x87R",
        b"\x97",  # NEXT_BUFFER
    ],
)
def test_every_way_to_call_or_to_name_is_closed(body):
    with pytest.raises(UserError, match="holds a pickle with"):
        read(b"\x80\x04" + body + b".")


@pytest.mark.parametrize(
    "data",
    [
        b"", b".", b"\x80\x04", b"\x80\x04]", b"\x80\x04]].", b"\x80\x04a.", b"\x80\x04h\x05.",
        b"\x80\x04t.", b"\x80\x04(]a.", b"\x80\x04]K\x01sK\x02.", b"\xff\xff", b"\x80\x04}(K.",
        b"\x80\x04B\xff\xff\xff\xffabc.", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fabc.",
        b"\x80\x04X\x02\x00\x00\x00\xff\xff.", pickle.dumps(np.arange(9))[:-30],
    ],
)  # fmt: skip
def test_damaged_pickles_are_refused(data):
    with pytest.raises(UserError, match=r"x\.npz is not a readable pickle"):
        read(data)


def array_pickle(shape, content, kind="u1"):
    """Write the pickle of an array whose shape need not fit its bytes."""
    dtype = f"cnumpy\ndtype\nX{chr(len(kind))}\0\0\0{kind}\x85R".encode("latin1")
    start = b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85C\x01b\x87R"
    lengths = b"".join(pickle.dumps(length, 2)[2:-1] for length in shape)
    data = b"B" + struct.pack("<I", len(content)) + content
    return b"\x80\x04" + start + b"(K\x01(" + lengths + b"t" + dtype + b"\x89" + data + b"tb."


def test_the_shape_of_an_array_must_fit_its_bytes():
    assert unwrap(read(array_pickle((2, 3), b"abcdef"))).shape == (2, 3)
    for shape in ((2**39,), (2, 2), (-1, -6), (2**64,), (1,) * 33 + (6,), (0, 2**39, 2**39)):
        with pytest.raises(UserError, match=r"bytes do not fit|shape that is not one"):
            read(array_pickle(shape, b"abcdef"))
    for kind in ("f1", "U0", "i3"):
        with pytest.raises(UserError):
            read(array_pickle((6,), b"abcdef", kind))


def test_the_memory_of_a_pickle_is_bounded(monkeypatch):
    """Empty lists take a byte of the file and a hundred of memory."""
    monkeypatch.setattr(untrusted, "ALWAYS_ALLOWED", 2**22)
    data = b"\x80\x04" + b"]" * 2**18 + b"."
    with pytest.raises(UserError, match=r"0\.0 MiB that unpack to .* GiB"):
        read_pickled_arrays(data, 100, "x.npz")
    with pytest.raises(UserError, match="not a readable pickle"):  # more than one result
        read_pickled_arrays(data, len(data), "x.npz")


def test_no_long_text_is_made_of_the_same_bytes_again_and_again():
    assert read(pickle.dumps([np.str_("a" * 200)])) == ["a" * 200]
    with pytest.raises(UserError, match="a single text of 4000 bytes"):
        read(pickle.dumps([np.str_("a" * 1000)]))


def test_free_memory_is_a_bound_too(monkeypatch):
    monkeypatch.setattr(untrusted, "free_memory", lambda: 2**20)
    with pytest.raises(UserError, match=r"needs .* memory"):
        read_pickled_arrays(b"\x80\x04" + b"]" * 2**17 + b".", 2**30, "x.npz")


def test_deep_nesting_and_lists_that_hold_each_other_do_no_harm():
    deep = b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b"."
    assert isinstance(read(deep), list)
    # Each list holds the one before twice: written out, it would be 2¹⁰⁰ items.
    laughs = b"\x80\x04]\x94" + b"".join(b"](h%ch%ce\x94" % (i, i) for i in range(100))
    with pytest.raises(UserError, match="a name that is not text"):
        read(laughs + b"X\x01\0\0\0a\x93.")
    with pytest.raises(UserError, match="makes no array"):
        read(
            laughs + b"\x85cnumpy._core.numeric\n_frombuffer\n(C\x01aX\x01\0\0\0acnumpy\ndtype\ntR."
        )


def test_a_huge_memo_number_takes_no_memory():
    data = b"\x80\x04]r\xff\xff\xff\x7f."
    assert read(data) == []


def test_the_list_of_names_is_short():
    assert sorted(set(pickled_arrays._NAMES.values())) == [
        "_frombuffer", "_reconstruct", "dtype", "ndarray", "scalar",
    ]  # fmt: skip
    assert {module.split(".")[0] for module, _ in pickled_arrays._NAMES} == {"numpy"}
