"""The values of a config as text, and tables of them in a config file."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedala.errors import UserError


def flatten_settings(table: Any, prefix: str = "") -> dict[str, str | float]:
    """Return hyperparameters by full name: `[set.fedala] eta = 0.5` is `"fedala.eta" = 0.5`."""
    if not isinstance(table, Mapping):
        raise UserError("set must be a table of hyperparameters, such as {'fedala.eta' = 0.5}.")
    flat: dict[str, str | float] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and not prefix:
            flat |= flatten_settings(value, f"{name}.")
        elif isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
            flat[name] = _join_patterns(name, value)
        elif isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
            flat[name] = value
        else:
            raise UserError(
                f"set {name} must be a number, text, true or false, or a list of texts, and is "
                "none of them."
            )
    return flat


def _join_patterns(name: str, values: Sequence[str]) -> str:
    """Return the text of a hyperparameter that is a list of texts, such as `ala.layers`."""
    if not values or not all(one and "," not in one for one in values):
        raise UserError(
            f"set {name} has a list: it must have texts in it, without commas in them, such as "
            "fedala.layers = ['cls_head']."
        )
    return ",".join(values)


def flatten_sweep(table: Any) -> dict[str, str]:
    """Return swept values by full name, as text: `lr = [0.1, 0.01]` is `lr = "0.1,0.01"`."""
    if not isinstance(table, Mapping):
        raise UserError("sweep must be a table of values, such as {lr = [0.1, 0.01]}.")
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": text for name, text in flatten_sweep(value).items()}
        else:
            values = value if isinstance(value, list | tuple) else [value]
            flat[key] = ",".join(
                str(one).lower() if isinstance(one, bool) else str(one) for one in values
            )
    return flat


#: Options that are lists, and what separates their values in a text.
SEPARATORS = {
    "method": ",", "imports": ",", "drop_columns": ",", "evaluate": ",", "augment": ",",
    "class_weights": ",", "normalize": "/",
}  # fmt: skip


def join_list(name: str, value: Any) -> Any:
    """Return the text of an option that is given as a list: `["fedala", "fedavg"]`.

    `normalize` takes a mean and a standard deviation, or a list of each.
    """
    if name not in SEPARATORS or not isinstance(value, list | tuple):
        return str(value) if name == "imports" and isinstance(value, Path) else value
    words = [",".join(map(_word, one)) if isinstance(one, list) else _word(one) for one in value]
    return SEPARATORS[name].join(words)


def _word(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number or isinstance(value, str | Path)):
        raise UserError(f"A list of options has texts or numbers in it, not {value!r}.")
    return str(value)


def describe_value(value: Any) -> str:
    """Return the value of an option for a sentence."""
    if value is None or value == {}:
        return "none"
    return (
        ", ".join(f"{key} = {item}" for key, item in value.items())
        if isinstance(value, Mapping)
        else str(value)
    )


def toml(value: str | float) -> str:
    """Return a value as TOML. A JSON scalar is one, except for one character that JSON allows."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
