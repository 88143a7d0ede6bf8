"""Options as dataclass fields: a field, its type, its default, one line of help and its range *are* the option.

The command line, the config file, `fedala.run` and the methods' hyperparameters all read the same fields.
"""

import dataclasses
import difflib
import types
import typing
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from fedala.errors import UserError

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field with its help text and the values it accepts."""
    limits = {"least": least, "above": above, "most": most, "choices": choices}
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """An instance of the dataclass `cls` from names and values (strings are converted), every one checked.

    `where` is put before a name in messages: `fedala.` makes `eta` read `fedala.eta`.
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    kinds = typing.get_type_hints(cls)
    checked = {}
    for name, value in values.items():
        if name not in fields:
            raise UserError(f"There is no option {where}{name}{suggest(name, fields)}.")
        checked[name] = _check(
            convert(value, kinds[name], where + name), fields[name], where + name
        )
    return cls(**checked)


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean x?` or the list of what there is, to end a sentence with."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f" (did you mean {close[0]}?)"
    return f"; there is {', '.join(known)}" if known else "; there are none"


def convert(value: Any, kind: Any, name: str) -> Any:
    """`value` as a `kind`, where it says the same thing: the text "3" and 3.0 are the whole number 3, 2.5 is not.

    A number is one that float32 can hold: no option has a use for infinity or NaN.
    """
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        arms = typing.get_args(kind)
        if value is None and type(None) in arms:
            return None
        [kind] = [arm for arm in arms if arm is not type(None)]
    large = (
        isinstance(value, int) and abs(value) >= 2**63
    )  # no option has a use for it, and Python may not even print it
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            return {"true": True, "false": False, "yes": True, "no": False}[str(value).lower()]
        if large:
            pass
        elif kind is int and not isinstance(value, bool):
            exact = isinstance(value, (int, str)) and "." not in str(value)
            if (
                float(value) == int(float(value))
                and abs(number := int(value if exact else float(value))) < 2**63
            ):
                return number
        elif kind is float and not isinstance(value, bool):
            if abs(float(value)) < 2**127:
                return float(value)
        elif kind is str and isinstance(value, (str, int)) and not isinstance(value, bool):
            str(value).encode()  # a name that is not Unicode could not be written to the run folder
            if not any(
                unicodedata.category(c) == "Cc" for c in str(value)
            ):  # no file's name has a use for them
                return str(value)
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    nouns = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    what = "a number of more than 64 bits" if large else repr(value)
    raise UserError(f"{name} must be {nouns.get(kind, kind)}, not {what}.")


def _check(value: Any, field: "dataclasses.Field[Any]", name: str) -> Any:
    if value is None:
        return value
    limits = field.metadata
    least, above, most, choices = (limits.get(k) for k in ("least", "above", "most", "choices"))
    if choices is not None and value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")
    if least is not None and value < least:
        raise UserError(f"{name} must be at least {least}, not {value}.")
    if above is not None and value <= above:
        raise UserError(f"{name} must be greater than {above}, not {value}.")
    if most is not None and value > most:
        raise UserError(f"{name} must be at most {most}, not {value}.")
    return value
