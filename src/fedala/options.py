"""Options as dataclass fields: name, type, default, one line of help, and the accepted values.

The command line, the config file, `fedala.run` and the methods' hyperparameters read these fields.
"""

import contextlib
import dataclasses
import difflib
import shlex
import types
import typing
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from fedala.errors import UserError

T = TypeVar("T")

#: Flags that are not called like their option: `import` and `global` are keywords of Python.
FLAGS = {"imports": "--import", "is_global": "--global"}
_uses_flags = False


@contextlib.contextmanager
def use_flags() -> Iterator[None]:
    """Let messages name options as flags: the command line runs in this."""
    global _uses_flags
    before, _uses_flags = _uses_flags, True
    try:
        yield
    finally:
        _uses_flags = before


def are_flags_used() -> bool:
    """Tell whether the user gives options on the command line, and not in Python."""
    return _uses_flags


def flag_of(name: str) -> str:
    """Return the flag of an option: `--batch-size`."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def name_option(name: str, value: Any = None) -> str:
    """Return an option, with its value if there is one, as this user gives it.

    That is `--clients-by folder` or `--no-save-best` on the command line, and `clients_by='folder'`
    or `save_best=False` in Python.
    """
    if not _uses_flags:
        return name if value is None else f"{name}={value!r}"
    flag = flag_of(name)
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    if isinstance(value, Mapping):
        return " ".join(f"{flag} {key}={one}" for key, one in value.items())
    return flag if value is None else f"{flag} {shlex.quote(str(value))}"


def split_names(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return names: those of a text are separated by commas, others are as they are."""
    if isinstance(names, str):
        return tuple(name.strip() for name in names.split(",") if name.strip())
    return tuple(names or ())


def option(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Declare a dataclass field with its help text and the values that it accepts."""
    limits = {"least": least, "above": above, "most": most, "choices": choices}
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build the dataclass `cls` from names and values; convert strings and check every value.

    Messages put `where` before a name: `fedala.` turns `eta` into `fedala.eta`.
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    kinds = typing.get_type_hints(cls)
    checked = {}
    for name, value in values.items():
        if name not in fields:
            raise UserError(f"There is no option {where}{name}{suggest(name, fields, where)}.")
        converted = convert(value, kinds[name], where + name)
        checked[name] = _check(converted, fields[name], where + name)
    return cls(**checked)


def suggest(name: str, known: Iterable[str], where: str = "") -> str:
    """Return the end of a sentence: ` (did you mean x?)`, or the list of known names.

    It puts `where` before the name that is meant.
    """
    known = list(known)
    folded = {one.lower(): one for one in reversed(known)}
    close = difflib.get_close_matches(name.lower(), folded, n=1)
    if close:
        return f" (did you mean {where}{folded[close[0]]}?)"
    return f"; choose from {', '.join(known)}" if known else "; there are none"


def convert(value: Any, kind: Any, name: str) -> Any:
    """Convert `value` to `kind` if that loses nothing: "3" and 3.0 are the int 3, 2.5 is not.

    Infinity, NaN and numbers beyond float32 or 64 bits are refused: no option has a use for them.
    """
    kinds = [kind]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kinds = [arm for arm in typing.get_args(kind) if arm is not type(None)]
        if value is None and len(kinds) < len(typing.get_args(kind)):
            return None
    # Python may refuse to print such a number, so it is not tried.
    is_large = isinstance(value, int) and abs(value) >= 2**63
    converters = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}
    if len(kinds) > 1:
        converters[str] = _to_words  # a number is none of the other kinds by mistake
    for one in kinds if not is_large else ():
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            return converters[one](value)
    nouns = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    what = "a number of more than 64 bits" if is_large else repr(value)
    expected = " or ".join(str(nouns.get(one, one)) for one in kinds)
    raise UserError(f"{name} must be {expected}, not {what}.")


def _to_words(value: Any) -> str:
    """Return a text that does not read as a number."""
    with contextlib.suppress(ValueError):
        float(value)
        raise TypeError
    return _to_str(value)


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False, "yes": True, "no": False}[str(value).lower()]


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or float(value) != int(float(value)):
        raise ValueError
    is_exact = isinstance(value, (int, str)) and "." not in str(value)
    number = int(value if is_exact else float(value))
    if abs(number) >= 2**63:
        raise ValueError
    return number


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not abs(float(value)) < 2**127:
        raise ValueError
    return float(value)


def _to_str(value: Any) -> str:
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ValueError
    text = str(value)
    text.encode()  # a run folder can hold Unicode only
    if any(unicodedata.category(character) == "Cc" for character in text):
        raise ValueError  # no file name has a use for control characters
    return text


def _check(value: Any, field: "dataclasses.Field[Any]", name: str) -> Any:
    if value is None:
        return value
    limits = field.metadata
    least, above, most, choices = (limits.get(k) for k in ("least", "above", "most", "choices"))
    if choices is not None and value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")
    if isinstance(value, str):
        return value
    if least is not None and value < least:
        raise UserError(f"{name} must be at least {least}, not {value}.")
    if above is not None and value <= above:
        raise UserError(f"{name} must be greater than {above}, not {value}.")
    if most is not None and value > most:
        raise UserError(f"{name} must be at most {most}, not {value}.")
    return value
