"""The one kind of error that a user is meant to read."""


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


def spreadsheet_safe(text: str) -> str:
    """`text` as a cell of a table that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def byte_size(size: float) -> str:
    """A number of bytes for people: `22.6 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
