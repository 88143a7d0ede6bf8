"""Tables of an image or text column and a label column: parquet files on disk, and the Hugging Face hub."""

import json
import os
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedala.data.dataset import Raw, encode, first_line, need
from fedala.data.images import LARGEST, decode
from fedala.errors import UserError
from fedala.io.untrusted import check_expansion, check_memory, open_file, read_file

_INPUTS = ("image", "img", "text", "sentence", "content")
_LABELS = ("label", "labels", "fine_label", "target", "class")
_PARTS = ("train", "validation", "valid", "val", "test")
_ROWS = 64  # at a time
_OBJECT = 100  # bytes that a value takes in Python, at the least


def hub(
    identifier: str, parts: Sequence[str] = _PARTS, advice: str = "check the id and the connection"
) -> Raw:
    """A dataset of the hub, its parts merged in the order given. The library caches what it has downloaded."""
    datasets = need(
        "datasets", "datasets", "hub", f"Loading {identifier} from the Hugging Face hub"
    )
    where = f"{identifier} on the Hugging Face hub"
    # The library takes other names for folders here, or for file formats that it should read, pickles among them.
    if (
        not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", identifier, re.ASCII)
        or Path(identifier).exists()
    ):
        raise UserError(
            f"A dataset of the hub is written as owner/name, and is no folder here, unlike {identifier}."
        )
    try:
        splits = datasets.load_dataset(identifier)
        tables = []
        for part in [part for part in parts if part in splits] or list(splits):
            table = splits[part].with_format("arrow")[:]
            tables.append(
                table.replace_schema_metadata(splits[part].features.arrow_schema.metadata)
            )
    except (
        Exception
    ) as error:  # the connection, the id, the hub's or the library's own errors: all mean "no data"
        raise UserError(f"{where} could not be loaded ({first_line(error)}); {advice}.") from None
    return _merge(
        tables,
        where,
        (Path(datasets.config.HF_CACHE_HOME), Path(datasets.config.HF_DATASETS_CACHE)),
    )


def parquet(folder: Path, parts: Sequence[str] = _PARTS) -> Raw | None:
    """A folder of `train….parquet`, `test….parquet`, as the hub stores datasets, or None where there are none."""
    files = [file for part in parts for file in sorted(folder.glob(f"{part}[-.]*parquet"))]
    if not files:
        return None
    need("pyarrow", "pyarrow", "hub", f"Reading {files[0]}")
    return _merge(
        [_table(file) for file in files],
        str(folder),
        stored=sum(file.stat().st_size for file in files),
    )


def _table(path: Path) -> Any:
    """The columns that are needed, piece by piece: a few bytes of a parquet file can stand for any number of values."""
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile

    try:
        with open_file(path) as data, ParquetFile(data) as file:
            check_memory(os.fstat(data.fileno()).st_size, str(path))
            schema = file.schema_arrow
            check_memory(file.metadata.num_rows * _OBJECT, str(path))
            columns = [_first(names, schema.names) for names in (_INPUTS, _LABELS)]
            batches = []
            for batch in (
                file.iter_batches(_ROWS, columns=columns, use_threads=False) if all(columns) else ()
            ):
                check_memory(batch.nbytes, str(path))
                batches.append(batch)
            table = Table.from_batches(batches) if batches else schema.empty_table()
            return table.replace_schema_metadata(schema.metadata)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # pyarrow's errors are of several kinds; a damaged file can end in any
        raise UserError(f"{path} is not a readable parquet file ({first_line(error)}).") from None


def _first(wanted: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _merge(
    tables: list[Any], where: str, caches: Sequence[Path] = (), stored: int | None = None
) -> Raw:
    """`caches`: the only folders that images may be read from where a table holds their paths. `stored`: bytes of the
    files, where there are some."""
    columns = tables[0].column_names
    x, y = _first(_INPUTS, columns), _first(_LABELS, columns)
    if x is None or y is None or any({x, y} - set(table.column_names) for table in tables):
        raise UserError(
            f"{where} has the columns {', '.join(columns)}; it needs an image or text column and a label column."
        )
    try:
        inputs, labels = (_values(tables, name, where, stored) for name in (x, y))
    except UserError:
        raise
    except Exception as error:  # a column that is there twice, text that is not UTF-8, times beyond the calendar, …
        raise UserError(
            f"{where}: its columns {x} and {y} cannot be read ({first_line(error)})."
        ) from None
    if not inputs:
        raise UserError(f"{where} is empty; it needs samples of at least two classes.")
    numbers, names = _numbers(labels, _class_names(tables[0], y), f"{where}, column {y}")
    if any(isinstance(value, str) for value in inputs):
        if not all(isinstance(value, str) for value in inputs):
            raise UserError(f"{where}, column {x}: some texts are missing; every label needs one.")
        return Raw(where, inputs, numbers, names)
    images = [_image(value, f"{where}, image {i}", caches) for i, value in enumerate(inputs)]
    return Raw(where, decode(images), numbers, names)


def _values(tables: list[Any], name: str, where: str, stored: int | None) -> list[Any]:
    """A column as Python's values, piece by piece: one text can stand there a million times and be kept once until here."""
    values: list[Any] = []
    held = 0
    for piece in (piece for table in tables for piece in table.column(name).chunks):
        for first in range(0, len(piece), _ROWS):
            new = piece.slice(first, _ROWS).to_pylist()
            held += sum(
                len(content) for value in new if isinstance(content := _content(value), str | bytes)
            )
            check_memory(held, where)
            if stored is not None:
                check_expansion(
                    held, stored, where, "if that is right, save it as a .csv or .npz file"
                )
            values += new
    return values


def _content(value: Any) -> Any:
    return value.get("bytes") if isinstance(value, dict) else value


def _numbers(
    labels: list[Any], names: tuple[str, ...], where: str
) -> "tuple[np.ndarray[Any, np.dtype[np.int64]], tuple[str, ...]]":
    if all(isinstance(label, str) for label in labels):
        return encode(labels)
    if not all(isinstance(label, int) and abs(label) < 2**63 for label in labels):
        raise UserError(
            f"{where}: every label must be a whole number or a name, and some are neither or missing."
        )
    return np.array(labels, dtype=np.int64), names


def _class_names(table: Any, column: str) -> tuple[str, ...]:
    """The names that the hub keeps in a table's metadata; without them, labels are just numbers."""
    try:
        metadata = json.loads((table.schema.metadata or {})[b"huggingface"])
        names = metadata["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    return (
        tuple(names)
        if isinstance(names, list) and all(isinstance(name, str) for name in names)
        else ()
    )


def _image(value: Any, where: str, caches: Sequence[Path]) -> tuple[str, Any]:
    def data() -> BytesIO:
        content = _content(value)
        if content is None:
            # The library leaves the bytes of an image folder in its cache and gives the path instead.
            path = Path(value["path"]).resolve()
            if not any(path.is_relative_to(cache.resolve()) for cache in caches):
                raise UserError(
                    f"{where} is a path, {path}, and not an image; no table decides which files are read."
                )
            content = read_file(path, LARGEST)
        return BytesIO(content)

    return where, data
