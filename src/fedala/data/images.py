"""Image files, in folders and inside tables."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedala.data.cache import load_or_make
from fedala.data.columns import PART_WORDS
from fedala.data.dataset import Dataset, RawData
from fedala.data.decoding import decode_all, identify_images, is_large
from fedala.errors import UserError, import_optional, printable
from fedala.io.image_files import GREY, ColourAmongGrey, ImageSource, find_frame, fit
from fedala.io.untrusted import check_memory
from fedala.options import name_option

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}
_TRANSPARENT = {"LA", "PA", "RGBA", "RGBa", "La"}
#: What `clients_by` must be for an image tree.
FOLDER = "folder"
_PLAIN = "Images are read from class/x.png, train/class/x.png"


class _Place(NamedTuple):
    """A folder that holds one folder for each class."""

    folder: Path
    part: int | None
    """Its position in `PARTS`; None if the tree has no parts."""
    client: str


def _list_layouts() -> str:
    return (
        f"{_PLAIN} and, with {name_option('clients_by', FOLDER)}, client/class/x.png, "
        "train/client/class/x.png or client/train/class/x.png"
    )


def read_image_folder(
    folder: Path,
    resize: int | None = None,
    clients_by: str | None = None,
    *,
    is_further: bool = False,
) -> RawData:
    """Read a folder with one sub-folder per class, or the same in `train`, `val` and `test`.

    With `clients_by="folder"`, there is a folder for each client, with its classes in it. Parts may
    be above the clients, or in them. `is_further`: the samples are for a run that is over.
    """
    if clients_by not in (None, FOLDER):
        raise UserError(
            f"{folder} is an image tree, whose clients are folders: it takes "
            f"{name_option('clients_by', FOLDER)}, not {clients_by}, for images in "
            f"{folder.name}/[train|test]/client/class."
        )
    places = _find_places(folder, has_clients=clients_by is not None)
    names = sorted({child.name for place in places for child in _folders(place.folder)})
    if not names:
        if (folder / "train" / "0.npz").is_file():
            raise UserError(
                f"{folder} is a dataset of PFLlib: make one file of it with fedala convert pfllib "
                f"{folder} --out {folder.name}.npz, and name that."
            )
        what = "a client, and in it one for every class" if clients_by else "every class"
        raise UserError(
            f"{folder} holds no sub-folders; "
            f"an image folder has one for {what}, with the name of the class."
        )
    files, y, clients, split = list[Path](), list[int](), list[str](), list[int]()
    depths = list[tuple[str, str]]()
    for place in places:
        for label, name in enumerate(names):
            images = _find_images(place.folder / name)
            files += images
            y += [label] * len(images)
            clients += [place.client] * len(images)
            split += [place.part or 0] * len(images)
            level = len((place.folder / name).parts)
            below = (file.parts[level:] for file in images)
            depths += [(name, path[0] if len(path) > 1 else "") for path in below]
    present = set(y)
    empty = [name for label, name in enumerate(names) if label not in present]
    if empty:
        where = folder / (f"…/{empty[0]}" if clients_by else empty[0])
        raise UserError(f"{where} holds no images (png, jpg, …); every class needs at least one.")
    if clients_by:
        fix, layouts = "", _list_layouts()
    elif is_further:
        fix, layouts = "give the folder of a single one", _PLAIN
    else:
        fix, layouts = f"name them with {name_option('clients_by', FOLDER)}", _list_layouts()
    _refuse_hidden_level(folder, set(depths), fix, layouts)
    x, notes = decode_images(_list_sources(files), str(folder), resize)
    raw = RawData(str(folder), x, np.array(y, dtype=np.int64), tuple(names), notes=notes)
    if any(place.part is not None for place in places):
        raw = raw._replace(split=np.array(split, dtype=np.uint8))
    if clients_by:
        note = f"The folders of {folder} name {len(set(clients)):,} clients."
        raw = raw._replace(clients=clients, notes=(note, *notes))
    return raw


def _find_places(folder: Path, *, has_clients: bool) -> list[_Place]:
    """Find the folders that hold the classes, in the order of parts, then of clients."""
    parts = _find_parts(folder)
    if not has_clients:
        without = [_Place(folder, None, "")]
        return [_Place(part, number, "") for part, number in parts] or without
    if parts:
        places = [_Place(own, number, own.name) for part, number in parts for own in _folders(part)]
        inner = [place.folder for place in places if _find_parts(place.folder)]
    else:
        owners = _folders(folder)
        inner = [own for own in owners if _find_parts(own)]
        places = [_Place(own, None, own.name) for own in owners]
    if not inner:
        return places
    if parts or len(inner) < len(owners):
        raise UserError(
            f"{inner[0]} holds the parts {_list_names(_folders(inner[0]))}; either all clients "
            f"have parts and {folder.name} has none, or no client has. {_list_layouts()}."
        )
    found = [(number, part, own.name) for own in owners for part, number in _find_parts(own)]
    return [_Place(part, number, name) for number, part, name in sorted(found)]


def _find_parts(folder: Path) -> list[tuple[Path, int]]:
    """Return the sub-folders, and which parts they are, if all are called like parts."""
    parts = [(child, PART_WORDS.get(child.name.lower(), -1)) for child in _folders(folder)]
    if any(number < 0 for _, number in parts):
        return []
    return sorted(parts, key=lambda part: part[1])


def _refuse_hidden_level(
    folder: Path, depths: set[tuple[str, str]], fix_clients: str, layouts: str
) -> None:
    """Refuse folders in the folders of classes, if they look like classes themselves.

    `depths` are pairs: a class, and the folder in it that has images ("": none between).
    `fix_clients` is what to do if the folders are clients; empty if they cannot be.
    """
    inner = [name for _, name in depths]
    names = sorted(set(inner))
    if "" in names or len(names) < 2 or len(names) == len(inner):
        return
    outer = _list_names(sorted({label for label, _ in depths}))
    fix = "remove one level of folders"
    if fix_clients:
        fix = f"if they are the clients, {fix_clients}; otherwise, {fix}"
    raise UserError(
        f"{folder}: the folders {outer} hold no images themselves, but folders of the same names "
        f"({_list_names(names)}): {fix}. {layouts}."
    )


def _list_names(names: "Sequence[str | Path]") -> str:
    words = [name.name if isinstance(name, Path) else name for name in names]
    return ", ".join(printable(word, 50) for word in words[:5]) + (" …" * (len(words) > 5))


def read_plain_images(folder: Path, resize: int | None = None) -> tuple[list[Path], torch.Tensor]:
    """Read all images in a folder and its sub-folders, whatever these are called."""
    _folders(folder)  # refuses one that contains itself
    files = _find_images(folder)
    if not files:
        raise UserError(f"{folder} holds no images (png, jpg, …).")
    return files, decode_images(_list_sources(files), str(folder), resize)[0]


def _find_images(folder: Path) -> list[Path]:
    """Return the images in a folder and its sub-folders. Hidden ones are other programs' copies."""
    images = []
    for file in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.suffix.lower() in _SUFFIXES and not is_hidden:
            images.append(file)
    return images


def _list_sources(files: Sequence[Path]) -> list[ImageSource]:
    return [ImageSource(str(file), file) for file in files]


def decode_images(
    sources: Sequence[ImageSource], place: str, resize: int | None = None
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Decode images to uint8 N×C×H×W: one channel if all are grey, otherwise RGB.

    They must have one size, or are resized to `resize` × `resize` pixels. Also returns sentences
    that say what was lost or converted. `place` is the file or folder that they are in. Those of a
    large dataset are kept, so that the next run need not decode them.
    """
    import_optional("PIL.Image", "pillow", "images", "Reading image files")

    def decode() -> tuple[torch.Tensor, list[str]]:
        frame = find_frame(sources[0], resize)
        try:
            x, modes = decode_all(sources, frame, place)
        except ColourAmongGrey:
            x, modes = decode_all(sources, frame._replace(is_grey=False), place)
        return torch.from_numpy(x), _describe_modes(modes)

    if not is_large(sources):
        x, notes = decode()
    else:
        identify = partial(identify_images, sources, place, resize)
        x, notes = load_or_make(place, f"images, {resize}", identify, decode)
    return x, tuple(notes)


def _describe_modes(modes: Sequence[str]) -> list[str]:
    """Say which images were converted."""
    notes = []
    greys = sum(mode in GREY for mode in modes)
    if 0 < greys < len(modes):
        verb = "is" if greys == 1 else "are"
        notes.append(f"{greys:,} of {len(modes):,} images {verb} grey; all are read as RGB.")
    if clear := sum(mode in _TRANSPARENT for mode in modes):
        verb = "has" if clear == 1 else "have"
        notes.append(
            f"{clear:,} of {len(modes):,} images {verb} an alpha channel, which is left out."
        )
    return notes


def resize_images(dataset: Dataset, side: int) -> Dataset:
    """Return a dataset with its images resized to `side` × `side` pixels."""
    x = dataset.x
    if x.ndim == 4 and tuple(x.shape[2:]) == (side, side):
        return dataset
    if x.dtype != torch.uint8:
        raise UserError(
            f"resize is for images of bytes, and {dataset.name} holds "
            f"{str(x.dtype).removeprefix('torch.')} samples of shape {tuple(x.shape[1:])}."
        )
    check_memory(x.shape[0] * x.shape[1] * side**2, f"{dataset.name} in {side}×{side} pixels")
    return replace(dataset, x=fit_images(x.numpy(), (x.shape[1], side, side)))


def fit_images(images: "Sequence[Any] | np.ndarray[Any, Any]", shape: Sequence[int]) -> Tensor:
    """Return images of bytes, each C×H×W, as uint8 of `shape`, resized if they differ in size."""
    resized = np.empty((len(images), *shape), dtype=np.uint8)
    for image, row in zip(images, resized, strict=True):
        fit(image, row)
    return torch.from_numpy(resized)


def _folders(folder: Path) -> list[Path]:
    folders = sorted(
        child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")
    )
    real = folder.resolve()
    if real == real.parent or any(real.is_relative_to(child.resolve()) for child in folders):
        raise UserError(
            f"{folder} is, or links to, a folder that contains it; "
            "name a folder that holds only the images."
        )
    return folders
