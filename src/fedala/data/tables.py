"""Tables in parquet files and on the hub: an image or text column, or features, and a label."""

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedala.data.columns import (
    PART_WORDS,
    USUAL,
    Roles,
    Wanted,
    assign_roles,
    describe_clients,
    find,
    parse_parts,
)
from fedala.data.dataset import RawData, encode_labels
from fedala.data.images import decode_images
from fedala.data.known_columns import encode_columns, make_readers
from fedala.data.tabular import ColumnReader, describe_classes, encode_targets, to_words
from fedala.errors import UserError, first_line, import_optional
from fedala.io.image_files import ImageSource
from fedala.io.untrusted import check_expansion, check_memory, open_file
from fedala.options import name_option

_INPUTS = ("image", "img", "text", "sentence", "content")
_LABELS = ("label", "labels", "fine_label", "target", "class", "y")
_PARTS = ("train", "validation", "valid", "val", "test")
_ROWS = 64  # read at a time
_TABLE_ROWS = 2**14  # of numbers, read at a time
_OBJECT = 100  # bytes that a Python value takes at least


Choose = Callable[[Sequence[str]], tuple[list[str], int]]
"""From the names of a table's columns to those that are read, and how many rows at a time."""


def read_hub(
    identifier: str,
    parts: Sequence[str] = _PARTS,
    advice: str = "check the id and the connection",
    resize: int | None = None,
    wanted: Wanted = USUAL,
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
        chosen = [part for part in parts if part in splits] or list(splits)
        for part in chosen:
            table = splits[part].with_format("arrow")[:]
            tables.append(
                table.replace_schema_metadata(splits[part].features.arrow_schema.metadata)
            )
    except Exception as error:  # the connection, the id, the hub and the library can all fail
        raise UserError(f"{where} could not be loaded ({first_line(error)}); {advice}.") from None
    caches = (Path(datasets.config.HF_CACHE_HOME), Path(datasets.config.HF_DATASETS_CACHE))
    return _merge(tables, where, wanted, chosen, caches, resize=resize)


def read_parquet(
    folder: Path,
    parts: Sequence[str] = _PARTS,
    wanted: Wanted = USUAL,
    resize: int | None = None,
) -> RawData | None:
    """Read `train….parquet`, `test….parquet`, as the hub stores them; None if there are none."""
    files, names = list[Path](), list[str]()
    for part in parts:
        found = sorted(folder.glob(f"{part}[-.]*parquet"))
        files += found
        names += [part] * len(found)
    return _read_files(files, names, str(folder), wanted, resize) if files else None


def read_own_parquet(path: Path, wanted: Wanted, resize: int | None = None) -> RawData | None:
    """Read a parquet file, or a folder of them; None if there are none.

    The files of a folder, or of its sub-folder `data`, are `train….parquet` and so on. If none is
    called so, all are read as one table. A folder with other folders in it is an image folder.
    """
    if path.is_file():
        return _read_files([path], [""], str(path), wanted, resize)
    if {child.name for child in path.glob("[!.]*") if child.is_dir()} - {"data"}:
        return None
    for folder in (path, path / "data"):
        raw = read_parquet(folder, _PARTS, wanted, resize)
        files = sorted(folder.glob("*.parquet"))
        if raw or files:
            return raw or _read_files(files, [""] * len(files), str(folder), wanted, resize)
    return None


def _read_files(
    files: list[Path], parts: list[str], where: str, wanted: Wanted, resize: int | None
) -> RawData:
    import_optional("pyarrow", "pyarrow", "hub", f"Reading {files[0]}")
    stored = sum(file.stat().st_size for file in files)
    tables = [_read_table(file, _choose_by_role(wanted, str(file))) for file in files]
    return _merge(tables, where, wanted, parts, stored=stored, resize=resize)


def _assign_roles(names: Sequence[str], wanted: Wanted, where: str) -> Roles:
    return assign_roles(names, wanted, where, _INPUTS, _LABELS)


def _choose_by_role(wanted: Wanted, where: str) -> Choose:
    """Return a function that chooses the columns of a dataset; none without a label."""

    def choose(names: Sequence[str]) -> tuple[list[str], int]:
        roles = _assign_roles(names, wanted, where)
        return roles.used() if roles.label else [], _ROWS if roles.input else _TABLE_ROWS

    return choose


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

    def choose_all(names: Sequence[str]) -> tuple[list[str], int]:
        column = find(_INPUTS, names)
        if has_input and column is None:
            raise UserError(f"{path} has no image or text column ({', '.join(_INPUTS)}).")
        return [*([column] if has_input and column else []), *choose(names)], _ROWS

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
    images = [_find_image(value, f"{path}, image {i}", ()) for i, value in enumerate(inputs)]
    if not images:
        raise UserError(f"{path} is empty: there is no sample in it.")
    return decode_images(images, str(path), resize)[0], columns


def _read_table(path: Path, choose: Choose) -> Any:
    """Read the chosen columns piece by piece: few bytes of parquet can hold very many values."""
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile

    try:
        with open_file(path) as data, ParquetFile(data) as file:
            check_memory(os.fstat(data.fileno()).st_size, str(path))
            schema = file.schema_arrow
            check_memory(file.metadata.num_rows * _OBJECT, str(path))
            columns, rows = choose(schema.names)
            batches = []
            if columns:
                for batch in file.iter_batches(rows, columns=columns, use_threads=False):
                    check_memory(batch.nbytes, str(path))
                    batches.append(batch)
            table = Table.from_batches(batches) if batches else schema.empty_table()
            return table.replace_schema_metadata(schema.metadata)
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise several kinds of errors
        raise UserError(f"{path} is not a readable parquet file ({first_line(error)}).") from None


def _merge(
    tables: list[Any],
    where: str,
    wanted: Wanted,
    parts: Sequence[str],
    caches: Sequence[Path] = (),
    stored: int | None = None,
    resize: int | None = None,
) -> RawData:
    """Merge tables into one dataset. `parts` are the words for the part that each table is.

    If a table holds paths of images, only images in the folders `caches` are read. `stored` is the
    size of the files in bytes, if there are files.
    """
    columns = tables[0].column_names
    roles = _assign_roles(columns, wanted, where)
    if roles.label is None or any(set(roles.used()) - set(t.column_names) for t in tables):
        raise UserError(
            f"{where} has the columns {', '.join(columns)[:500]}; it needs a label column, "
            "and an image column, a text column or columns of numbers, the same in all its parts."
        )
    read = [name for name in (roles.input, roles.label, roles.clients, roles.split) if name]
    try:
        content = {name: _values(tables, name, where, stored) for name in read}
        readers = []
        if not roles.input:
            readers = make_readers(roles.features, where, "row", wanted.features)
            _read_features(tables, readers, where, stored)
    except UserError:
        raise
    except Exception as error:  # two columns of one name, text that is not UTF-8, wrong dates, …
        raise UserError(
            f"{where}: its columns {' and '.join(read)} cannot be read ({first_line(error)})."
        ) from None
    labels = content[roles.label]
    if not labels:
        raise UserError(f"{where} is empty; it needs samples of at least two classes.")
    names = _class_names(tables[0], roles.label)
    about = f"{where}, column {roles.label}"
    raw = RawData(where, [], np.zeros(0))
    if roles.clients:
        owners = to_words(content[roles.clients], f"{where}, column {roles.clients}")
        raw = raw._replace(clients=owners, notes=(describe_clients(roles.clients, owners),))
    raw = raw._replace(split=_find_split(tables, parts, roles, content, where))
    if not roles.input:
        x, feature_names, notes = encode_columns(readers, where, wanted.features)
        raw = raw._replace(x=torch.from_numpy(x), feature_names=feature_names)
        raw = raw._replace(notes=(*raw.notes, *notes))
        targets = None
        if not names:
            words = to_words(labels, about)
            targets = encode_targets(words, about, is_regression=wanted.is_regression)
            notes = describe_classes(roles.label, targets[1])
            raw = raw._replace(notes=(*raw.notes, *notes))
    else:
        inputs, notes = _read_inputs(content, roles, where, caches, resize)
        raw, targets = raw._replace(x=inputs, notes=(*raw.notes, *notes)), None
    y, class_names = targets or _encode(labels, names, about, is_regression=wanted.is_regression)
    return raw._replace(y=y, class_names=class_names)


def _find_split(
    tables: list[Any], parts: Sequence[str], roles: Roles, content: dict[str, Any], where: str
) -> "np.ndarray[Any, Any] | None":
    """Return the part of each sample, by the name of its table, or by a column."""
    numbers = [PART_WORDS.get(part) for part in parts]
    if all(number is not None for number in numbers):
        sizes = [table.num_rows for table in tables]
        return np.repeat(np.array(numbers, dtype=np.uint8), sizes)
    if roles.split:
        about = f"{where}, column {roles.split}"
        return parse_parts(to_words(content[roles.split], about), about)
    return None


def _read_inputs(
    content: dict[str, Any], roles: Roles, where: str, caches: Sequence[Path], resize: int | None
) -> tuple[Any, tuple[str, ...]]:
    """Return texts as they are, or the pixels of images, and sentences about these."""
    inputs = content[str(roles.input)]
    if any(isinstance(value, str) for value in inputs):
        if not all(isinstance(value, str) for value in inputs):
            raise UserError(
                f"{where}, column {roles.input}: some texts are missing; every label needs one."
            )
        return inputs, ()
    images = [_find_image(value, f"{where}, image {i}", caches) for i, value in enumerate(inputs)]
    return decode_images(images, where, resize)


def _read_features(
    tables: list[Any], readers: Sequence[ColumnReader], where: str, stored: int | None
) -> None:
    """Read columns of numbers, and of a few words."""
    from pyarrow import types

    check_memory(8 * len(readers) * sum(table.num_rows for table in tables), where)
    for column in readers:
        name = column.name
        kinds = [table.schema.field(name).type for table in tables]
        if all(types.is_integer(k) or types.is_floating(k) or types.is_boolean(k) for k in kinds):
            column.add_numbers(_read_numbers(tables, name))
            continue
        for row, value in enumerate(_values(tables, name, where, stored)):
            if not isinstance(value, str | bool | int | float | None):
                advice = f": leave it out with {name_option('drop_columns', name)}"
                advice *= column.may_be_dropped
                raise UserError(
                    f"{where}: the column {name} holds {kinds[0]}; a feature must be numbers or a "
                    f"few different words{advice}."
                )
            column.add("" if value is None else str(value), row)


def _read_numbers(tables: list[Any], name: str) -> "np.ndarray[Any, Any]":
    """Return a column of numbers; NaN: missing."""
    pieces = [piece for table in tables for piece in table.column(name).chunks]
    arrays = [
        np.asarray(piece.to_numpy(zero_copy_only=False), dtype=np.float64) for piece in pieces
    ]
    return np.concatenate(arrays) if arrays else np.zeros(0)


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
    labels: list[Any], names: tuple[str, ...], where: str, *, is_regression: bool
) -> "tuple[np.ndarray[Any, Any], tuple[str, ...]]":
    if all(isinstance(label, str) for label in labels):
        return encode_labels(labels)
    if not names and (is_regression or any(isinstance(label, float) for label in labels)):
        return encode_targets(to_words(labels, where), where, is_regression=is_regression)
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


def _find_image(value: Any, where: str, caches: Sequence[Path]) -> ImageSource:
    content = _content(value)
    if isinstance(content, bytes):
        return ImageSource(where, None, content)
    try:
        # For an image folder, the library gives the path of the image in its cache.
        path = Path(value["path"]).resolve()
    except (TypeError, KeyError, ValueError, OSError, RuntimeError) as error:
        raise UserError(f"{where} is not a readable image ({type(error).__name__}).") from None
    if not any(path.is_relative_to(cache.resolve()) for cache in caches):
        raise UserError(
            f"{where} is the path {path}, not an image; "
            "a table cannot make this program read other files."
        )
    return ImageSource(where, path)
