"""Text for the terminal: safe lines whatever a file is called, and the examples of `--help`."""

import re
import sys

from rich.markup import escape

from fedala.errors import printable

#: The columns of the usual terminal, without Typer's margins.
COLUMNS = 78


def say(sentence: str) -> None:
    """Print one line to stderr, without markup."""
    print(printable(sentence, 2000), file=sys.stderr)


def print_line(sentence: str) -> None:
    """Print one line to stdout, without markup."""
    print(printable(sentence, 10_000))


def keep_lines(text: str) -> str:
    """Return the text below a command's help so that Typer keeps its lines and brackets.

    Typer joins single lines and drops indentation, so an indented example gets a `$`. A comment
    that would not fit beside its command stands above it.
    """
    lines: list[str] = []
    for line in filter(str.strip, text.splitlines()):
        line = re.sub("^  ", "$ ", line)
        command, mark, comment = line.partition("  # ")
        if mark and len(line) > COLUMNS:
            lines += [f"# {comment.strip()}", command.rstrip()]
        else:
            lines.append(line)
    return "\n\n".join(escape(line) for line in lines)
