"""Batches that are dicts, as those of Hugging Face: what is the target, and what the model gets."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fedala.errors import UserError, printable
from fedala.lanes.losses import LossFunction

#: Names of the entry that holds a batch's targets. A name may also end with `_label`.
TARGET_NAMES = ("label", "labels", "target", "targets", "y")

Split = Callable[[Any], tuple[Any, Any]]
"""Of a batch: its inputs and its targets."""


class BatchSplitter:
    """Splits the batches of one model into inputs and targets.

    A batch that is a dict has one entry that is the target (`TARGET_NAMES`). If the model's
    `forward` takes an entry of that name and no loss is given, the model gets the targets, too, and
    computes its own loss, as the models of `transformers` do. Of the other entries, a single one is
    the model's argument. Of several, the model gets those that its `forward` names, as keywords.

    A user's `split` replaces this. If the inputs that it returns hold the targets under such a
    name, the model computes its own loss, too.
    """

    def __init__(self, model: nn.Module, loss: LossFunction | None, split: Split | None) -> None:
        if loss is not None and (not callable(loss) or isinstance(loss, type)):
            what = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
            raise UserError(
                "loss must be a function of (output, target), such as "
                f"torch.nn.functional.cross_entropy, not {what}."
            )
        self._parameters = _list_arguments(model)
        self._loss, self._split = loss, split
        self._model_computes_loss = False

    @property
    def loss(self) -> LossFunction:
        """The loss of the batches that have been split."""
        if self._loss is not None:
            return self._loss
        return find_loss if self._model_computes_loss else F.cross_entropy

    def __call__(self, batch: Any) -> Any:
        if self._split is None and not isinstance(batch, Mapping):
            _refuse_many_parts(batch)
            return batch
        pair = self._split(batch) if self._split else self._split_dict(batch)
        self._model_computes_loss = self._loss is None and self._takes_targets(pair)
        return pair

    def _takes_targets(self, pair: Any) -> bool:
        is_named = isinstance(pair, tuple) and bool(pair) and isinstance(pair[0], Mapping)
        return is_named and any(map(_may_be_target, pair[0]))

    def _split_dict(self, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        target = _find_target(batch)
        others = {name: batch[name] for name in batch if not _may_be_target(name)}
        if self._loss is None and target in self._parameters:
            return {**self._choose_keywords(others), target: batch[target]}, batch[target]
        if len(others) == 1:
            [(name, value)] = others.items()
            is_later_argument = name in self._parameters[1:]
            return {name: value} if is_later_argument else value, batch[target]
        return self._choose_keywords(others), batch[target]

    def _choose_keywords(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        chosen = {name: entries[name] for name in entries if name in self._parameters}
        if not chosen:
            raise UserError(
                "ALA cannot tell which entries of the batch the model gets: the batch has "
                f"{_list_names(entries)}, and the model's forward takes "
                f"{', '.join(self._parameters) or 'nothing'}. {_hint(entries)}"
            )
        return chosen


def _refuse_many_parts(batch: Any) -> None:
    """Refuse a batch of more than two tensors: any of them may be the targets."""
    is_tensors = isinstance(batch, tuple | list) and all(isinstance(one, Tensor) for one in batch)
    if is_tensors and len(batch) > 2:
        inputs = ", ".join(f"batch[{part}]" for part in range(len(batch) - 1))
        raise UserError(
            f"A batch has {len(batch)} tensors: say which ones are the inputs and the targets, "
            f"such as split=lambda batch: (({inputs}), batch[{len(batch) - 1}])."
        )


def find_loss(output: Any, target: Any) -> Tensor:
    """Return the loss that a model computed itself: the `loss` of its output."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise UserError(
            "The model takes the targets of a batch, but its output has no loss: give ALA a loss, "
            "loss(output, target)."
        )
    return loss


def _list_arguments(model: nn.Module) -> tuple[str, ...]:
    """Name the arguments of a model's forward; with an adapter, those of the model inside it."""
    names = _list_named(model)
    inner = getattr(model, "get_base_model", None)
    return _list_named(inner()) if not names and callable(inner) else names


def _list_named(model: nn.Module) -> tuple[str, ...]:
    parameters = inspect.signature(model.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


def _may_be_target(name: str) -> bool:
    return name in TARGET_NAMES or name.endswith("_label")


def _find_target(batch: Mapping[str, Any]) -> str:
    """Name the target of a batch: its only entry with such a name."""
    exact = [name for name in batch if name in TARGET_NAMES]
    found = exact or [name for name in batch if _may_be_target(name)]
    if len(found) == 1:
        return found[0]
    what = f"several: {_list_names(found)}" if found else f"none: it has {_list_names(batch)}"
    raise UserError(
        f"ALA looks for the target of a batch by its name ({', '.join(TARGET_NAMES)}, …_label), "
        f"and the batch has {what}. {_hint(batch)}"
    )


def _list_names(names: Any) -> str:
    return printable(", ".join(map(str, names)) or "nothing", 200)


def _hint(names: Any) -> str:
    first = printable(str(next(iter(names), "x")), 50)
    return f'Say what they are: split=lambda batch: (batch["{first}"], batch["…"]).'
