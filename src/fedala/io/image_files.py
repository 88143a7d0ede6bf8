"""Decode images to pixels; as a program, for the process that started it.

`python -m fedala.io.image_files` reads orders from stdin and writes pixels to stdout. Pillow holds
Python's lock for most of the time that a small image takes, so threads would gain little. This
module does without torch, which takes longer to import than thousands of images to decode.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fedala.errors import UserError, import_optional
from fedala.io.child_processes import share_code
from fedala.io.untrusted import check_memory, read_file

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

#: Pillow knows more formats, but one of them starts a program.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MAX_IMAGE_BYTES = 2**28
#: Images of fewer pixels are small beside everything else in memory.
_LARGE = 2**20
GREY = {"1", "L", "LA"}


class ImageSource(NamedTuple):
    """An image that is not yet decoded: a file, or its content."""

    name: str
    """In messages."""
    file: Path | None
    content: bytes = b""

    def read(self) -> bytes:
        """Return its content."""
        return read_file(self.file, MAX_IMAGE_BYTES) if self.file else self.content


class Header(NamedTuple):
    """What an image says of itself."""

    width: int
    height: int
    mode: str


class Frame(NamedTuple):
    """What all images of a dataset become."""

    first: str
    """The name of the first image, which has the size that all must have without `side`."""
    width: int
    height: int
    side: int | None
    """Pixels each way, if they are resized."""
    is_grey: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """C×H×W."""
        return (1 if self.is_grey else 3, self.side or self.height, self.side or self.width)


class ColourAmongGrey(Exception):
    """An image has colours, and those before it have none."""


def find_frame(source: ImageSource, side: int | None) -> Frame:
    """Return what all images become if they are like the first."""
    header: Header = _open(source, _read_header)
    return Frame(source.name, header.width, header.height, side, header.mode in GREY)


def decode_block(sources: Sequence[ImageSource], frame: Frame, into: Pixels) -> list[Header]:
    """Decode images into N×C×H×W; return their headers, which are checked before any pixels."""

    def extract(image: Any) -> tuple[Header, Any]:
        header = _read_header(image)
        _check_header(header, source.name, frame)
        return header, _get_pixels(image, frame.is_grey)

    headers = []
    for source, row in zip(sources, into, strict=True):
        header, image = _open(source, extract)
        if image.shape != (header.height, header.width, len(row)):
            raise UserError(
                f"{source.name} is not a readable image (its header says another size)."
            )
        fit(image.transpose(2, 0, 1), row)
        headers.append(header)
    return headers


def _read_header(image: Any) -> Header:
    width, height = image.size
    return Header(width, height, image.mode)


def _check_header(header: Header, name: str, frame: Frame) -> None:
    width, height, mode = header
    if (width, height) != (frame.width, frame.height) and frame.side is None:
        raise UserError(
            f"{name} has {width}×{height} pixels, {frame.first} has {frame.width}×{frame.height}; "
            "all images must have one size, or get one from the option resize."
        )
    if mode[0] in "IF":
        raise UserError(f"{name} has more than 8 bits per channel ({mode}); save it with 8.")
    if frame.is_grey and mode not in GREY:
        raise ColourAmongGrey
    if width * height > _LARGE:
        check_memory(8 * width * height, name)


def _get_pixels(image: Any, is_grey: bool) -> Any:
    if image.mode == "P":
        image = image.convert("RGBA")  # as pillow advises for a palette with transparency
    return np.atleast_3d(np.asarray(image.convert("L" if is_grey else "RGB")))


def fit(image: Any, into: Any) -> None:
    """Copy an image of bytes, C×H×W, resized to the size of `into`: bilinear, with antialias."""
    height, width = into.shape[1:]
    if image.shape == into.shape:
        into[...] = image
        return
    pillow = import_optional("PIL.Image", "pillow", "images", "Resizing images")
    for channel, target in zip(image, into, strict=True):
        small = pillow.fromarray(np.ascontiguousarray(channel))
        target[...] = np.asarray(small.resize((width, height), pillow.Resampling.BILINEAR))


def _open(source: ImageSource, extract: Callable[[Any], Any]) -> Any:
    """Open an image and return what `extract` takes from it."""
    pillow = import_optional("PIL.Image", "pillow", "images", "Reading image files")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pillow warns about images that it can read
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            data = BytesIO(source.read())
            with pillow.open(data, formats=FORMATS) as image:
                return extract(image)
    except (UserError, ColourAmongGrey):
        raise
    except Exception as error:  # a broken file can raise almost any kind of error
        raise UserError(
            f"{source.name} is not a readable image ({type(error).__name__})."
        ) from None


class DecoderProcess:
    """Another process that decodes images."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fedala.io.image_files"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=share_code(),
            start_new_session=True,  # a terminal's Ctrl-C does not reach it
        )

    def decode_block(
        self, sources: Sequence[ImageSource], frame: Frame, into: Pixels
    ) -> list[Header]:
        """Do what the function of this name does; raise OSError if the process has ended."""
        orders, replies = self._process.stdin, self._process.stdout
        if orders is None or replies is None:
            raise BrokenPipeError
        images = [(s.name, s.file and str(s.file), len(s.content)) for s in sources]
        orders.write(json.dumps({"frame": frame, "images": images}).encode() + b"\n")
        orders.writelines(source.content for source in sources)
        orders.flush()
        reply = json.loads(replies.readline() or b'{"ended": true}')
        if "sentence" in reply:
            raise UserError(reply["sentence"])
        if "has_colour" in reply:
            raise ColourAmongGrey
        content = replies.read(into.nbytes) if "headers" in reply else b""
        if len(content) < into.nbytes:
            raise BrokenPipeError
        into[...] = np.frombuffer(content, dtype=np.uint8).reshape(into.shape)
        return [Header(*header) for header in reply["headers"]]

    def end(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()
        self._process.communicate()


def _serve(orders: IO[bytes], replies: IO[bytes]) -> None:
    """Decode what a `DecoderProcess` asks for, until it closes its end."""
    while line := orders.readline():
        order = json.loads(line)
        frame = Frame(*order["frame"])
        sources = [
            ImageSource(name, file and Path(file), orders.read(size))
            for name, file, size in order["images"]
        ]
        pixels = np.empty((len(sources), *frame.shape), dtype=np.uint8)
        reply: dict[str, Any]
        try:
            reply = {"headers": decode_block(sources, frame, pixels)}
        except ColourAmongGrey:
            reply = {"has_colour": True}
        except UserError as error:
            reply = {"sentence": str(error)}
        replies.write(json.dumps(reply).encode() + b"\n")
        if "headers" in reply:
            replies.write(pixels.data)
        replies.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
