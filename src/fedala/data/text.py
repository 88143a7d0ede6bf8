"""Texts: their tokens, their vocabulary, and the csv files that hold them."""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from fedala.data.catalogue import LENGTH
from fedala.data.dataset import RawData, encode_labels
from fedala.errors import UserError, first_line
from fedala.io.untrusted import check_memory, open_file

# torchtext's `basic_english`, as for the paper's vocabulary: punctuation is a token, or is dropped.
_BASIC_ENGLISH = str.maketrans(
    {
        "'": " '  ",
        '"': "",
        ".": " . ",
        ",": " , ",
        "(": " ( ",
        ")": " ) ",
        "!": " ! ",
        "?": " ? ",
        ";": " ",
        ":": " ",
    }
)


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case basic-English tokens."""
    return text.lower().translate(_BASIC_ENGLISH).replace("<br />", " ").split()


def build_vocabulary(texts: list[list[str]]) -> dict[str, int]:
    """Number the tokens from 1, by frequency and then by the alphabet; 0 is unknown and padding."""
    count = Counter(chain.from_iterable(texts))
    ordered = sorted(count, key=lambda token: (-count[token], token))
    return {token: number for number, token in enumerate(ordered, start=1)}


def encode_texts(
    texts: Sequence[str], tokens: Sequence[str] | None = None, length: int = LENGTH
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return texts as int32 N×`length`, cut or padded with 0, and the tokens of ids 1, 2, ….

    With `tokens`, these are the vocabulary, and other words are unknown: 0.
    """
    split = [tokenize(text) for text in texts]
    index = (
        build_vocabulary(split)
        if tokens is None
        else {token: number for number, token in enumerate(tokens, start=1)}
    )
    ids = np.zeros((len(split), length), dtype=np.int32)
    for row, words in zip(ids, split, strict=True):
        words = words[:length]
        row[: len(words)] = [index.get(word, 0) for word in words]
    return torch.from_numpy(ids), tuple(index)


def read_labelled_csv(path: Path) -> RawData:
    """Read a csv file whose first line names the columns `label` (or `class`) and `text`."""
    rows = read_rows(path)
    _, header = next(rows, (1, []))
    columns = [name.strip().lower() for name in header]
    label = next((columns.index(name) for name in ("label", "class") if name in columns), None)
    if label is None or "text" not in columns:
        missing = "label" if label is None else "text"
        raise UserError(
            f"{path} has no {missing} column: its first line must name a label and a text column, "
            f"and it names {', '.join(columns)[:200] or 'nothing'}."
        )
    text = columns.index("text")
    labels, texts = [], []
    for line, row in rows:
        if len(row) <= max(label, text):
            raise UserError(
                f"{path}, line {line} has {len(row)} columns, "
                f"but the first line names {len(columns)}."
            )
        if not row[label].strip():
            raise UserError(f"{path}, line {line}: the label is empty; every text needs one.")
        labels.append(row[label].strip())
        texts.append(row[text])
    return RawData(str(path), texts, *encode_labels(labels))


def read_ag_news_csv(paths: list[Path]) -> RawData:
    """Read the published files of AG News: class 1..4, title, description, without a header."""
    labels, texts = [], []
    for path in paths:
        for line, row in read_rows(path):
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise UserError(
                    f"{path}, line {line}: "
                    "a line of AG News is a class from 1 to 4, a title and a text."
                )
            labels.append(int(row[0]) - 1)
            texts.append(f"{row[1]} {row[2]}")
    return RawData(str(paths[0].parent), texts, np.array(labels, dtype=np.int64))


def read_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the fields of every row that is not blank."""
    try:
        with (
            open_file(path) as data,
            io.TextIOWrapper(data, newline="", encoding="utf-8-sig") as file,
        ):
            check_memory(os.fstat(data.fileno()).st_size, str(path))
            reader = csv.reader(file, strict=True)
            yield from ((reader.line_num, row) for row in reader if row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"{path} is not a readable .csv file in UTF-8 ({first_line(error)})."
        ) from None
