"""What a shell offers after the tab key: the names that an option takes."""

from collections.abc import Callable, Iterable
from dataclasses import Field
from typing import Any

from fedala.data import known_datasets
from fedala.methods import catalogue, list_methods
from fedala.models import MODELS
from fedala.records import MODEL_KINDS
from fedala.runs.config_values import SEPARATORS
from fedala.runs.sweep import SWEPT_OPTIONS

PARTITIONS = ("natural", "dir:", "pathological:", "iid")


def _hyperparameters() -> list[str]:
    return [f"{name}.{key}" for name, entry in catalogue().items() for key in entry.defaults()]


#: By option: the names that it takes. They are listed only when a shell asks.
NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "method": lambda: ["all", *list_methods()],
    "set": lambda: [f"{name}=" for name in _hyperparameters()],
    "sweep": lambda: [f"{name}=" for name in (*SWEPT_OPTIONS, *_hyperparameters())],
    "dataset": lambda: [row.name for row in known_datasets()],
    "model": lambda: MODELS,
    "partition": lambda: PARTITIONS,
    "evaluate": lambda: MODEL_KINDS,
    "augment": lambda: ("none", "flip", "crop:"),
    "class_weights": lambda: ("none", "balanced"),
    "device": lambda: ("auto", "cpu", "cuda", "cuda:"),
    "lanes": lambda: ("auto", "all"),
}


def completion_of(field: "Field[Any]") -> Callable[[str], list[str]] | None:
    """Return the function that completes an option of `Config`; None if it takes no names."""
    choices = field.metadata.get("choices")
    names = NAMES.get(field.name) or (choices and (lambda: choices))
    if not names:
        return None
    is_list = SEPARATORS.get(field.name) == ","

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if is_list else ("", "", incomplete)
        earlier = before.split(",")
        found = [name for name in names() if name.startswith(last) and name not in earlier]
        return [f"{before}{comma}{name}" for name in found]

    return complete
