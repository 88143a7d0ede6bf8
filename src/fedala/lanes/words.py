"""Means of word embeddings on a CPU: only the words of a text are read, and not its padding.

A text of forty words stands in two hundred places. Looked up as it stands, with one row for each
place, a batch is mostly padding, and its gradient, too. Here the rows of real words are added up as
they are read, for all lanes at once, and padding is counted. A GPU cannot do that: the number of
words depends on the batch, and a captured step needs shapes that do not.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from fedala.lanes.late_gradients import SparseGradient
from fedala.lanes.stacked import call_stacked
from fedala.lanes.trees import broadcast_lanes, is_shared


@dataclass(frozen=True)
class Words:
    """The real words of texts, [lane, text, place], to look up in tables, [lane, row, …]."""

    rows: Tensor
    """[word]: rows of the text's table."""
    counts: Tensor
    """[lane, text]: words of each text."""
    padded: Tensor | None
    """[lane, text, 1]: places without a word; None if there is no padding."""
    places: int
    """Places of each text."""

    @classmethod
    def find(cls, texts: Tensor, padding: int | None) -> "Words":
        places = texts.shape[2]
        if padding is None:
            return cls(texts.flatten(), torch.full(texts.shape[:2], places), None, places)
        real = texts != padding
        counts = real.sum(2)
        return cls(texts[real], counts, (places - counts).unsqueeze(2), places)

    def find_rows(self, tables: Tensor) -> Tensor:
        """Return [word]: rows of the tables of all lanes, one table after the other."""
        if is_shared(tables):
            return self.rows
        first = torch.arange(len(tables)) * tables.shape[1]
        return self.rows + first.repeat_interleave(self.counts.sum(1), output_size=len(self.rows))

    def average(self, tables: Tensor, padding: int | None) -> Tensor:
        """Return the mean over each text's places, [lane, text, …]; padding is a row, too."""
        flat = tables[0] if is_shared(tables) else tables.flatten(0, 1)
        counts = self.counts.flatten()
        starts = counts.cumsum(0) - counts
        total = F.embedding_bag(self.find_rows(tables), flat, starts, mode="sum")
        total = total.view(*self.counts.shape, -1)
        if self.padded is not None:
            total.addcmul_(self.padded.to(total.dtype), tables[:, padding].unsqueeze(1))
        return total.div_(self.places)


@dataclass(eq=False)
class WordGradient(SparseGradient):
    """The gradient of tables whose rows were added up: `values`, [text, …], for all its words."""

    names: tuple[str, ...]
    words: Words
    values: Tensor
    shape: torch.Size

    def find_rows(self, table: Tensor) -> Tensor:
        return self.words.find_rows(table)

    def add_to(self, targets: Sequence[Tensor], factors: Tensor) -> None:
        """Add the gradient. The order of addition is fixed: the result is always the same."""
        [table] = targets
        values = self.values.view(len(table), -1, table.shape[2])
        scaled = values * broadcast_lanes(factors, values).to(values.dtype)
        texts = torch.repeat_interleave(self.words.counts.flatten())
        flat = table.view(-1, table.shape[2])
        flat.index_add_(0, self.find_rows(table), scaled.flatten(0, 1).index_select(0, texts))


class _MeanOfWords(torch.autograd.Function):
    """The mean over all places of a text. The gradient of the tables goes to `found.means`."""

    @staticmethod
    def forward(
        ctx: Any,
        tables: Tensor,
        texts: Tensor,
        padding: int | None,
        found: Any,
    ) -> Tensor:
        ctx.words = words = Words.find(texts, padding)
        result: Tensor = found.read(ctx, tables, lambda tables: words.average(tables, padding))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        ctx.found.add_slopes(ctx, grad)
        ctx.found.means.append((ctx.words, grad.flatten(0, 1) / ctx.words.places))
        return None, None, None, None


def keep_word_gradient(x: Tensor, weight: Tensor, padding: int | None, found: Any) -> Tensor:
    """Return `mean_embedding`. Its words and their gradients go to the list `found.means`."""
    return call_stacked(_MeanOfWords.apply, (weight, x.long()), (padding, found))


def _average(tables: Tensor, texts: Tensor, padding: int | None) -> Tensor:
    return Words.find(texts, padding).average(tables, padding)


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
        return call_stacked(_average, (weight, x.long()), (padding,))
    return F.embedding(x, weight, padding).mean(1)


class MeanEmbedding(nn.Embedding):
    """An embedding that returns the mean of a text's rows."""

    def forward(self, input: Tensor) -> Tensor:
        return mean_embedding(input, self.weight, self.padding_idx)
