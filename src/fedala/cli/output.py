"""Lines on the terminal that are safe whatever a file or a folder is called."""

import sys

from fedala.errors import printable


def say(sentence: str) -> None:
    """Print one line to stderr, without markup."""
    print(printable(sentence, 2000), file=sys.stderr)


def print_line(sentence: str) -> None:
    """Print one line to stdout, without markup."""
    print(printable(sentence, 10_000))
