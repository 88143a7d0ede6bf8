"""Load a `Dataset` by a name or a path."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from fedala.data import arrays
from fedala.data.catalogue import KnownDataset, known_datasets
from fedala.data.dataset import Dataset, RawData, encode_labels
from fedala.data.images import read_image_folder, resize_images
from fedala.data.tables import read_hub, read_parquet
from fedala.data.text import encode_texts, read_ag_news_csv, read_labelled_csv
from fedala.errors import (
    UserError,
    first_line,
    import_optional,
    printable,
    spreadsheet_safe,
)
from fedala.options import suggest


def load(name: str, data_dir: Path | None = None, resize: int | None = None) -> Dataset:
    """Load a dataset by its name, a path (.npz, .csv, an image folder) or `hub:owner/name`.

    `known_datasets` lists the names. These datasets come from the hub, or from a copy in `data_dir`
    in one of the formats that they are published in. With `resize`, images get that many pixels
    each way.
    """
    known = next((row for row in known_datasets() if row.name == name), None)
    try:
        raw = _read_own(name, resize) if known is None else _read_known(known, data_dir)
        dataset = _build_dataset(name, raw, known)
        return dataset if resize is None else resize_images(dataset, resize)
    except MemoryError:
        raise UserError(f"{name} does not fit into the memory of this machine.") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error}).") from None


def load_more(name: str, class_names: Sequence[str], resize: int | None = None) -> Dataset:
    """Load further samples of a dataset whose classes are known; they may be of some of them."""
    try:
        raw = _read_own(name, resize)
        if not isinstance(raw.x, torch.Tensor):
            raise UserError(
                f"{name} holds texts, and their words need the numbers that the other texts of the "
                "run gave them: give a Federation of all texts in Python."
            )
        if raw.y.ndim == 1 and raw.y.dtype.kind != "f":
            y = match_classes(raw.y, raw.class_names, class_names, name)
            raw = raw._replace(y=y, class_names=tuple(class_names))
        dataset = _build_dataset(name, raw)
        return dataset if resize is None else resize_images(dataset, resize)
    except MemoryError:
        raise UserError(f"{name} does not fit into the memory of this machine.") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error}).") from None


def match_classes(
    y: "np.ndarray[Any, Any]", names: Sequence[str], known: Sequence[str], where: str
) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return labels as numbers of `known` classes, by the names of their own if they have any."""
    used = np.unique(y).tolist()
    number = {spreadsheet_safe(label): k for k, label in enumerate(known)}
    numbers = {label: label for label in used}
    if names:
        numbers = {label: number.get(spreadsheet_safe(names[label]), -1) for label in used}
    for label, k in numbers.items():
        if not 0 <= k < len(known):
            title = printable(names[label], 100) if names else label
            raise UserError(
                f"{where} holds the class {title}, which the run does not have; its classes are "
                f"{printable(', '.join(known[:20]), 500)}{', …' if len(known) > 20 else ''}."
            )
    table = np.zeros(max(used, default=0) + 1, dtype=np.int64)
    table[list(numbers)] = list(numbers.values())
    return np.asarray(table[y], dtype=np.int64)


def _read_known(known: KnownDataset, data_dir: Path | None) -> RawData:
    if known.name == "digits":
        return _read_digits()
    if data_dir is None:
        advice = f"if this machine has a copy of {known.name}, name its folder with --data-dir"
        return read_hub(known.hub, known.parts, advice)
    return _read_copy(known, Path(data_dir))


def _read_own(name: str, resize: int | None = None) -> RawData:
    """Read the user's own data: a file, a folder, or a dataset of the hub."""
    if name.startswith("hub:"):
        return read_hub(name.removeprefix("hub:"), resize=resize)
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f"There is no file or folder {name} ({first_line(error)}).") from None
    if path.is_dir():
        return read_image_folder(path, resize)
    suffix = path.suffix.lower()
    if not path.exists():
        if suffix in (".npz", ".csv") or len(path.parts) > 1:
            raise UserError(f"There is no file or folder {name}.")
        rest = suggest(name, (row.name for row in known_datasets()))
        raise UserError(
            f"There is no dataset {name}{rest}; "
            "for your own data, give the path of a .npz file, a .csv file or an image folder."
        )
    if suffix == ".npz":
        return arrays.read_npz(path)
    if suffix == ".csv":
        return read_labelled_csv(path)
    raise UserError(
        f"{name} is not a dataset; that is a .npz file, a .csv file or an image folder."
    )


def _read_digits() -> RawData:
    """Return scikit-learn's 8×8 digits, scaled up to 28×28, which the paper's CNN needs."""
    what = "The dataset digits"
    sklearn = import_optional("sklearn.datasets", "scikit-learn", "digits", what)
    digits = sklearn.load_digits()
    x = torch.from_numpy(digits.images).unsqueeze(1) * (255 / 16)
    x = interpolate(x, size=(28, 28), mode="bilinear", align_corners=False)
    return RawData("scikit-learn", x.round().to(torch.uint8), digits.target.astype(np.int64))


def _read_copy(known: KnownDataset, data_dir: Path) -> RawData:
    """Read a copy of a known dataset, in the first of its usual folders that has one."""
    if not data_dir.is_dir():
        raise UserError(f"The data directory {data_dir} is not a folder.")
    bases = (data_dir / known.name, data_dir)
    folders = [base / folder for base in bases for folder in (*known.folders, "data", "")]
    for folder in folders:
        raw = _read_folder(known, folder) if folder.is_dir() else None
        if raw is not None:
            return raw
    pickles = [base / pickle for base in bases for pickle in known.pickles]
    for file in pickles:
        if file.is_file():
            raise UserError(
                f"{file} is the Python version of {known.name}, a pickle, which is never loaded; "
                "get the binary version."
            )
    names = ", ".join((known.name, *known.folders))
    raise UserError(
        f"There is no copy of {known.name} in {data_dir} or its sub-folders {names}: "
        f"neither {known.name}.npz nor train*.parquet nor the files that it is published in."
    )


def _read_folder(known: KnownDataset, folder: Path) -> RawData | None:
    if (folder / f"{known.name}.npz").is_file():
        return arrays.read_npz(folder / f"{known.name}.npz")
    return _READERS[known.name](folder) or read_parquet(folder, known.parts)


def _read_tiny_imagenet(folder: Path) -> RawData | None:
    train = folder / "train"
    return read_image_folder(train) if any(train.glob("n*/images")) else None


def _read_ag_news(folder: Path) -> RawData | None:
    if (folder / "ag_news.csv").is_file():
        return read_labelled_csv(folder / "ag_news.csv")
    if (folder / "train.csv").is_file():
        return read_ag_news_csv([folder / "train.csv", arrays.require_part(folder / "test.csv")])
    return None


#: Readers of the files that each dataset is published in.
_READERS: dict[str, Callable[[Path], RawData | None]] = {
    "mnist": arrays.read_mnist,
    "fashion-mnist": arrays.read_mnist,
    "cifar10": arrays.read_cifar10,
    "cifar100": arrays.read_cifar100,
    "tiny-imagenet": _read_tiny_imagenet,
    "ag_news": _read_ag_news,
}


def _build_dataset(name: str, raw: RawData, known: KnownDataset | None = None) -> Dataset:
    """Build a dataset; if it is a known one, check its classes and the shape of its samples."""
    tokens: tuple[str, ...] = ()
    if isinstance(raw.x, torch.Tensor):
        x, vocabulary = raw.x, None
    else:
        x, tokens = encode_texts(raw.x)
        vocabulary = len(tokens) + 1
    names, note = raw.class_names, ""
    if known is None:
        classes = len(names) or _count_targets(name, raw.y)
    else:
        classes = known.classes
        if names and len(names) != classes:
            raise UserError(
                f"{raw.where} holds {len(names)} classes, but {name} has {classes}; "
                "is it another dataset?"
            )
        if tuple(x.shape[1:]) != known.shape:
            raise UserError(
                f"{raw.where} holds samples of shape {_format_shape(x.shape[1:])}, "
                f"but those of {name} are {_format_shape(known.shape)}; is it another dataset?"
            )
        if all(label.isdigit() for label in names):
            names = known.class_names
        if len(x) < known.samples:
            note = f"partial: {len(x)} of {known.samples} samples"
        elif len(x) > known.samples:
            note = f"{len(x)} samples"
    names = tuple(printable(label, 100) for label in names)
    clients, client_names = _number_clients(raw.clients)
    # The paper pools the parts of the datasets that it uses.
    split = None if known or raw.split is None else torch.from_numpy(raw.split)
    return Dataset(
        name,
        x,
        torch.from_numpy(raw.y),
        classes,
        names,
        vocabulary,
        note,
        clients,
        client_names,
        split,
        raw.feature_names,
        tokens,
    )


def _number_clients(owners: Sequence[str] | None) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    """Number the clients in the order of their names."""
    if owners is None:
        return None, ()
    numbers, names = encode_labels(list(owners))
    return torch.from_numpy(numbers), tuple(printable(name, 100) for name in names)


def _count_targets(name: str, y: "np.ndarray[Any, Any]") -> int:
    """Count the classes by their labels. None may be missing: a typo would become a class.

    If the targets are not classes, count those of a sample.
    """
    if y.ndim == 2 or y.dtype.kind == "f":
        return y.shape[1] if y.ndim == 2 else 1
    values = np.unique(y)
    if len(values) and (values[0] < 0 or values[-1] != len(values) - 1):
        raise UserError(
            f"{name} holds {len(values)} different labels from {values[0]} to {values[-1]}; "
            f"labels must be 0 to {len(values) - 1}, without gaps."
        )
    return len(values)


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
