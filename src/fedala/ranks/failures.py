"""What goes wrong on a rank: it travels to rank 0 in place of a reply, and is raised there."""

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from fedala.errors import RunError, UserError, first_line
from fedala.ranks.group import RankGroup, RankLost

T = TypeVar("T")

#: Errors that the round loop or the user expects. If ranks differ, the first of these is raised.
EXPECTED: tuple[type[Exception], ...] = (UserError, RunError, OSError, torch.OutOfMemoryError)


class Failure:
    """An error that travels to rank 0 in place of a reply."""

    def __init__(self, error: Exception, rank: int) -> None:
        self.rank = rank
        #: Of an error that nobody expects; "" of others.
        self.traceback = ""
        #: The error itself, if it is rank 0's own and nobody expects it.
        self.error: Exception | None = None
        kinds = [kind for kind in EXPECTED if isinstance(error, kind)]
        self.kind = kinds[0] if kinds else RunError
        # Without its frames, which would keep the memory of the work that failed.
        self.arguments: tuple[Any, ...] = (str(error),)
        if isinstance(error, OSError) and error.strerror:
            self.arguments = error.errno, error.strerror, error.filename
        if not kinds:
            self.arguments = (f"Rank {rank}: {type(error).__name__}: {first_line(error)}",)
            self.traceback = "".join(traceback.format_exception(error))
            self.error = error if rank == 0 else None

    @property
    def sentence(self) -> str:
        return str(self.arguments[0])

    def throw(self) -> NoReturn:
        """Raise the error, on rank 0. That of another rank comes without its frames."""
        if self.error:
            raise self.error
        if self.traceback:
            print(f"Rank {self.rank}:\n{self.traceback}", file=sys.stderr, end="")
        raise self.kind(*self.arguments)


def attempt(work: Callable[[], T], rank: int) -> T | Failure:
    """Do some work; an error that rank 0 must hear of is returned."""
    try:
        return work()
    except RankLost:
        raise
    except Exception as error:
        return Failure(error, rank)


def find_failures(replies: Sequence[Any]) -> list[Failure]:
    """Return the failures among some replies, the one to raise first.

    That is one that nobody expects, if rank 0 has it: it is the same as in a single process.
    """
    failures = [reply for reply in replies if isinstance(reply, Failure)]
    return sorted(
        failures, key=lambda one: (one.error is None, bool(one.traceback), _urgency(one), one.rank)
    )


def _urgency(failure: Failure) -> int:
    return EXPECTED.index(failure.kind)


def collect_replies(group: RankGroup, work: Callable[[], Any]) -> list[Any]:
    """Do rank 0's part of some work; return every rank's reply. Raise what any of them raised."""
    replies = group.gather(attempt(work, group.rank))
    for failure in find_failures(replies):
        failure.throw()
    return replies
