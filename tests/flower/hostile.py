"""Bad replies of broken or hostile nodes, by name: functions that spoil a good reply."""

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

#: Text that forges a line of a log, colours a terminal and sets its title.
FORGED = "\nINFO :  Round 9: \x1b[31mall is well\x1b[0m\x1b]0;gone\x07\r\u202e"
LONG = "x" * 1_000_000

Kind = Callable[[Message], Any]


# --- bytes of arrays ---


def to_npy(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value, **options)
    return file.getvalue()


def to_npz(value: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, value)
    return file.getvalue()


def make_npy_with_header(
    header: str,
    rest: bytes = bytes(12),
    version: tuple[int, int] = (1, 0),
    length: int | None = None,
) -> bytes:
    """Make an .npy file with any text as its header."""
    text = header.encode("latin1") + b"\n"
    size = struct.pack("<H", len(text) if length is None else length)
    return b"\x93NUMPY" + bytes(version) + size + text + rest


def make_npy_of_shape(
    shape: str, descr: str = "'<f4'", order: str = "False", **options: Any
) -> bytes:
    return make_npy_with_header(
        f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}", **options
    )


BIAS = np.arange(3, dtype=np.float32)  # out.bias is float32 [3]

#: Bytes of `out.bias`.
BYTES: dict[str, bytes] = {
    "the start of a zip file": b"PK\x03\x04junk",
    "no bytes": b"",
    "a header that promises 16 TiB": make_npy_of_shape("(4398046511104,)"),
    "a zip file": to_npz(BIAS),
    "a zip bomb": to_npz(np.zeros(2**22, np.float32)),
    "pickled objects": to_npy(np.array([{}, 1, "x"], dtype=object), allow_pickle=True),
    "a pickle": pickle.dumps([1.0, 2.0, 3.0]),
    "a structure": to_npy(np.zeros(3, [("a", "<f4")])),
    "big-endian numbers": to_npy(BIAS.astype(">f4")),
    "Fortran order": make_npy_of_shape("(3,)", order="True"),
    "an order that is not a truth value": make_npy_of_shape("(3,)", order="3"),
    "another shape": to_npy(np.zeros(2, np.float32)),
    "another shape of the same size": to_npy(np.zeros((3, 1), np.float32)),
    "another type": to_npy(BIAS.astype(np.float64)),
    "half precision": to_npy(BIAS.astype(np.float16)),
    "complex numbers": to_npy(BIAS.astype(np.complex64)),
    "texts": to_npy(np.array(["a", "b", "c"])),
    "dates": to_npy(np.zeros(3, "datetime64[s]")),
    "no numbers": to_npy(np.zeros(0, np.float32)),
    "a number without a shape": to_npy(np.float32(1)),
    "a byte too few": to_npy(BIAS)[:-1],
    "a byte too many": to_npy(BIAS) + b"x",
    "a megabyte too many": to_npy(BIAS) + bytes(2**20),
    "a version that numpy does not know": make_npy_with_header("{}", version=(9, 0)),
    "a header that is a call": make_npy_with_header("print('I am run')"),
    "a header that is a list": make_npy_with_header("[1, 2, 3]"),
    "a header without a shape": make_npy_with_header("{'descr': '<f4', 'fortran_order': False}"),
    "a header of Python 2": make_npy_of_shape("(3L,)"),
    "a header with thousands of brackets": make_npy_with_header("(" * 9000),
    "a header that is longer than the file": make_npy_of_shape("(3,)", length=65535),
    "a header of zero bytes": make_npy_of_shape("(3,)", length=0),
    "a negative shape": make_npy_of_shape("(-3,)"),
    "a shape of fractions": make_npy_of_shape("(3.0,)"),
    "a shape of truth values": make_npy_of_shape("(True, True, True)"),
    "a type that is code": make_npy_of_shape("(3,)", descr="'__import__'"),
    "an object type": make_npy_of_shape("(3,)", descr="'|O'"),
    "NaN": to_npy(np.array([np.nan, 0, 0], np.float32)),
    "infinity": to_npy(np.array([0, -np.inf, 0], np.float32)),
}

#: Declarations of `out.bias`.
DECLARED: dict[str, dict[str, Any]] = {
    "no type": {"dtype": ""},
    "a type with control characters": {"dtype": f"float32{FORGED}"},
    "a type of a million letters": {"dtype": LONG},
    "a type that is not one": {"dtype": "no such type"},
    "an object": {"dtype": "object"},
    "big-endian": {"dtype": ">f4"},
    "a shape of 16 TiB": {"shape": (2**42,), "data": make_npy_of_shape("(4398046511104,)")},
    "a shape of a million dimensions": {"shape": (1,) * 1_000_000},
    "another shape": {"shape": (1, 3)},
    "no shape": {"shape": ()},
    "a pickle": {"stype": "pickle"},
    "a serialisation with control characters": {"stype": FORGED},
}


def with_arrays(change: Callable[[ArrayRecord], None]) -> Kind:
    def apply(reply: Message) -> Message:
        change(reply.content["arrays"])
        return reply

    return apply


def with_bytes(data: bytes) -> Kind:
    def change(arrays: ArrayRecord) -> None:
        arrays["out.bias"].data = data

    return with_arrays(change)


def declare(**fields: Any) -> Kind:
    def change(arrays: ArrayRecord) -> None:
        for name, value in fields.items():
            setattr(arrays["out.bias"], name, value)

    return with_arrays(change)


def with_array(name: str, value: Any) -> Kind:
    return with_arrays(lambda arrays: arrays.update({name: Array(np.asarray(value))}))


def add_many_arrays(arrays: ArrayRecord) -> None:
    arrays.update({f"extra{i}": Array(BIAS) for i in range(2000)})


ARRAYS: dict[str, Kind] = {
    **{f"an array of {name}": with_bytes(data) for name, data in BYTES.items()},
    **{f"an array declared as {name}": declare(**fields) for name, fields in DECLARED.items()},
    "an array is missing": with_arrays(lambda arrays: arrays.pop("out.bias")),
    "an array too many": with_array("trojan", BIAS),
    "an extra tensor that the method does not have": with_array("+extra/control", BIAS),
    "a nested extra tensor that the method does not have": with_array("+extra/a/b", BIAS),
    "a parameter as an extra tensor, too": with_array("+extra/out.bias", BIAS),
    "an array with a name of a million letters": with_array(LONG, BIAS),
    "an array with control characters in its name": with_array(FORGED, BIAS),
    "two thousand arrays too many": with_arrays(add_many_arrays),
    "no arrays": with_arrays(lambda arrays: arrays.clear()),
    "a counter below zero": with_array("norm.num_batches_tracked", np.int64(-1)),
    "a counter out of range": with_array("norm.num_batches_tracked", np.int64(2**62)),
}

#: Bad extra tensors of the method in controlled.py, which uploads control/moves/… and joined.
MOVE = "+extra/control/moves/out.bias"
EXTRAS: dict[str, Kind] = {
    "an unknown extra tensor": with_array("+extra/trojan", BIAS),
    "an unknown extra tensor in a branch": with_array("+extra/control/trojan", BIAS),
    "an extra tensor for a parameter that does not exist": with_array(f"{MOVE}s", BIAS),
    "an extra tensor is missing": with_arrays(lambda arrays: arrays.pop("+extra/joined")),
    "a nested extra tensor is missing": with_arrays(lambda arrays: arrays.pop(MOVE)),
    "no extra tensors": with_arrays(
        lambda arrays: [arrays.pop(name) for name in list(arrays) if name.startswith("+extra/")]
    ),
    "only extra tensors": with_arrays(
        lambda arrays: [arrays.pop(name) for name in list(arrays) if name[0] != "+"]
    ),
    "an extra tensor of another shape": with_array(MOVE, BIAS[:2]),
    "an extra tensor with a lane": with_array(MOVE, BIAS[None]),
    "an extra tensor of another type": with_array(MOVE, BIAS.astype(np.float64)),
    "an extra counter that is a fraction": with_array("+extra/joined", np.float32(1)),
    "an extra tensor of NaN": with_array(MOVE, np.array([0, np.nan, 0], np.float32)),
    "an extra tensor of infinity": with_array(MOVE, np.array([0, np.inf, 0], np.float32)),
    "an extra counter below zero": with_array("+extra/joined", np.int64(-1)),
    "an extra counter out of range": with_array("+extra/joined", np.int64(2**62)),
    "an extra tensor that is also a branch": with_array("+extra/joined/x", np.int64(1)),
    "an extra branch that is also a tensor": with_array("+extra/control", BIAS),
    "an inner extra branch that is also a tensor": with_array("+extra/control/moves", BIAS),
    "an extra branch in place of a tensor": with_arrays(
        lambda arrays: arrays.update({"+extra/joined/x": arrays.pop("+extra/joined")})
    ),
    "an extra tensor in place of a branch": with_arrays(
        lambda arrays: arrays.update({"+extra/control": arrays.pop(MOVE)})
    ),
    "an extra tensor without its mark": with_array("control/moves/out.bias", BIAS),
    "an extra tensor without a name": with_array("+extra/", BIAS),
    "an extra tensor with an empty name in its path": with_array("+extra/control//out.bias", BIAS),
    "an extra tensor with control characters in its name": with_array(f"+extra/{FORGED}", BIAS),
    "an extra tensor below a hundred thousand others": with_array("+extra/" + "a/" * 10**5, BIAS),
}


# --- records ---


def with_content(change: Callable[[RecordDict], Any]) -> Kind:
    def apply(reply: Message) -> Message:
        change(reply.content)
        return reply

    return apply


def replace_metrics(content: RecordDict) -> None:
    metrics = content.pop("metrics")
    content["metrics"] = ConfigRecord(dict(metrics))


def remove_content(reply: Message) -> Message:
    reply.__dict__["_content"] = None
    return reply


RECORDS: dict[str, Kind] = {
    "no records": with_content(lambda content: content.clear()),
    "no arrays record": with_content(lambda content: content.pop("arrays")),
    "no metrics record": with_content(lambda content: content.pop("metrics")),
    "two array records": with_content(lambda content: content.update({"more": ArrayRecord()})),
    "two metric records": with_content(lambda content: content.update({"more": MetricRecord()})),
    "a config record too many": with_content(
        lambda content: content.update({"more": ConfigRecord({"a": FORGED})})
    ),
    "a record with a name of a million letters": with_content(
        lambda c: c.update({LONG: MetricRecord()})
    ),
    "a record with control characters in its name": with_content(
        lambda c: c.update({FORGED: MetricRecord()})
    ),
    "a config record instead of the metrics": with_content(replace_metrics),
    "neither content nor an error": remove_content,
}


# --- metrics ---

NAN, INF = float("nan"), float("inf")


def with_metrics(**metrics: Any) -> Kind:
    """Set metrics, and remove those with the value None. Names may be any text."""

    def change(content: RecordDict) -> None:
        for name, value in metrics.items():
            content["metrics"].pop(name, None)
            if value is not None:
                # Around the checks of Flower at the sender.
                content["metrics"].__dict__["_data"][name] = value

    return with_content(change)


#: Client 1 has 23 samples: 17 to train and 6 to test with.
SCORES: dict[str, Any] = {
    "a million million million of a million million million": [1e18, 0.0, 1e18],
    "infinity of infinity": [INF, 0.0, INF],
    "NaN": [NAN, NAN, NAN],
    "more correct answers than samples": [7.0, 1.0, 6.0],
    "half a correct answer": [0.5, 1.0, 6.0],
    "fewer correct answers than none": [-1.0, 1.0, 6.0],
    "NaN correct answers": [NAN, 1.0, 6.0],
    "more samples than introduced": [6.0, 1.0, 60.0],
    "fewer samples than introduced": [1.0, 0.1, 1.0],
    "a negative loss": [3.0, -1.0, 6.0],
    "a loss of minus infinity": [3.0, -INF, 6.0],
    "a loss out of range": [3.0, 1e308, 6.0],
    "too few figures": [3.0, 1.0],
    "too many figures": [3.0, 1.0, 6.0] * 2,
    "a million figures": [6.0] * 1_000_000,
    "nothing": [],
    "a number": 3.0,
    "text": "[3.0, 1.0, 6.0]",
    "texts": ["3", "1", "6"],
    "truth values": [True, True, True],
}

FIGURES: dict[str, dict[str, Any]] = {
    "another client": {"client": 2},
    "a client that does not exist": {"client": 2**62},
    "a negative client": {"client": -1},
    "a fraction of a client": {"client": 1.0},
    "a list of clients": {"client": [1]},
    "a truth value for a client": {"client": True},
    "text for a client": {"client": FORGED},
    "no client": {"client": None},
    "no number of samples": {"num-examples": None},
    "no samples": {"num-examples": 0},
    "more samples than introduced": {"num-examples": 2**62},
    "a negative number of samples": {"num-examples": -17},
    "a fractional number of samples": {"num-examples": 17.0},
    "lost seven times": {"lost": 7},
    "lost to NaN": {"lost": NAN},
    "no word on a lost state": {"lost": None},
    "twice finite": {"finite": 2},
    "less than finite": {"finite": -1},
    "finite in a list": {"finite": [1]},
    "finite as text": {"finite": "yes"},
    "no word on divergence": {"finite": None},
    "diverged, but sends arrays": {"finite": 0},
    "no scores": {"scores": None},
    "no scores after training": {"left": None},
    "scores after training that were not requested": {"left": [3.0, 1.0, 6.0]},
    "the note weights": {"note.weights": 1.0},
    "a note that is a column": {"note.accuracy": 1.0},
    "a note with a name of a million letters": {f"note.{LONG}": 1.0},
    "a note without a name": {"note.": 1.0},
    "a note with control characters": {f"note.{FORGED}": 1.0},
    "a note that is a formula": {"note.=1+1": 1.0},
    "a note that is a list": {"note.train_loss": [1.0]},
    "a note that is text": {"note.train_loss": FORGED},
    "a note of infinity": {"note.train_loss": INF},
    "a note out of range": {"note.train_loss": 1e308},
    "ten thousand notes": {f"note.n{i}": 1.0 for i in range(10_000)},
    "an unknown metric": {"extra": 1.0},
    "a metric with control characters": {FORGED: 1.0},
    "a metric with a name of a million letters": {LONG: 1.0},
}

METRICS: dict[str, Kind] = {
    **{f"scores of {name}": with_metrics(scores=scores) for name, scores in SCORES.items()},
    **{f"metrics: {name}": with_metrics(**figures) for name, figures in FIGURES.items()},
}


# --- messages ---


def reply_with_error(code: int, reason: str) -> Kind:
    def apply(reply: Message) -> Message:
        reply.__dict__["_content"], reply.__dict__["_error"] = None, Error(code, reason)
        return reply

    return apply


def with_metadata(**values: Any) -> Kind:
    def apply(reply: Message) -> Message:
        reply.metadata.__dict__.update(values)
        return reply

    return apply


def raise_error(error: Exception) -> Kind:
    return lambda reply: error


MESSAGES: dict[str, Kind] = {
    "an error": reply_with_error(0, "failed"),
    "an error with control characters": reply_with_error(2, f"<class 'ValueError'>:<'{FORGED}'>"),
    "an error of a million letters": reply_with_error(2, LONG),
    "an error without a reason": reply_with_error(0, ""),
    "an answer to another message": with_metadata(_reply_to_message_id="other"),
    "an answer from another node": with_metadata(_src_node_id=100),
    "an answer of another type": with_metadata(_message_type="query"),
    "objects that Flower cannot decode": raise_error(
        ValueError(f"Unexpected set of `children` {FORGED}")
    ),
    "objects that do not fit into memory": raise_error(MemoryError()),
    "objects that are nested too deeply": raise_error(
        RecursionError("maximum recursion depth exceeded")
    ),
    "objects that are not there": raise_error(KeyError(LONG)),
}

#: Bad replies to a train message.
TRAIN = {**ARRAYS, **RECORDS, **METRICS, **MESSAGES}

#: Bad replies to an evaluate message, which hold no arrays.
EVALUATE = {
    "an array that was not requested": with_array("out.bias", BIAS),
    "the start of a zip file": with_content(
        lambda c: c["arrays"].update(
            {"out.bias": Array("float32", (3,), "numpy.ndarray", b"PK\x03\x04junk")}
        )
    ),
    "diverged without training": with_metrics(finite=0),
    **{
        name: RECORDS[name]
        for name in ("no records", "two metric records", "neither content nor an error")
    },
    **{
        f"scores of {name}": METRICS[f"scores of {name}"]
        for name in ("NaN", "infinity of infinity", "nothing")
    },
    **{
        name: METRICS[f"metrics: {name}"]
        for name in ("another client", "the note weights", "twice finite")
    },
    **{
        name: MESSAGES[name]
        for name in ("an error with control characters", "objects that Flower cannot decode")
    },
}

#: Bad introductions of a node.
INTRODUCE = {
    **{name: kind for name, kind in RECORDS.items() if "array" not in name},
    **{
        f"metrics: {name}": METRICS[f"metrics: {name}"]
        for name in (
            "a client that does not exist",
            "a negative client",
            "a fraction of a client",
            "a list of clients",
            "no client",
            "a truth value for a client",
            "text for a client",
            "a metric with control characters",
            "an unknown metric",
            "a metric with a name of a million letters",
        )
    },
    "a negative size": with_metrics(train=-1),
    "a size beyond max_samples": with_metrics(train=10_001),
    "a size of 2**53": with_metrics(train=2**53),
    "a size of 2**62": with_metrics(test=2**62),
    "a fractional size": with_metrics(train=17.5),
    "an infinite size": with_metrics(train=INF),
    "a size that is text": with_metrics(train="17"),
    "a list of sizes": with_metrics(train=[17]),
    "a size is missing": with_metrics(test=None),
    "validation samples in a run that has none": with_metrics(validation=5),
    **{name: kind for name, kind in MESSAGES.items() if name != "an answer of another type"},
}


# --- over the wire ---


class GarbledRecord(MetricRecord):
    """A record with bytes that Flower's decoder cannot read."""

    def deflate(self) -> bytes:
        return add_header_to_object_body(object_body=b"\xff\x1b[31m", obj=self)


GarbledRecord.__qualname__ = "MetricRecord"  # the decoder chooses the class by this name


def garble(content: RecordDict) -> None:
    content["metrics"] = GarbledRecord(dict(content["metrics"]))


def fail(reply: Message) -> Message:
    raise ValueError(FORGED)


#: The bad replies of a real SuperNode in rounds 1, 2, …, each with the server's message.
OVER_TLS: list[tuple[Kind, str]] = [
    (TRAIN["an array of the start of a zip file"], "is dropped: out.bias has 8 bytes"),
    (
        TRAIN["an array of a header that promises 16 TiB"],
        "is dropped: out.bias does not hold the float32 [3]",
    ),
    (TRAIN["metrics: a note with a name of a million letters"], "is dropped: its metric 'note.xxx"),
    (with_metrics(scores=[1e18, 0.0, 1e18]), "is dropped: its numbers of samples differ"),
    (with_content(garble), "failed: its answer cannot be read"),
    (fail, "failed: <class 'ValueError'>:<' INFO :  Round 9"),
]
