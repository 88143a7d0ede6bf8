"""From a name or a path to a `Dataset`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate

from fedala.data import arrays
from fedala.data.catalogue import Known, known
from fedala.data.dataset import Dataset, Raw, first_line, need
from fedala.data.images import image_folder
from fedala.data.tables import hub, parquet
from fedala.data.text import ag_news_csv, labelled_csv, token_ids
from fedala.errors import UserError, printable
from fedala.options import suggest


def load(name: str, data_dir: Path | None = None) -> Dataset:
    """A dataset by its name (`known()`), a path (.npz, .csv, a folder of images) or a hub id (`hub:owner/name`).

    Named ones come from the hub, or from a copy under `data_dir` in one of the formats they are published in.
    """
    row = next((row for row in known() if row.name == name), None)
    try:
        return _dataset(name, _own(name) if row is None else _named(row, data_dir), row)
    except MemoryError:
        raise UserError(f"{name} does not fit into the memory of this machine.") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error}).") from None


def _named(row: Known, data_dir: Path | None) -> Raw:
    if row.name == "digits":
        return _digits()
    if data_dir is None:
        advice = f"with a copy of {row.name} on this machine, say where it is with --data-dir"
        return hub(row.hub, row.parts, advice)
    return _copy(row, Path(data_dir))


def _own(name: str) -> Raw:
    if name.startswith("hub:"):
        return hub(name.removeprefix("hub:"))
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f"There is no file or folder {name} ({first_line(error)}).") from None
    if path.is_dir():
        return image_folder(path)
    suffix = path.suffix.lower()
    if not path.exists():
        if suffix in (".npz", ".csv") or len(path.parts) > 1:
            raise UserError(f"There is no file or folder {name}.")
        rest = suggest(name, (row.name for row in known()))
        raise UserError(
            f"There is no dataset {name}{rest}; your own data is the path of a .npz, a .csv or an image folder."
        )
    if suffix == ".npz":
        return arrays.npz(path)
    if suffix == ".csv":
        return labelled_csv(path)
    raise UserError(
        f"{name} is not a kind of file that holds a dataset; that is a .npz, a .csv or a folder of images."
    )


def _digits() -> Raw:
    """scikit-learn's 8×8 digits, scaled up to 28×28 so that the paper's CNN fits them."""
    digits = need("sklearn.datasets", "scikit-learn", "digits", "The dataset digits").load_digits()
    x = torch.from_numpy(digits.images).unsqueeze(1) * (255 / 16)
    x = interpolate(x, size=(28, 28), mode="bilinear", align_corners=False)
    return Raw("scikit-learn", x.round().to(torch.uint8), digits.target.astype(np.int64))


def _copy(row: Known, data_dir: Path) -> Raw:
    """A copy of a named dataset on disk, looked for where it customarily lies, its own folders first."""
    if not data_dir.is_dir():
        raise UserError(f"The data directory {data_dir} is not a folder.")
    bases = (data_dir / row.name, data_dir)
    for folder in (base / folder for base in bases for folder in (*row.folders, "data", "")):
        raw = _read(row, folder) if folder.is_dir() else None
        if raw is not None:
            return raw
    for file in (base / pickle for base in bases for pickle in row.pickles):
        if file.is_file():
            raise UserError(
                f"{file} is the Python version of {row.name}, a pickle, which is never loaded; get the binary version."
            )
    raise UserError(
        f"There is no copy of {row.name} in {data_dir} or its sub-folders {', '.join((row.name, *row.folders))}: "
        f"neither {row.name}.npz nor train*.parquet nor the files that it is published in."
    )


def _read(row: Known, folder: Path) -> Raw | None:
    if (folder / f"{row.name}.npz").is_file():
        return arrays.npz(folder / f"{row.name}.npz")
    return _PUBLISHED[row.name](folder) or parquet(folder, row.parts)


def _tiny_imagenet(folder: Path) -> Raw | None:
    train = folder / "train"
    return image_folder(train) if any(train.glob("n*/images")) else None


def _ag_news(folder: Path) -> Raw | None:
    if (folder / "ag_news.csv").is_file():
        return labelled_csv(folder / "ag_news.csv")
    if (folder / "train.csv").is_file():
        return ag_news_csv([folder / "train.csv", arrays.present(folder / "test.csv")])
    return None


_PUBLISHED: dict[str, Callable[[Path], Raw | None]] = {
    "mnist": arrays.mnist,
    "fashion-mnist": arrays.mnist,
    "cifar10": arrays.cifar10,
    "cifar100": arrays.cifar100,
    "tiny-imagenet": _tiny_imagenet,
    "ag_news": _ag_news,
}


def _dataset(name: str, raw: Raw, row: Known | None = None) -> Dataset:
    x, vocabulary = (raw.x, None) if isinstance(raw.x, torch.Tensor) else token_ids(raw.x)
    names, note = raw.class_names, ""
    if row is None:
        classes = len(names) or _counted(name, raw.y)
    else:
        classes = row.classes
        if names and len(names) != classes:
            raise UserError(
                f"{raw.where} holds {len(names)} classes, but {name} has {classes}; is it another dataset?"
            )
        if tuple(x.shape[1:]) != row.shape:
            raise UserError(
                f"{raw.where} holds samples of shape {_by(x.shape[1:])}, but those of {name} are {_by(row.shape)}; "
                "is it another dataset?"
            )
        if all(label.isdigit() for label in names):
            names = row.class_names
        if len(x) != row.samples:
            note = (
                f"partial: {len(x)} of {row.samples} samples"
                if len(x) < row.samples
                else f"{len(x)} samples"
            )
    names = tuple(printable(label, 100) for label in names)
    return Dataset(name, x, torch.from_numpy(raw.y), classes, names, vocabulary, note)


def _counted(name: str, y: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> int:
    """The number of classes where only the labels tell it: then none may be missing, or a typo would become a class."""
    values = np.unique(y)
    if len(values) and (values[0] < 0 or values[-1] != len(values) - 1):
        raise UserError(
            f"{name} holds {len(values)} different labels from {values[0]} to {values[-1]}; "
            f"labels must be 0 to {len(values) - 1}, none left out."
        )
    return len(values)


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
