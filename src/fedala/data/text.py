"""Texts: tokens, vocabulary, and the comma-separated files they come in."""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from fedala.data.catalogue import LENGTH
from fedala.data.dataset import Raw, encode, first_line
from fedala.errors import UserError
from fedala.io.untrusted import check_memory, open_file

# torchtext's `basic_english`, which the paper's vocabulary was made with: punctuation stands alone, or is dropped.
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


def tokens(text: str) -> list[str]:
    """The lower-cased basic-English tokens of a text."""
    return text.lower().translate(_BASIC_ENGLISH).replace("<br />", " ").split()


def vocabulary(texts: list[list[str]]) -> dict[str, int]:
    """Token → index from 1 (0 is unknown and padding), the most frequent first, then by the alphabet."""
    count = Counter(chain.from_iterable(texts))
    return {
        token: i
        for i, token in enumerate(sorted(count, key=lambda token: (-count[token], token)), start=1)
    }


def token_ids(texts: list[str]) -> tuple[torch.Tensor, int]:
    """Texts as int32 N×200, cut or padded with 0, and the number of rows that an embedding of them needs."""
    split = [tokens(text) for text in texts]
    index = vocabulary(split)
    ids = np.zeros((len(split), LENGTH), dtype=np.int32)
    for row, words in zip(ids, split, strict=True):
        words = words[:LENGTH]
        row[: len(words)] = [index[word] for word in words]
    return torch.from_numpy(ids), len(index) + 1


def labelled_csv(path: Path) -> Raw:
    """A file whose first line names its columns, one of them `label` (or `class`), one of them `text`."""
    rows = _rows(path)
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
                f"{path}, line {line}: {len(row)} columns, where the first line names {len(columns)}."
            )
        if not row[label].strip():
            raise UserError(f"{path}, line {line}: the label is empty; every text needs one.")
        labels.append(row[label].strip())
        texts.append(row[text])
    return Raw(str(path), texts, *encode(labels))


def ag_news_csv(paths: list[Path]) -> Raw:
    """The published files of AG News: class 1..4, title, description, and no line that names them."""
    labels, texts = [], []
    for path in paths:
        for line, row in _rows(path):
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise UserError(
                    f"{path}, line {line}: a line of AG News is a class from 1 to 4, a title and a text."
                )
            labels.append(int(row[0]) - 1)
            texts.append(f"{row[1]} {row[2]}")
    return Raw(str(paths[0].parent), texts, np.array(labels, dtype=np.int64))


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The line number and the fields of every row that is not blank."""
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
