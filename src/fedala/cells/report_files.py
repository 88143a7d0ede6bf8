"""Write a report: its files into a folder, and its tables between two marks of a Markdown file."""

from collections.abc import Mapping
from pathlib import Path

from fedala.errors import UserError
from fedala.io import files
from fedala.io.untrusted import read_file

#: Bytes of a Markdown file that gets the tables, at most.
_LARGEST = 2**25


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write the files of a report, and return their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            files.write_file(folder / name, text.encode(), durable=False)
    except OSError as error:
        raise UserError(f"The report cannot be written to {folder}: {error.strerror}.") from None
    return [folder / name for name in texts]


def make_marks(command: str) -> tuple[str, str]:
    """Return the two lines of a Markdown file between which a command puts its tables."""
    return f"<!-- begin: fedala {command} report -->", f"<!-- end: fedala {command} report -->"


def split_at_marks(path: Path, command: str) -> tuple[str, str]:
    """Return the text of a Markdown file before and after the tables, with the two marks."""
    try:
        text = read_file(path, _LARGEST).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    first, last = make_marks(command)
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise UserError(
            f"{path} has no place for the tables. Add the lines {first} and {last} to it."
        )
    return before + begin, end + after


def insert(text: str, path: Path, command: str) -> None:
    """Put Markdown between the two marks of a file, instead of what is there."""
    before, after = split_at_marks(path, command)
    try:
        files.write_file(path.resolve(), f"{before}\n\n{text}\n{after}".encode())
    except OSError as error:
        raise UserError(f"The tables cannot be written to {path}: {error.strerror}.") from None
