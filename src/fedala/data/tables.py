"""Tables with an image or text column and a label column, in parquet files and on the hub."""

import json
import os
import re
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedala.data.dataset import RawData, encode_labels
from fedala.data.images import MAX_IMAGE_BYTES, decode_images
from fedala.errors import UserError, first_line, import_optional
from fedala.io.untrusted import check_expansion, check_memory, open_file, read_file

_INPUTS = ("image", "img", "text", "sentence", "content")
_LABELS = ("label", "labels", "fine_label", "target", "class")
_PARTS = ("train", "validation", "valid", "val", "test")
_ROWS = 64  # read at a time
_OBJECT = 100  # bytes that a Python value takes at least


def read_hub(
    identifier: str,
    parts: Sequence[str] = _PARTS,
    advice: str = "check the id and the connection",
    resize: int | None = None,
) -> RawData:
    """Read a dataset from the hub and merge its parts in order. The library caches downloads."""
    datasets = import_optional(
        "datasets", "datasets", "hub", f"Loading {identifier} from the Hugging Face hub"
    )
    where = f"{identifier} on the Hugging Face hub"
    # The library takes other names for local folders or for file formats, pickles included.
    is_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", identifier, re.ASCII)
    if not is_hub_name or Path(identifier).exists():
        raise UserError(
            f"{identifier} does not name a dataset of the hub: it must be owner/name, "
            "and there must be no local folder of that name."
        )
    try:
        splits = datasets.load_dataset(identifier)
        tables = []
        for part in [part for part in parts if part in splits] or list(splits):
            table = splits[part].with_format("arrow")[:]
            tables.append(
                table.replace_schema_metadata(splits[part].features.arrow_schema.metadata)
            )
    except Exception as error:  # the connection, the id, the hub and the library can all fail
        raise UserError(f"{where} could not be loaded ({first_line(error)}); {advice}.") from None
    caches = (Path(datasets.config.HF_CACHE_HOME), Path(datasets.config.HF_DATASETS_CACHE))
    return _merge(tables, where, caches, resize=resize)


def read_parquet(folder: Path, parts: Sequence[str] = _PARTS) -> RawData | None:
    """Read `train….parquet`, `test….parquet`, as the hub stores them; None if there are none."""
    files: list[Path] = []
    for part in parts:
        files += sorted(folder.glob(f"{part}[-.]*parquet"))
    if not files:
        return None
    import_optional("pyarrow", "pyarrow", "hub", f"Reading {files[0]}")
    stored = sum(file.stat().st_size for file in files)
    return _merge([_read_table(file) for file in files], str(folder), stored=stored)


def read_parquet_columns(
    path: Path,
    choose: Callable[[Sequence[str]], list[str]],
    resize: int | None = None,
    *,
    has_input: bool = False,
) -> "tuple[torch.Tensor | list[str] | None, dict[str, list[Any]]]":
    """Read columns of a parquet file: `choose` gets the names of all, and returns those it wants.

    With `has_input`, also the image or text column, which is returned first. Labels that have names
    in the file are returned by name.
    """
    import_optional("pyarrow", "pyarrow", "hub", f"Reading {path}")

    def choose_all(names: Sequence[str]) -> list[str]:
        column = _first(_INPUTS, names)
        if has_input and column is None:
            raise UserError(f"{path} has no image or text column ({', '.join(_INPUTS)}).")
        return [*([column] if has_input and column else []), *choose(names)]

    table = _read_table(path, choose_all)
    stored = path.stat().st_size
    try:
        columns = {name: _values([table], name, str(path), stored) for name in table.column_names}
    except UserError:
        raise
    except Exception as error:  # two columns of one name, text that is not UTF-8, wrong dates, …
        raise UserError(f"{path}: its columns cannot be read ({first_line(error)}).") from None
    for name, values in columns.items():
        if names := _class_names(table, name):
            is_label = [isinstance(value, int) and 0 <= value < len(names) for value in values]
            columns[name] = [names[v] if ok else v for v, ok in zip(values, is_label, strict=True)]
    if not has_input:
        return None, columns
    inputs = columns.pop(table.column_names[0])
    if inputs and all(isinstance(value, str) for value in inputs):
        return inputs, columns
    images = [_image(value, f"{path}, image {i}", ()) for i, value in enumerate(inputs)]
    if not images:
        raise UserError(f"{path} is empty: there is no sample in it.")
    return decode_images(images, resize), columns


def _read_table(path: Path, choose: Callable[[Sequence[str]], list[str]] | None = None) -> Any:
    """Read the needed columns piece by piece: few bytes of parquet can hold very many values.

    These are an input and a label, or those that `choose` returns.
    """
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile

    try:
        with open_file(path) as data, ParquetFile(data) as file:
            check_memory(os.fstat(data.fileno()).st_size, str(path))
            schema = file.schema_arrow
            check_memory(file.metadata.num_rows * _OBJECT, str(path))
            columns = [_first(names, schema.names) for names in (_INPUTS, _LABELS)]
            if choose:
                columns = list(choose(schema.names))
            batches = []
            if all(columns):
                for batch in file.iter_batches(_ROWS, columns=columns, use_threads=False):
                    check_memory(batch.nbytes, str(path))
                    batches.append(batch)
            table = Table.from_batches(batches) if batches else schema.empty_table()
            return table.replace_schema_metadata(schema.metadata)
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise several kinds of errors
        raise UserError(f"{path} is not a readable parquet file ({first_line(error)}).") from None


def _first(wanted: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in wanted if name in names), None)


def _merge(
    tables: list[Any],
    where: str,
    caches: Sequence[Path] = (),
    stored: int | None = None,
    resize: int | None = None,
) -> RawData:
    """Merge tables into one dataset.

    If a table holds paths of images, only images in the folders `caches` are read. `stored` is the
    size of the files in bytes, if there are files.
    """
    columns = tables[0].column_names
    x, y = _first(_INPUTS, columns), _first(_LABELS, columns)
    if x is None or y is None or any({x, y} - set(table.column_names) for table in tables):
        raise UserError(
            f"{where} has the columns {', '.join(columns)}; "
            "it needs an image or text column and a label column."
        )
    try:
        inputs, labels = (_values(tables, name, where, stored) for name in (x, y))
    except UserError:
        raise
    except Exception as error:  # two columns of one name, text that is not UTF-8, wrong dates, …
        raise UserError(
            f"{where}: its columns {x} and {y} cannot be read ({first_line(error)})."
        ) from None
    if not inputs:
        raise UserError(f"{where} is empty; it needs samples of at least two classes.")
    numbers, names = _encode(labels, _class_names(tables[0], y), f"{where}, column {y}")
    if any(isinstance(value, str) for value in inputs):
        if not all(isinstance(value, str) for value in inputs):
            raise UserError(f"{where}, column {x}: some texts are missing; every label needs one.")
        return RawData(where, inputs, numbers, names)
    images = [_image(value, f"{where}, image {i}", caches) for i, value in enumerate(inputs)]
    return RawData(where, decode_images(images, resize), numbers, names)


def _values(tables: list[Any], name: str, where: str, stored: int | None) -> list[Any]:
    """Read a column as Python values, piece by piece: a table may store a repeated text once."""
    values: list[Any] = []
    size = 0
    advice = "if that is right, save it as a .csv or .npz file"
    pieces = [piece for table in tables for piece in table.column(name).chunks]
    for piece in pieces:
        for first in range(0, len(piece), _ROWS):
            new = piece.slice(first, _ROWS).to_pylist()
            contents = [_content(value) for value in new]
            size += sum(len(content) for content in contents if isinstance(content, str | bytes))
            check_memory(size, where)
            if stored is not None:
                check_expansion(size, stored, where, advice)
            values += new
    return values


def _content(value: Any) -> Any:
    """Return the bytes of an image, or a value of another type as it is."""
    return value.get("bytes") if isinstance(value, dict) else value


def _encode(
    labels: list[Any], names: tuple[str, ...], where: str
) -> "tuple[np.ndarray[Any, np.dtype[np.int64]], tuple[str, ...]]":
    if all(isinstance(label, str) for label in labels):
        return encode_labels(labels)
    if not all(isinstance(label, int) and abs(label) < 2**63 for label in labels):
        raise UserError(
            f"{where}: every label must be a whole number or a name; "
            "some are something else or missing."
        )
    return np.array(labels, dtype=np.int64), names


def _class_names(table: Any, column: str) -> tuple[str, ...]:
    """Return the class names in a table's metadata, as the hub keeps them; () if there are none."""
    try:
        metadata = json.loads((table.schema.metadata or {})[b"huggingface"])
        names = metadata["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    is_valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_valid else ()


def _image(value: Any, where: str, caches: Sequence[Path]) -> tuple[str, Any]:
    def data() -> BytesIO:
        content = _content(value)
        if content is None:
            # For an image folder, the library gives the path of the image in its cache.
            path = Path(value["path"]).resolve()
            if not any(path.is_relative_to(cache.resolve()) for cache in caches):
                raise UserError(
                    f"{where} is the path {path}, not an image; "
                    "a table cannot make this program read other files."
                )
            content = read_file(path, MAX_IMAGE_BYTES)
        return BytesIO(content)

    return where, data
