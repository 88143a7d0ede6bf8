"""Means of word embeddings in one kernel each way, with shapes that do not depend on the texts.

A batch of ten texts has two thousand places, and most are padding. The forward pass reads the rows
of real words. The gradient is added to the tables in place, and always in the same order: the first
place of a word in the batch adds for all its places, and every place looks whether it is the first.
These are four million comparisons in a lane, which take a GPU less time than to sort the places.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedala.cuda.compiling import Kernel
from fedala.lanes.late_gradients import number_rows
from fedala.lanes.words import MeanOfWords

#: With more places in a batch than this, every place would be compared with too many others.
MOST_PLACES = 4096


@Kernel
@triton.jit(do_not_specialize=["TEXTS"])
def _average_words(
    tables, texts, means, table_stride, TEXTS, PLACES, PADDING,
    W: tl.constexpr, BW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute means[lane, text, w] = Σ tables[lane, texts[lane, text, place], w] / PLACES."""
    text = tl.program_id(1).to(tl.int64) * TEXTS + tl.program_id(0)
    tables += tl.program_id(1).to(tl.int64) * table_stride
    w = tl.arange(0, BW)
    total = tl.zeros((BW,), tl.float32)
    padded = 0
    for first in range(0, PLACES, BLOCK):
        place = first + tl.arange(0, BLOCK)
        word = tl.load(texts + text * PLACES + place, mask=place < PLACES, other=-1).to(tl.int64)
        is_real = (place < PLACES) & (word != PADDING)
        padded += tl.sum(((place < PLACES) & (word == PADDING)).to(tl.int32), 0)
        rows = tl.load(
            tables + word[:, None] * W + w[None, :],
            mask=is_real[:, None] & (w[None, :] < W),
            other=0.0,
        )
        total += tl.sum(rows, 0)
    if padded > 0:
        row = tables + tl.cast(PADDING, tl.int64) * W + w
        total += padded * tl.load(row, mask=w < W, other=0.0)
    tl.store(means + text * W + w, total / PLACES, mask=w < W)


@Kernel
@triton.jit(do_not_specialize=["TEXTS"])
def _add_words(
    tables, texts, values, factors, table_stride, factor_stride, TEXTS, PLACES, PADDING,
    W: tl.constexpr, BW: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Add factors[lane] · values[lane, text] to the rows of each text's words, but of padding."""
    lane = tl.program_id(1).to(tl.int64)
    texts += lane * TEXTS * PLACES
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(texts + own, mask=own < TEXTS * PLACES, other=PADDING).to(tl.int64)
    is_real = (own < TEXTS * PLACES) & (word != PADDING)
    if tl.max(is_real.to(tl.int32), 0) > 0:
        w = tl.arange(0, BW)
        total = tl.zeros((BLOCK, BW), tl.float32)
        earlier = tl.zeros((BLOCK, OTHERS), tl.int32)
        for text in range(TEXTS):
            count = tl.zeros((BLOCK, OTHERS), tl.int32)
            for first in range(0, PLACES, OTHERS):
                place = first + tl.arange(0, OTHERS)
                other = text * PLACES + place
                also = tl.load(texts + other, mask=place < PLACES, other=-1).to(tl.int64)
                is_same = (word[:, None] == also[None, :]) & (place[None, :] < PLACES)
                count += is_same.to(tl.int32)
                earlier += (is_same & (other[None, :] < own[:, None])).to(tl.int32)
            value = tl.load(values + (lane * TEXTS + text) * W + w, mask=w < W, other=0.0)
            total += tl.sum(count, 1).to(tl.float32)[:, None] * value[None, :]
        is_first = is_real & (tl.sum(earlier, 1) == 0)
        at = tables + lane * table_stride + word[:, None] * W + w[None, :]
        mask = is_first[:, None] & (w[None, :] < W)
        factor = tl.load(factors + lane * factor_stride)
        tl.store(at, tl.load(at, mask=mask, other=0.0) + factor * total, mask=mask)


@dataclass(frozen=True)
class PlacedWords:
    """The words of texts, [lane, text, place], on a GPU. Tables are [lane, row, w]."""

    texts: Tensor
    padding: int | None

    @classmethod
    def find(cls, texts: Tensor, padding: int | None) -> "PlacedWords":
        return cls(texts.contiguous(), padding)

    @property
    def places(self) -> int:
        return self.texts.shape[2]

    def find_rows(self, tables: Tensor) -> Tensor:
        return number_rows(self.texts, tables)

    def average(self, tables: Tensor) -> Tensor:
        lanes, texts, places = self.texts.shape
        if not _has_rows(tables):
            tables = tables.contiguous()
        means = tables.new_empty(lanes, texts, tables.shape[2])
        _average_words[(texts, lanes)](
            tables, self.texts, means, tables.stride(0), texts, places, self._padding_row,
            tables.shape[2], triton.next_power_of_2(tables.shape[2]), BLOCK=32, num_warps=4,
        )  # fmt: skip
        return means

    def add(self, tables: Tensor, values: Tensor, factors: Tensor) -> None:
        lanes, texts, places = self.texts.shape
        width = triton.next_power_of_2(tables.shape[2])
        block = max(1, min(32, 4096 // width))  # a wide block of rows does not fit into registers
        if not _has_rows(tables):
            own = tables.contiguous()
            self.add(own, values, factors)
            tables.copy_(own)
            return
        factors = factors.to(values.dtype)
        _add_words[(triton.cdiv(texts * places, block), lanes)](
            tables, self.texts, values.contiguous(), factors, tables.stride(0), factors.stride(0),
            texts, places, self._padding_row,
            tables.shape[2], width, BLOCK=block, OTHERS=64, num_warps=4,
        )  # fmt: skip

    @property
    def _padding_row(self) -> int:
        """The row of padding; no row if there is none."""
        return -1 if self.padding is None else self.padding


def _has_rows(tables: Tensor) -> bool:
    """Tell whether the numbers of a row are neighbours in memory, and so are the rows."""
    return tables.is_contiguous() or tables.stride()[1:] == (tables.shape[2], 1)


def _average(tables: Tensor, texts: Tensor, padding: int | None) -> Tensor:
    return PlacedWords.find(texts, padding).average(tables)


def _covers(texts: Tensor, table: Tensor) -> bool:
    return table.dtype == torch.float32 and table.dim() == texts.dim() == 2


def match_mean(mode: Any, texts: Tensor, table: Tensor, padding: int | None) -> Any:
    """Return how to call the kernel for a mean without a gradient, or None."""
    if torch.is_grad_enabled() or not _covers(texts, table):
        return None
    return _average, (table, texts), (padding,)


def match_call(mode: Any, texts: Tensor, table: Tensor, padding: int | None, found: Any) -> Any:
    """Return how to call the kernels for a mean whose gradient is that of rows, or None."""
    if not _covers(texts, table) or texts.numel() > MOST_PLACES:
        return None
    return MeanOfWords.apply, (table, texts), (padding, found, PlacedWords.find)
