"""LEAF's JSON files: `users`, and for each user in `user_data` its samples `x` and labels `y`."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedala.data.columns import PART_WORDS
from fedala.data.dataset import RawData
from fedala.data.tabular import encode_targets
from fedala.errors import UserError, printable
from fedala.io.untrusted import check_memory, read_json, require_file

Array = np.ndarray[Any, Any]

_COST = 20  # bytes of memory, for each byte of a file, while it is read
_FEMNIST = 28 * 28


def find_leaf_files(path: Path) -> list[tuple[Path, int | None]]:
    """Return the JSON files of a folder, or of its folders train and test, each with its part.

    A folder with other folders in it is an image folder. A single JSON file is returned as it is.
    """
    if path.is_file():
        return [(path, None)] if path.suffix.lower() == ".json" else []
    files: list[tuple[Path, int | None]] = []
    for name in ("train", "test"):
        files += [(file, PART_WORDS[name]) for file in _list_files(path / name)]
    return files or [(file, None) for file in _list_files(path)]


def _list_files(folder: Path) -> list[Path]:
    has_folders = any(child.is_dir() for child in folder.glob("[!.]*"))
    return [] if has_folders else sorted(folder.glob("*.json"))


def read_leaf(files: list[tuple[Path, int | None]], where: str) -> RawData:
    """Read files in LEAF's layout, each with the part that it is, if there are parts."""
    samples, labels, owners, split = list[Array](), list[Any](), list[str](), list[int]()
    for path, part in files:
        for user, own, targets in _read_users(path):
            samples.append(own)
            labels += targets
            owners += [user] * len(targets)
            split += [part or 0] * len(targets)
    if len({x.shape[1:] for x in samples}) > 1:
        raise UserError(f"{where}: some samples have more numbers than others; all must agree.")
    if not labels:
        raise UserError(f"{where} is empty; it needs samples of at least two classes.")
    x = np.concatenate(samples)
    notes = [f"The files of {where} name {len(set(owners)):,} users, who are the clients."]
    if x.shape[1] == _FEMNIST:
        x = x.reshape(-1, 1, 28, 28)
        notes.append("Samples of 784 numbers are read as images of 28×28 pixels, as in FEMNIST.")
    y, names = encode_targets([str(label) for label in labels], f"{where}: y")
    return RawData(
        where,
        torch.from_numpy(x),
        y,
        names,
        clients=owners,
        split=np.array(split, dtype=np.uint8) if files[0][1] is not None else None,
        notes=tuple(notes),
    )


def _read_users(path: Path) -> list[tuple[str, Array, list[Any]]]:
    """Return each user with its samples, float32, and its labels."""
    size = require_file(path).stat().st_size
    check_memory(_COST * size, str(path))
    content = read_json(path, size)
    users = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(users, dict):
        raise UserError(
            f'{path} is not in LEAF\'s layout: it must hold "user_data", with x and y of each user.'
        )
    found = []
    for user, data in users.items():
        where = f"{path}, user {printable(user, 100)}"
        x, y = (data.get(key) if isinstance(data, dict) else None for key in ("x", "y"))
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y) or not user:
            raise UserError(f"{where} must have two lists of one length, x and y.")
        if not y:
            continue
        if not all(_is_label(label) for label in y):
            raise UserError(f"{where}: every label must be a number or a name.")
        found.append((user, _convert(x, where), y))
    return found


def _is_label(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (is_number and math.isfinite(value)) or (isinstance(value, str) and bool(value))


def _convert(x: list[Any], where: str) -> Array:
    rows = x if isinstance(x[0], list) else [[value] for value in x]
    is_sound = all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows)
    if not is_sound or not all(type(value) in (int, float) for row in rows for value in row):
        raise UserError(
            f"{where}: every sample must be a list of numbers, all of one length; "
            "write texts to a .csv file with the columns user, text and label."
        )
    with np.errstate(over="ignore"):  # `Dataset` refuses what float32 cannot hold
        return np.array(rows, dtype=np.float64).astype(np.float32)
