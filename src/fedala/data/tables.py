"""Tables of an image or text column and a label column: parquet files on disk, and the Hugging Face hub."""

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedala.data.dataset import Raw, encode, first_line, need
from fedala.data.images import decode
from fedala.errors import UserError

_INPUTS = ("image", "img", "text", "sentence", "content")
_LABELS = ("label", "labels", "fine_label", "target", "class")
_PARTS = ("train", "validation", "valid", "val", "test")


def hub(identifier: str, parts: Sequence[str] = _PARTS, advice: str = "check the id and the connection") -> Raw:
    """A dataset of the hub, its parts merged in the order given. The library caches what it has downloaded."""
    datasets = need("datasets", "datasets", "hub", f"Loading {identifier} from the Hugging Face hub")
    where = f"{identifier} on the Hugging Face hub"
    try:
        splits = datasets.load_dataset(identifier)
    except Exception as error:  # the connection, the id, the hub's or the library's own errors: all mean "no data"
        raise UserError(f"{where} could not be loaded ({first_line(error)}); {advice}.") from None
    tables = []
    for part in [part for part in parts if part in splits] or list(splits):
        table = splits[part].with_format("arrow")[:]
        tables.append(table.replace_schema_metadata(splits[part].features.arrow_schema.metadata))
    return _merge(tables, where)


def parquet(folder: Path, parts: Sequence[str] = _PARTS) -> Raw | None:
    """A folder of `train….parquet`, `test….parquet`, as the hub stores datasets, or None where there are none."""
    files = [file for part in parts for file in sorted(folder.glob(f"{part}[-.]*parquet"))]
    if not files:
        return None
    reader = need("pyarrow.parquet", "pyarrow", "hub", f"Reading {files[0]}")
    tables = []
    for file in files:
        try:
            tables.append(reader.ParquetFile(file).read())
        except Exception as error:  # pyarrow's errors are of several kinds; a damaged file can end in any
            raise UserError(f"{file} is not a readable parquet file ({first_line(error)}).") from None
    return _merge(tables, str(folder))


def _merge(tables: list[Any], where: str) -> Raw:
    columns = tables[0].column_names
    x, y = (next((name for name in names if name in columns), None) for names in (_INPUTS, _LABELS))
    if x is None or y is None or any(not {x, y} <= set(table.column_names) for table in tables):
        raise UserError(
            f"{where} has the columns {', '.join(columns)}; it needs an image or text column and a label column."
        )
    inputs = [value for table in tables for value in table.column(x).to_pylist()]
    labels = [value for table in tables for value in table.column(y).to_pylist()]
    if not inputs:
        raise UserError(f"{where} is empty; it needs samples of at least two classes.")
    numbers, names = _numbers(labels, _class_names(tables[0], y), f"{where}, column {y}")
    if any(isinstance(value, str) for value in inputs):
        if not all(isinstance(value, str) for value in inputs):
            raise UserError(f"{where}, column {x}: some texts are missing; every label needs one.")
        return Raw(where, inputs, numbers, names)
    return Raw(where, decode([_image(value, f"{where}, image {i}") for i, value in enumerate(inputs)]), numbers, names)


def _numbers(
    labels: list[Any], names: tuple[str, ...], where: str
) -> "tuple[np.ndarray[Any, np.dtype[np.int64]], tuple[str, ...]]":
    if all(isinstance(label, str) for label in labels):
        return encode(labels)
    if not all(isinstance(label, int) and abs(label) < 2**63 for label in labels):
        raise UserError(f"{where}: every label must be a whole number or a name, and some are neither or missing.")
    return np.array(labels, dtype=np.int64), names


def _class_names(table: Any, column: str) -> tuple[str, ...]:
    """The names that the hub keeps in a table's metadata; without them, labels are just numbers."""
    try:
        metadata = json.loads((table.schema.metadata or {})[b"huggingface"])
        return tuple(str(name) for name in metadata["info"]["features"][column]["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def _image(value: Any, where: str) -> tuple[str, Any]:
    def read() -> BytesIO:
        data = value["bytes"] if isinstance(value, dict) else value
        # The library leaves the bytes of an image folder in its cache and gives the path instead.
        return BytesIO(Path(value["path"]).read_bytes() if data is None else data)

    return where, read
