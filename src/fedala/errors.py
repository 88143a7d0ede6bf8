"""The errors that a user reads, and text that is safe to show."""

import importlib
from typing import Any


class UserError(ValueError):
    """A mistake of the user, in one sentence: what is wrong, where, and what was expected."""

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence, 1000))


class MethodError(UserError):
    """A function of a method that returns or changes what it should not."""


class RunError(Exception):
    """A run that cannot continue, although its input is sound. Its finished rounds are kept."""

    exit_code = 1


class PluginWarning(UserWarning):
    """An installed package that should add methods, and cannot be used. It is left out."""


class RunWarning(UserWarning):
    """The results of a run are likely to be wrong, or to mean something else than they seem to."""


class Caution(str):
    """A note of a run whose results are likely to be wrong: in a program, it is a `RunWarning`."""


class CacheWarning(UserWarning):
    """Decoded samples that could not be kept, or were damaged: loading them takes longer."""


def import_optional(module: str, package: str, extra: str, what: str) -> Any:
    """Import an optional package when it is used; if it is missing, say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{what} needs {package}: pip install 'fedala[{extra}]'.") from None


def printable(text: str, most: int) -> str:
    """Return `text` as one line of at most about `most` characters that any terminal can show.

    Names and values may come from any file, so they may hold control characters.
    """
    if len(text) > most:
        text = f"{text[: most // 2]} … {text[-most // 2 :]}"
    return "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in text)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, short enough for a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:200] if lines else type(error).__name__


def byte_size(size: float) -> str:
    """Return a number of bytes in a readable unit: `22.6 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def spreadsheet_safe(value: Any) -> Any:
    """Return `value` for a csv file. A spreadsheet must not run text as a formula.

    Text that begins like a formula gets an apostrophe; a negative number does not.
    """
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
