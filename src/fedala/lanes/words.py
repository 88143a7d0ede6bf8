"""Means of word embeddings: only the words of a text are read, and not its padding.

A text of forty words stands in two hundred places. Looked up as it stands, with one row for each
place, a batch is mostly padding, and its gradient, too. Here the rows of real words are added up as
they are read, for all lanes at once, and padding is counted. `Words` does so on a CPU. On a GPU, a
captured step needs shapes that do not depend on the batch, and `fedala.cuda.words` has kernels.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from fedala.lanes.late_gradients import SparseGradient
from fedala.lanes.stacked import call_stacked
from fedala.lanes.trees import broadcast_lanes, is_shared


class TextWords(Protocol):
    """The words of texts, [lane, text, place], to look up in tables, [lane, row, …]."""

    @property
    def places(self) -> int:
        """The number of places of each text."""

    def find_rows(self, tables: Tensor) -> Tensor:
        """Return all rows that words have, of the tables of all lanes one after the other."""

    def average(self, tables: Tensor) -> Tensor:
        """Return the mean over each text's places, [lane, text, …]; padding is a row, too."""

    def add(self, tables: Tensor, values: Tensor, factors: Tensor) -> None:
        """Add `values`, [lane, text, …], times `factors`, [lane], to the rows of each text's words.

        Padding gets nothing. The order of addition is fixed: the result is always the same.
        """


FindWords = Callable[[Tensor, int | None], TextWords]
"""Of texts and the row of padding."""


@dataclass(frozen=True)
class Words:
    """The real words of texts, on a CPU."""

    rows: Tensor
    """[word]: rows of the text's table."""
    counts: Tensor
    """[lane, text]: words of each text."""
    places: int
    """Places of each text."""
    padding: int | None
    """The row for places without a word."""

    @classmethod
    def find(cls, texts: Tensor, padding: int | None) -> "Words":
        texts, places = texts.long(), texts.shape[2]
        if padding is None:
            return cls(texts.flatten(), torch.full(texts.shape[:2], places), places, None)
        real = texts != padding
        return cls(texts[real], real.sum(2), places, padding)

    @cached_property
    def padded(self) -> Tensor:
        """[lane, text, 1]: places without a word."""
        return (self.places - self.counts).unsqueeze(2)

    def find_rows(self, tables: Tensor) -> Tensor:
        if is_shared(tables):
            return self.rows
        first = torch.arange(len(tables)) * tables.shape[1]
        return self.rows + first.repeat_interleave(self.counts.sum(1), output_size=len(self.rows))

    def average(self, tables: Tensor) -> Tensor:
        flat = tables[0] if is_shared(tables) else tables.flatten(0, 1)
        counts = self.counts.flatten()
        starts = counts.cumsum(0) - counts
        total = F.embedding_bag(self.find_rows(tables), flat, starts, mode="sum")
        total = total.view(*self.counts.shape, -1)
        if self.padding is not None:
            total.addcmul_(self.padded.to(total.dtype), tables[:, self.padding].unsqueeze(1))
        return total.div_(self.places)

    def add(self, tables: Tensor, values: Tensor, factors: Tensor) -> None:
        scaled = values * broadcast_lanes(factors, values).to(values.dtype)
        texts = torch.repeat_interleave(self.counts.flatten())
        flat = tables.view(-1, tables.shape[2])
        flat.index_add_(0, self.find_rows(tables), scaled.flatten(0, 1).index_select(0, texts))


@dataclass(eq=False)
class WordGradient(SparseGradient):
    """The gradient of tables whose rows were added up: `values`, [lane, text, …]."""

    names: tuple[str, ...]
    words: TextWords
    values: Tensor
    shape: torch.Size

    def find_rows(self, table: Tensor) -> Tensor:
        return self.words.find_rows(table)

    def add_to(self, targets: Sequence[Tensor], factors: Tensor) -> None:
        [table] = targets
        self.words.add(table, self.values, factors)


class MeanOfWords(torch.autograd.Function):
    """The mean over all places of a text. The gradient of the tables goes to `found.means`."""

    @staticmethod
    def forward(
        ctx: Any,
        tables: Tensor,
        texts: Tensor,
        padding: int | None,
        found: Any,
        find: FindWords,
    ) -> Tensor:
        ctx.words = words = find(texts, padding)
        result: Tensor = found.read(ctx, tables, words.average)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        ctx.found.add_slopes(ctx, grad)
        ctx.found.means.append((ctx.words, grad / ctx.words.places))
        return None, None, None, None, None


def keep_word_gradient(x: Tensor, weight: Tensor, padding: int | None, found: Any) -> Tensor | None:
    """Return `mean_embedding`. Its words and their gradients go to the list `found.means`.

    Return None on a GPU that has no kernel for it.
    """
    if has_torch_function_variadic(x, weight):
        arguments = x, weight, padding, found
        kept: Tensor | None = handle_torch_function(keep_word_gradient, (x, weight), *arguments)
        return kept
    if weight.device.type != "cpu":
        return None
    return call_stacked(MeanOfWords.apply, (weight, x), (padding, found, Words.find))


def _average(tables: Tensor, texts: Tensor, padding: int | None) -> Tensor:
    return Words.find(texts, padding).average(tables)


class _Reading(threading.local):
    """Whether this thread reads real words alone."""

    skips_padding = False


_reading = _Reading()


@contextmanager
def skip_padding() -> Iterator[None]:
    """Read real words alone in this thread, wherever no gradient is wanted."""
    before, _reading.skips_padding = _reading.skips_padding, True
    try:
        yield
    finally:
        _reading.skips_padding = before


def mean_embedding(x: Tensor, weight: Tensor, padding: int | None) -> Tensor:
    """Return the mean of the rows of a table at x, [text, place]; that of padding counts, too."""
    if has_torch_function_variadic(x, weight):
        result: Tensor = handle_torch_function(mean_embedding, (x, weight), x, weight, padding)
        return result
    if _reading.skips_padding and not torch.is_grad_enabled():
        return call_stacked(_average, (weight, x), (padding,))
    return F.embedding(x, weight, padding).mean(1)


class MeanEmbedding(nn.Embedding):
    """An embedding that returns the mean of a text's rows."""

    def forward(self, input: Tensor) -> Tensor:
        return mean_embedding(input, self.weight, self.padding_idx)
