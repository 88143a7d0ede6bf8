"""The messages between server and clients, as Flower's records.

A client trusts the `Request` of its server. The server does not trust an `Introduction` or a
`Reply`: it accepts the output of `pack`, and refuses everything else.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from fedala.errors import UserError, printable
from fedala.simulation.client_round import RoundRequest

#: The parts of a client's samples, named as in `Federation`.
PARTS = ("train", "test", "validation")
#: The largest sum of losses that is accepted. A hundred million of them still have a finite sum.
MAX_LOSS = 1e300
#: The most numbers that a list of scores may have.
MAX_SCORES = 100
#: The message type that asks for the scores of the received model as it is.
EVALUATE_RECEIVED = "evaluate.received"
NOTE = "note."


def clean_text(text: object, max_length: int = 300) -> str:
    """Turn text that came from a client, or an error, into a part of one printable line."""
    return printable(str(text) or type(text).__name__, max_length)


@dataclass(frozen=True)
class Introduction:
    """Who a node is, and the only thing that the server learns about its samples: their number."""

    client: int
    sizes: Mapping[str, int]
    """Samples for each of `PARTS`."""

    def pack(self) -> RecordDict:
        """Write the introduction into Flower's records."""
        return RecordDict({"metrics": MetricRecord({"client": self.client, **self.sizes})})

    @classmethod
    def unpack(
        cls, content: RecordDict, population: int, max_sizes: Mapping[str, int]
    ) -> "Introduction":
        """Read and check the introduction of an untrusted node."""
        metrics = _read_metrics(
            _read_records(content, {"metrics": MetricRecord})["metrics"], {"client", *PARTS}
        )
        client = _read_whole(metrics, "client", population - 1)
        return cls(client, {part: _read_whole(metrics, part, max_sizes[part]) for part in PARTS})


@dataclass(frozen=True)
class Request:
    """A server's request to one client."""

    work: RoundRequest
    arrays: ArrayRecord
    """The model, and whatever else the method sends."""
    parts: Sequence[str]
    """The parts of its samples that the client tests on."""
    since: int
    """The client's last round that the server counted, from 1. 0: none yet."""
    clipping_norm: float = 0.0
    """The bound of the update for `fixedclipping_mod`. 0: none."""

    def pack(self) -> RecordDict:
        """Write the request into Flower's records. The message type says whether to train."""
        config = ConfigRecord({
            "round": self.work.round,
            "evaluates": self.work.evaluate,
            "looks-back": self.work.evaluate_after_training,
            "parts": list(self.parts),
            "since": self.since,
        })  # fmt: skip
        if self.clipping_norm:
            config[KEY_CLIPPING_NORM] = self.clipping_norm
        return RecordDict({"arrays": self.arrays, "config": config})

    @classmethod
    def unpack(cls, message: Message) -> "Request":
        """Read a request of the server."""
        [record] = message.content.config_records.values()
        [arrays] = message.content.array_records.values()
        config: dict[str, Any] = dict(record)
        work = RoundRequest(
            int(config["round"]),
            message.metadata.message_type == MessageType.TRAIN,
            bool(config["evaluates"]),
            bool(config["looks-back"]),
        )
        parts = [part for part in PARTS if part in config["parts"]]
        return cls(work, arrays, parts, int(config["since"]))


@dataclass(frozen=True)
class Reply:
    """A client's answer to a train or evaluate message."""

    client: int
    examples: int
    """How many training samples it has."""
    arrays: ArrayRecord = field(default_factory=ArrayRecord)
    """Its upload, still encoded. Empty if it did not train, or if its training diverged."""
    is_finite: bool = True
    has_lost_state: bool = False
    scores: list[float] = field(default_factory=list)
    """Correct answers, summed loss and samples for each tested part of its data, in a row."""
    trained_scores: list[float] = field(default_factory=list)
    """The same for the model that its training ended with. On the wire it is called `left`."""
    notes: Mapping[str, float] = field(default_factory=dict)

    def pack(self) -> RecordDict:
        """Write the reply into Flower's records."""
        metrics = MetricRecord({
            "client": self.client,
            "num-examples": self.examples,
            "finite": int(self.is_finite),
            "lost": int(self.has_lost_state),
            "scores": self.scores,
            "left": self.trained_scores,
            **{f"{NOTE}{name}": value for name, value in self.notes.items()},
        })  # fmt: skip
        return RecordDict({"arrays": self.arrays, "metrics": metrics})

    @classmethod
    def unpack(cls, content: RecordDict, notes: Collection[str]) -> "Reply":
        """Read and check the reply of an untrusted node, which may hold these notes."""
        records = _read_records(content, {"arrays": ArrayRecord, "metrics": MetricRecord})
        note_metrics = {f"{NOTE}{name}" for name in notes}
        required = ("client", "num-examples", "finite", "lost", "scores", "left")
        metrics = _read_metrics(records["metrics"], required, optional=note_metrics)
        is_finite = bool(_read_whole(metrics, "finite", 1))
        return cls(
            client=_read_whole(metrics, "client"),
            examples=_read_whole(metrics, "num-examples"),
            arrays=records["arrays"],
            is_finite=is_finite,
            has_lost_state=bool(_read_whole(metrics, "lost", 1)),
            scores=_read_numbers(metrics, "scores"),
            trained_scores=_read_numbers(metrics, "left"),
            notes={
                name.removeprefix(NOTE): _read_note(metrics, name, is_finite)
                for name in metrics.keys() & note_metrics
            },
        )


def _read_records(content: RecordDict, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the records of a reply, which must be exactly these."""
    if content.keys() != kinds.keys():
        name = min(content.keys() ^ kinds.keys())
        raise UserError(f"its record {name!r} is {'missing' if name in kinds else 'not expected'}")
    for name, kind in kinds.items():
        if type(content[name]) is not kind:
            raise UserError(
                f"its record {name} is a {type(content[name]).__name__}, "
                f"but should be a {kind.__name__}"
            )
    return dict(content)


def _read_metrics(
    record: MetricRecord, required: Collection[str], optional: Collection[str] = ()
) -> dict[str, Any]:
    """Return the metrics of a reply: all required ones, and no unknown ones."""
    if unknown := record.keys() - {*required, *optional}:
        raise UserError(f"its metric {min(unknown)!r} is unknown or reserved")
    if missing := set(required) - record.keys():
        raise UserError(f"its metric {min(missing)} is missing")
    return dict(record)


def _read_whole(metrics: Mapping[str, Any], name: str, largest: int = 2**53) -> int:
    """Return a metric that is a whole number from 0 to `largest`."""
    value = metrics[name]
    if type(value) is not int or not 0 <= value <= largest:
        raise UserError(
            f"its {name} is {_describe(value)}, but should be a whole number from 0 to {largest}"
        )
    return value


def _read_numbers(metrics: Mapping[str, Any], name: str) -> list[float]:
    values = metrics[name]
    is_short_list = type(values) is list and len(values) <= MAX_SCORES
    if not is_short_list or any(type(value) is not float for value in values):
        raise UserError(
            f"its {name} are {_describe(values)}, but should be a list of at most {MAX_SCORES} "
            "numbers"
        )
    numbers: list[float] = values
    return numbers


def _read_note(metrics: Mapping[str, Any], name: str, is_finite: bool) -> float:
    """Return a note: a number, or NaN for no value. It may be infinite if training diverged."""
    value = metrics[name]
    if type(value) is not float or (abs(value) > MAX_LOSS and (is_finite or abs(value) < math.inf)):
        raise UserError(f"its {name} is {_describe(value)}, but should be a finite number")
    return value


def _describe(value: Any) -> str:
    """Return a number as it is, and the type and length of anything that may be long."""
    if isinstance(value, (bool, int, float)):
        return repr(value)
    kind = type(value).__name__
    return f"a {kind} of length {len(value)}" if hasattr(value, "__len__") else kind
