"""The one kind of error that a user is meant to read, and text that is safe to show."""

from typing import Any


class UserError(ValueError):
    """A mistake in what the user asked for, in one sentence: what was wrong, where, and what would be right."""

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence, 1000))


class RunError(Exception):
    """A run that cannot go on, for no fault of its input: one sentence. What it had finished is kept."""


def printable(text: str, most: int) -> str:
    """`text` as one line that every terminal shows as it is: names and values may come out of anybody's file."""
    if len(text) > most:
        text = f"{text[: most // 2]} … {text[-most // 2 :]}"
    return "".join(c if c.isprintable() else " " if c.isspace() else "�" for c in text)


def byte_size(size: float) -> str:
    """A number of bytes for people: `22.6 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def spreadsheet_safe(value: Any) -> Any:
    """`value` for a csv file that people open: text that a spreadsheet would run as a formula gets an apostrophe."""
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return value
    try:
        float(value)  # a negative number stays a number
    except ValueError:
        return f"'{value}"
    return value
