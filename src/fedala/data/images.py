"""Image files: folders of them, and those that lie inside tables."""

import math
import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedala.data.dataset import Raw, need
from fedala.errors import UserError
from fedala.io.untrusted import check_expansion, check_memory, read_file

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}
_FORMATS = (
    "PNG",
    "JPEG",
    "BMP",
    "GIF",
    "WEBP",
    "TIFF",
    "PPM",
)  # not what else pillow knows: one starts a program
LARGEST = 2**28  # bytes of one image file
_GREY = {"1", "L", "LA"}
_PARTS = ("train", "val", "valid", "validation", "test")

Source = tuple[str, Callable[[], BytesIO]]  # what to call an image in a message, and its bytes


def image_folder(folder: Path) -> Raw:
    """One sub-folder per class, named after it; or the same below `train`, `val` and `test`, which are merged."""
    parts = _folders(folder)
    if not parts or any(part.name not in _PARTS for part in parts):
        parts = [folder]
    parts.sort(key=lambda part: _PARTS.index(part.name) if part.name in _PARTS else 0)
    names = sorted({child.name for part in parts for child in _folders(part)})
    if not names:
        raise UserError(
            f"{folder} holds no sub-folders; an image folder has one for every class, named after it."
        )
    files, y = [], []
    for part in parts:
        for label, name in enumerate(names):
            found = sorted(
                file for file in (part / name).rglob("*") if file.suffix.lower() in _SUFFIXES
            )
            files += found
            y += [label] * len(found)
    empty = [name for label, name in enumerate(names) if label not in set(y)]
    if empty:
        raise UserError(
            f"{folder / empty[0]} holds no images (png, jpg, …); every class needs at least one."
        )
    x = decode([_source(file) for file in files])
    return Raw(str(folder), x, np.array(y, dtype=np.int64), tuple(names))


def _source(file: Path) -> Source:
    return str(file), lambda: BytesIO(read_file(file, LARGEST))


def decode(sources: Sequence[Source]) -> torch.Tensor:
    """Images of one size as uint8 N×C×H×W: RGB, or one channel where all of them are grey."""
    pillow = need("PIL.Image", "pillow", "images", "Reading image files")
    stored = 0

    def counted(source: Source) -> Source:
        def data() -> BytesIO:
            nonlocal stored
            content = source[1]()
            stored += content.getbuffer().nbytes
            return content

        return source[0], data

    # Headers first: the size and the kind of all images have to be known before room is made for them.
    headers = [
        _read(pillow, counted(source), lambda image: (image.size, image.mode)) for source in sources
    ]
    (width, height), _ = headers[0]
    for (name, _), (size, mode) in zip(sources, headers, strict=True):
        if size != (width, height):
            raise UserError(
                f"{name} has {size[0]}×{size[1]} pixels, {sources[0][0]} has {width}×{height}; "
                "all images must have one size."
            )
        if mode[0] in "IF":
            raise UserError(f"{name} has more than 8 bits per channel ({mode}); save it with 8.")
    grey = all(mode in _GREY for _, mode in headers)
    shape = (len(sources), 1 if grey else 3, height, width)
    every = f"{sources[0][0]} and all other images together"
    check_expansion(
        math.prod(shape), stored, every, "if that is right, save the pixels with np.savez"
    )
    check_memory(math.prod(shape) + 8 * width * height, every)
    pixels = np.empty(shape, dtype=np.uint8)
    for row, source in zip(pixels, sources, strict=True):
        image = _read(pillow, source, lambda image: _pixels(image, grey))
        if image.shape != (height, width, shape[1]):
            raise UserError(f"{source[0]} is not a readable image (its header says another size).")
        row[...] = image.transpose(2, 0, 1)
    return torch.from_numpy(pixels)


def _pixels(image: Any, grey: bool) -> Any:
    if image.mode == "P":
        image = image.convert(
            "RGBA"
        )  # pillow's own advice for palettes that have a transparent colour
    return np.atleast_3d(np.asarray(image.convert("L" if grey else "RGB")))


def _read(pillow: Any, source: Source, what: Callable[[Any], Any]) -> Any:
    name, data = source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pillow remarks on what it can read all the same
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(data(), formats=_FORMATS) as image:
                return what(image)
    except UserError:
        raise
    except Exception as error:  # pillow's decoders end in almost any kind of error on a broken file
        raise UserError(f"{name} is not a readable image ({type(error).__name__}).") from None


def _folders(folder: Path) -> list[Path]:
    found = sorted(
        child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")
    )
    real = folder.resolve()
    if real == real.parent or any(real.is_relative_to(child.resolve()) for child in found):
        raise UserError(
            f"{folder} is, or leads to, a folder that everything lies in: no dataset looks like that."
        )
    return found
