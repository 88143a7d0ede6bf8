"""Models and figures as Flower carries them.

Nothing that a client sends is believed. What it declares is compared with what was expected before
a byte is decoded, and whatever does not fit is refused with a sentence. The names in these sentences
are the client's own, so whoever prints one passes it through `quote`.
"""

import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

from fedala.errors import UserError, printable
from fedala.lanes.trees import Params

#: Figures beyond this make no sense, and the sums of a hundred million of them are still finite.
LARGEST = 1e300
#: Bytes of an .npy header: numpy's own are 128.
LONGEST_HEADER = 4096
#: What an Array says about bytes that `numpy.save` wrote.
NUMPY = "numpy.ndarray"
NOTE = "note."


def quote(words: object, most: int = 300) -> str:
    """Make text that came from a client a part of one printable line.

    Of an error, these are its words, or its class if it has none.
    """
    return printable(str(words) or type(words).__name__, most)


# --- models ----------------------------------------------------------------------------------------


def to_record(params: Params) -> ArrayRecord:
    """One lane, without the lane: by name, what anybody's Flower app would send."""
    return ArrayRecord({name: value[0].contiguous() for name, value in params.items()})


def to_params(record: ArrayRecord, device: torch.device) -> Params:
    return {
        name: value.to(device).unsqueeze(0) for name, value in record.to_torch_state_dict().items()
    }


def decode(record: ArrayRecord, expected: Params) -> Params:
    """Decode an upload as one lane. It must have the names, shapes and types of `expected`."""
    if record.keys() != expected.keys():
        strange = min(record.keys() ^ expected.keys())
        raise UserError(
            f"{strange} is {'missing' if strange in expected else 'not a part of the model'}"
        )
    # A header that makes numpy warn is not one that numpy wrote.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {name: _decode(name, record[name], wanted) for name, wanted in expected.items()}


def _decode(name: str, array: Array, wanted: Tensor) -> Tensor:
    """One array as one lane. Memory is taken for what was expected, whatever the array promises."""
    kind, shape = np.dtype(str(wanted.dtype).removeprefix("torch.")), tuple(wanted.shape[1:])
    if (array.dtype, array.shape) != (str(kind), shape):
        raise UserError(
            f"{name} is {array.dtype} {list(array.shape[:9])}, and should be {kind} {list(shape)}"
        )
    if array.stype != NUMPY:
        raise UserError(f"{name} is serialised as {array.stype}, and should be as {NUMPY}")
    size = kind.itemsize * math.prod(shape)
    if not size <= len(array.data) <= size + LONGEST_HEADER:
        raise UserError(f"{name} has {len(array.data)} bytes, and should have {size} and a header")
    file = BytesIO(array.data)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    version = npy.read_magic(file)
    if version not in readers:
        raise UserError(
            f"{name} is in version {version} of numpy's format, and should be in version (1, 0)"
        )
    if readers[version](file) != (shape, False, kind) or len(array.data) - file.tell() != size:
        raise UserError(f"{name} does not hold the {kind} {list(shape)} that it declares")
    bits = np.frombuffer(array.data, np.uint8, size, file.tell()).copy()
    if kind == np.bool_ and (bits > 1).any():
        raise UserError(f"{name} holds truth values that are neither true nor false")
    return torch.from_numpy(bits.view(kind).reshape(shape)).to(wanted.device).unsqueeze(0)


def check(upload: Params, expected: Params, sent: Params, max_norm: float) -> None:
    """Refuse an update whose numbers make no sense: not finite, or counters out of range.

    With a `max_norm`, also one that is further than that from the model that was sent.
    """
    for name, value in upload.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise UserError(f"{name} is not finite")
        is_counter = not value.is_floating_point() and bool((expected[name] >= 0).all())
        if is_counter and bool(((value < 0) | (value > 2**53)).any()):
            raise UserError(
                f"{name} is below 0 or beyond 2**53, which makes no sense for what it counts"
            )
    if max_norm:
        moves = [
            (v - sent[n]).double().square().sum()
            for n, v in upload.items()
            if v.is_floating_point()
        ]
        norm = float(torch.stack(moves).sum().sqrt()) if moves else 0.0
        if norm > max_norm:
            raise UserError(
                f"it is {norm:.3g} away from what was sent, and max_norm is {max_norm:g}"
            )


# --- figures ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """What a client answers to a train or evaluate message."""

    client: int
    examples: int
    """How many training samples it has."""
    arrays: ArrayRecord = field(default_factory=ArrayRecord)
    """Its upload, not decoded yet; empty if it did not train, or if its training diverged."""
    is_finite: bool = True
    has_lost_state: bool = False
    scores: list[float] = field(default_factory=list)
    """Correct answers, summed loss and samples for every part of its data, one after the other."""
    left: list[float] = field(default_factory=list)
    """The same for the model that its training left."""
    notes: Mapping[str, float] = field(default_factory=dict)

    def pack(self) -> RecordDict:
        """Put the reply into Flower's records."""
        metrics = MetricRecord({
            "client": self.client,
            "num-examples": self.examples,
            "finite": int(self.is_finite),
            "lost": int(self.has_lost_state),
            "scores": self.scores,
            "left": self.left,
            **{f"{NOTE}{name}": value for name, value in self.notes.items()},
        })  # fmt: skip
        return RecordDict({"arrays": self.arrays, "metrics": metrics})

    @classmethod
    def unpack(cls, content: RecordDict, notes: Collection[str]) -> "Reply":
        """Read a reply that may come from anybody.

        It must hold what `pack` puts there, and may hold these notes; anything else is refused.
        """
        records = read_records(content, {"arrays": ArrayRecord, "metrics": MetricRecord})
        noted = {f"{NOTE}{name}" for name in notes}
        must = ("client", "num-examples", "finite", "lost", "scores", "left")
        metrics = read_metrics(records["metrics"], must, may=noted)
        is_finite = bool(whole(metrics, "finite", 1))
        return cls(
            client=whole(metrics, "client"),
            examples=whole(metrics, "num-examples"),
            arrays=records["arrays"],
            is_finite=is_finite,
            has_lost_state=bool(whole(metrics, "lost", 1)),
            scores=_numbers(metrics, "scores"),
            left=_numbers(metrics, "left"),
            notes={
                name.removeprefix(NOTE): _note(metrics, name, is_finite)
                for name in metrics.keys() & noted
            },
        )


def read_records(content: RecordDict, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The records of a reply, which must be just these."""
    if content.keys() != kinds.keys():
        strange = min(content.keys() ^ kinds.keys())
        raise UserError(
            f"its record {strange!r} is {'missing' if strange in kinds else 'not expected'}"
        )
    for name, kind in kinds.items():
        if type(content[name]) is not kind:
            raise UserError(
                f"its record {name} is a {type(content[name]).__name__}, and should be a {kind.__name__}"
            )
    return dict(content)


def read_metrics(
    record: MetricRecord, must: Collection[str], may: Collection[str] = ()
) -> dict[str, Any]:
    """The metrics of a reply: all that it must have, and none but those and what it may have."""
    if strange := record.keys() - {*must, *may}:
        raise UserError(f"its metric {min(strange)!r} is not known")
    if missing := set(must) - record.keys():
        raise UserError(f"its metric {min(missing)} is missing")
    return dict(record)


def whole(metrics: Mapping[str, Any], name: str, most: int = 2**53) -> int:
    """A metric that is a whole number from 0 to `most`."""
    value = metrics[name]
    if type(value) is not int or not 0 <= value <= most:
        raise UserError(
            f"its {name} is {_shown(value)}, and should be a whole number from 0 to {most}"
        )
    return value


def _numbers(metrics: Mapping[str, Any], name: str) -> list[float]:
    values = metrics[name]
    if (
        type(values) is not list
        or len(values) > 100
        or any(type(value) is not float for value in values)
    ):
        raise UserError(f"its {name} are {_shown(values)}, and should be a short list of numbers")
    return values


def _note(metrics: Mapping[str, Any], name: str, is_finite: bool) -> float:
    """A note: a number, or NaN if there was nothing to note; infinite if the training diverged."""
    value = metrics[name]
    if type(value) is not float or (abs(value) > LARGEST and (is_finite or abs(value) < math.inf)):
        raise UserError(f"its {name} is {_shown(value)}, which makes no sense")
    return value


def _shown(value: Any) -> str:
    """A value in a sentence: as it is if it is a number, its kind and length if it may be long."""
    if isinstance(value, (bool, int, float)):
        return repr(value)
    return (
        f"a {type(value).__name__} of length {len(value)}"
        if hasattr(value, "__len__")
        else type(value).__name__
    )
