"""Load a `Dataset` by a name or a path."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from fedala.data import natural_sets, published
from fedala.data.arrays import read_npz
from fedala.data.catalogue import KnownDataset, find_known, known_datasets
from fedala.data.columns import USUAL, MissingColumn, Wanted
from fedala.data.csv_files import read_ag_news_csv, read_csv
from fedala.data.dataset import PARTS, Dataset, RawData, encode_labels
from fedala.data.images import read_image_folder, resize_images
from fedala.data.leaf import find_leaf_files, read_leaf
from fedala.data.matching import match_classes, name_numbers, order_features
from fedala.data.tables import read_hub, read_own_parquet, read_parquet
from fedala.data.text import build_tokens, encode_texts
from fedala.errors import (
    UserError,
    first_line,
    import_optional,
    printable,
)
from fedala.options import name_option, split_names, suggest


def load(
    name: str,
    data_dir: Path | None = None,
    resize: int | None = None,
    clients_by: str | None = None,
    label_column: str | None = None,
    drop_columns: str | Sequence[str] | None = None,
    *,
    is_regression: bool = False,
) -> Dataset:
    """Load a dataset by its name, a path, or `hub:owner/name`.

    A path is that of a .npz, .csv, .parquet or .json file, of an image folder or a folder of tables
    (.parquet, .json). `known_datasets` lists the names. These datasets come from the hub, or from a
    copy in `data_dir` in one of the formats that they are published in. With `resize`, images get
    that many pixels each way. `clients_by` is the column, or level of folders, that names a
    sample's client, and `label_column` is the column of the labels, if they do not have the usual
    names. The columns `drop_columns` of a table (a list, or a text with commas between the names)
    are left out. With `is_regression`, labels of a table that are whole numbers are numbers to
    predict, not classes. `notes` of the result say what was found.
    """
    if resize is not None and resize < 1:
        raise UserError(f"resize must be at least 1, not {resize}.")
    known = find_known(name)
    wanted = Wanted(clients_by, label_column, split_names(drop_columns), is_regression)
    if known is not None and wanted.has_names:
        raise UserError(
            f"{name} is known by its name, and so are its columns: clients_by, label_column and "
            "drop_columns are for your own data."
        )
    try:
        raw = _read_own(name, wanted, resize) if known is None else _read_known(known, data_dir)
        dataset = build_dataset(name, raw, known, uses_cache=True)
        return dataset if resize is None else resize_images(dataset, resize)
    except MemoryError:
        raise UserError(f"{name} does not fit into the memory of this machine.") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error}).") from None


def load_more(
    name: str,
    class_names: Sequence[str],
    resize: int | None = None,
    wanted: Wanted = USUAL,
    *,
    tokens: Sequence[str] = (),
    length: int | None = None,
    feature_names: Sequence[str] = (),
) -> Dataset:
    """Load further samples of a dataset whose classes, words, length and columns are known."""
    try:
        raw = _read_more(name, wanted, resize)
        dataset = build_more(
            name, raw, class_names, tokens=tokens, length=length, feature_names=feature_names
        )
        return dataset if resize is None else resize_images(dataset, resize)
    except MemoryError:
        raise UserError(f"{name} does not fit into the memory of this machine.") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error}).") from None


def _read_more(name: str, wanted: Wanted, resize: int | None) -> RawData:
    """Read samples whose columns have the names that they had in a run.

    Without the column of the clients, they are those of one client.
    """
    is_table = name.startswith("hub:") or Path(name).suffix.lower() not in (".npz", ".json")
    wanted = wanted if is_table else wanted._replace(label=None)
    try:
        return _read_own(name, wanted, resize)
    except MissingColumn as error:
        if error.option == "clients_by":
            return _read_more(name, wanted._replace(clients=None), resize)
        raise UserError(
            f"{name} has no column {wanted.label}, which holds the labels in the run "
            "(label_column of its config): give the column this name."
        ) from None


def build_more(
    name: str,
    raw: RawData,
    class_names: Sequence[str],
    *,
    tokens: Sequence[str] = (),
    length: int | None = None,
    feature_names: Sequence[str] = (),
) -> Dataset:
    """Build a dataset of further samples, with the classes, words and columns of a run."""
    if not isinstance(raw.x, torch.Tensor):
        if not tokens:
            raise UserError(f"{name} holds texts, and those of the run are not.")
    elif tokens and raw.x.dtype != torch.int32:
        raise UserError(f"{name} holds numbers, and the samples of the run are texts.")
    elif feature_names:
        ordered = order_features(raw.x, raw.feature_names, feature_names)
        raw = raw._replace(x=ordered, feature_names=tuple(feature_names))
    if raw.y.ndim == 1 and raw.y.dtype.kind != "f":
        y, own = name_numbers(raw.y, raw.class_names, class_names)
        y = match_classes(y, own, class_names, name)
        raw = raw._replace(y=y, class_names=tuple(class_names))
    return build_dataset(name, raw, tokens=tuple(tokens), length=length)


def _read_known(known: KnownDataset, data_dir: Path | None) -> RawData:
    if known.name == "digits":
        return _read_digits()
    if known.images_of:
        images = next(row for row in known_datasets() if row.name == known.images_of)
        return natural_sets.add_writers(_read_known(images, data_dir))
    if data_dir is None and not known.hub:
        raise UserError(
            f"{known.name} is read from the files that it is published in: get them, and name "
            f"their folder with {name_option('data_dir')}."
        )
    if data_dir is None:
        named = f"name its folder with {name_option('data_dir')}"
        advice = f"if this machine has a copy of {known.name}, {named}"
        return read_hub(known.hub, known.parts, advice)
    return _read_copy(known, Path(data_dir))


def _read_own(name: str, wanted: Wanted, resize: int | None = None) -> RawData:
    """Read the user's own data: a file, a folder, or a dataset of the hub."""
    if name.startswith("hub:"):
        return read_hub(name.removeprefix("hub:"), resize=resize, wanted=wanted)
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f"There is no file or folder {name} ({first_line(error)}).") from None
    suffix = path.suffix.lower()
    if not path.exists():
        if suffix in (".npz", ".csv", ".parquet", ".json") or len(path.parts) > 1:
            raise UserError(f"There is no file or folder {name}.")
        rest = suggest(name, (row.name for row in known_datasets()))
        raise UserError(
            f"There is no dataset {name}{rest}; for your own data, "
            "give the path of a .npz, .csv, .parquet or .json file or of an image folder."
        )
    return _read_path(path, name, wanted, resize)


def _read_path(path: Path, name: str, wanted: Wanted, resize: int | None) -> RawData:
    suffix = "" if path.is_dir() else path.suffix.lower()
    if path.is_dir() or suffix == ".parquet":
        table = read_own_parquet(path, wanted, resize)
        if table is not None:
            return table
    if suffix == ".csv":
        return read_csv(path, wanted)
    for option, value in (("label_column", wanted.label), ("drop_columns", wanted.drop)):
        if value:
            raise UserError(
                f"{option} is for tables (.csv, .parquet, hub:), and {name} is not one."
            )
    if files := find_leaf_files(path):
        if wanted.clients is not None:
            raise UserError(f"{name} names its clients itself, as users: leave clients_by out.")
        return read_leaf(files, name)
    if path.is_dir():
        return read_image_folder(path, resize, wanted.clients, is_further=wanted.is_further)
    if suffix == ".npz":
        return read_npz(path, wanted.clients)
    raise UserError(
        f"{name} is not a dataset; that is a .npz, .csv, .parquet or .json file or an image folder."
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
        return read_npz(folder / f"{known.name}.npz")
    return _READERS[known.name](folder) or read_parquet(folder, known.parts)


def _read_tiny_imagenet(folder: Path) -> RawData | None:
    train = folder / "train"
    return read_image_folder(train) if any(train.glob("n*/images")) else None


def _read_ag_news(folder: Path) -> RawData | None:
    if (folder / "ag_news.csv").is_file():
        return read_csv(folder / "ag_news.csv")
    if (folder / "train.csv").is_file():
        return read_ag_news_csv([folder / "train.csv", published.require_part(folder / "test.csv")])
    return None


#: Readers of the files that each dataset is published in.
_READERS: dict[str, Callable[[Path], RawData | None]] = {
    "mnist": published.read_mnist,
    "fashion-mnist": published.read_mnist,
    "cifar10": published.read_cifar10,
    "cifar100": published.read_cifar100,
    "tiny-imagenet": _read_tiny_imagenet,
    "ag_news": _read_ag_news,
    "heart-disease": natural_sets.read_heart_disease,
    "har": natural_sets.read_har,
    "har-signals": natural_sets.read_har_signals,
}


def build_dataset(
    name: str,
    raw: RawData,
    known: KnownDataset | None = None,
    tokens: tuple[str, ...] | None = None,
    length: int | None = None,
    *,
    uses_cache: bool = False,
) -> Dataset:
    """Build a dataset; if it is a known one, check its classes and the shape of its samples.

    With `tokens`, these are the vocabulary of its texts; `length` is theirs, by default that of the
    longest text. `uses_cache` is for texts that are in files: those of a program are not kept.
    """
    notes: tuple[str, ...] = raw.notes
    if isinstance(raw.x, torch.Tensor):
        x, vocabulary, tokens = raw.x, None, ()
    else:
        length = known.shape[0] if known else length
        if tokens is None and uses_cache:
            x, tokens = build_tokens(raw.x, raw.where, length)
        else:
            x, tokens = encode_texts(raw.x, tokens, length)
        vocabulary = len(tokens) + 1
        if known is None:
            notes = (*notes, f"Texts are read as up to {x.shape[1]} tokens.")
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
    clients, client_names = _number_clients(raw)
    # The paper pools the parts of the datasets that it uses.
    split, remarks = (None, ()) if known else _check_split(raw)
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
        (*notes, *remarks),
    )


def _number_clients(raw: RawData) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    """Number the clients in their order, which is that of their names if there is no other."""
    if raw.clients is None:
        return None, ()
    numbers, names = encode_labels(list(raw.clients))
    if raw.client_names:
        ranks = {name: rank for rank, name in enumerate(raw.client_names)}
        numbers = np.array([ranks[name] for name in names])[numbers]
        names = raw.client_names
    return torch.from_numpy(numbers), tuple(printable(name, 100) for name in names)


def _check_split(raw: RawData) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    """Return the parts that the files put samples into, if they serve for training and testing."""
    if raw.split is None or not len(raw.split):
        return None, ()
    parts = {PARTS[number] for number in np.unique(raw.split).tolist()}
    if {"train", "test"} <= parts:
        return torch.from_numpy(raw.split), ()
    if parts == {"train"}:
        return None, ()
    lacking = "test" if "train" in parts else "train"
    return None, (
        f"The files have a part {' and '.join(sorted(parts))} but none called {lacking}, so their "
        "split does not count, and each client's samples are split 75/25.",
    )


def _count_targets(name: str, y: "np.ndarray[Any, Any]") -> int:
    """Count the classes by their labels. None may be missing: a typo would become a class.

    If the targets are not classes, count those of a sample.
    """
    if y.ndim == 2 or y.dtype.kind == "f":
        return y.shape[1] if y.ndim == 2 else 1
    values = np.unique(y)
    if len(values) and (values[0] < 0 or values[-1] != len(values) - 1):
        raise UserError(
            f"{name} holds labels from {values[0]} to {values[-1]}, {len(values)} in all; "
            f"labels must be 0 to {len(values) - 1}, without gaps: "
            "y = np.unique(y, return_inverse=True)[1] makes them so."
        )
    return len(values)


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
