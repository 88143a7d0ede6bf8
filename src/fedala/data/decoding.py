"""Decode the images of a dataset: in several processes if there are many."""

import contextlib
import hashlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import numpy as np

from fedala.data.cache import Identity, digest_code
from fedala.errors import UserError, import_optional, printable
from fedala.io import image_files
from fedala.io.child_processes import count_cores
from fedala.io.image_files import (
    ColourAmongGrey,
    DecoderProcess,
    Frame,
    Header,
    ImageSource,
    Pixels,
    decode_block,
)
from fedala.io.untrusted import check_expansion, check_memory

#: From here on, processes and a cache pay.
_MANY_IMAGES, _MANY_BYTES = 1000, 2**24
#: What is decoded at a time.
_BLOCK_IMAGES, _BLOCK_BYTES = 64, 2**20
#: Seconds until the first line of progress, and between two of them.
_FIRST, _EVERY = 3.0, 10.0


def is_large(sources: Sequence[ImageSource]) -> bool:
    """Tell whether the images take so long that processes and a cache pay."""
    return len(sources) >= _MANY_IMAGES or sum(map(_count_bytes, sources)) >= _MANY_BYTES


def decode_all(
    sources: Sequence[ImageSource], frame: Frame, place: str
) -> tuple[Pixels, list[str]]:
    """Return the pixels of all images, N×C×H×W, and the mode of each."""
    return _Decoding(sources, frame, place).run()


class _Decoding:
    """Images on their way to pixels. Each thread has a process, and feeds it block after block."""

    def __init__(self, sources: Sequence[ImageSource], frame: Frame, place: str) -> None:
        self.sources, self.frame, self.place = sources, frame, place
        self.sizes = [_count_bytes(source) for source in sources]
        self.stored, self.area = sum(self.sizes), 0
        if frame.side is None:
            self._check_expansion(len(sources) * frame.width * frame.height)
        shape = (len(sources), *frame.shape)
        check_memory(math.prod(shape), f"{frame.first} and all other images together")
        self.pixels = np.empty(shape, dtype=np.uint8)
        self.modes = [""] * len(sources)
        self.done = 0
        self.blocks = self._cut()
        self.errors = dict[int, Exception]()
        self.lock = threading.Lock()
        self.processes = list[DecoderProcess]()

    def run(self) -> tuple[Pixels, list[str]]:
        """Decode everything."""
        workers = count_cores() if is_large(self.sources) else 1
        if workers == 1:
            self._work(None)
        else:
            self._run_threads(workers)
        if self.errors:  # that of the first image that has one, whoever was fastest
            raise self.errors[min(self.errors)]
        return self.pixels, self.modes

    def _run_threads(self, workers: int) -> None:
        try:
            with contextlib.suppress(OSError):  # without processes, this one does it
                for _ in range(workers):
                    self.processes.append(DecoderProcess())
            helpers: Sequence[DecoderProcess | None] = self.processes or [None]
            with ThreadPoolExecutor(len(helpers)) as pool:
                try:
                    futures = [pool.submit(self._work, one) for one in helpers]
                    wait(futures, return_when=FIRST_EXCEPTION)
                    for future in futures:
                        future.result()
                except BaseException:  # Ctrl-C: no thread starts another block
                    self.blocks = iter(())
                    raise
        finally:
            for process in self.processes:
                process.end()

    def _work(self, process: DecoderProcess | None) -> None:
        """Decode one block after another until there are no more, or one has failed."""
        while (block := self._take()) is not None:
            sources, into = self.sources[block], self.pixels[block]
            try:
                headers = None
                if process is not None:
                    with contextlib.suppress(OSError, ValueError):  # it has been killed
                        headers = process.decode_block(sources, self.frame, into)
                if headers is None:
                    process = None
                    with self.lock:
                        headers = decode_block(sources, self.frame, into)
                self._count(block, headers)
            except (UserError, ColourAmongGrey) as error:
                self.errors[block.start] = error

    def _count(self, block: slice, headers: list[Header]) -> None:
        with self.lock:
            self.modes[block] = [header.mode for header in headers]
            self.done += len(headers)
            self.area += sum(header.width * header.height for header in headers)
            self._check_expansion(self.area)

    def _take(self) -> slice | None:
        with self.lock:
            return None if self.errors else next(self.blocks, None)

    def _cut(self) -> Iterator[slice]:
        """Cut the images into blocks; on the way, say now and then how many are decoded."""
        start, size, spoken = 0, 0, time.monotonic() - _EVERY + _FIRST
        for end, own in enumerate(self.sizes):
            size += own
            if end > start and (end - start == _BLOCK_IMAGES or size > _BLOCK_BYTES):
                yield slice(start, end)
                start, size = end, own
            if time.monotonic() - spoken >= _EVERY:
                spoken = time.monotonic()
                say(f"{self.place}: {self.done:,} of {len(self.sources):,} images are decoded.")
        yield slice(start, len(self.sources))

    def _check_expansion(self, area: int) -> None:
        advice = "if that is right, save the pixels with np.savez"
        what = f"{self.frame.first} and all other images together"
        check_expansion(self.frame.shape[0] * area, self.stored, what, advice)


def say(sentence: str) -> None:
    """Print a line of progress."""
    print(printable(sentence, 500), file=sys.stderr, flush=True)


def identify_images(sources: Sequence[ImageSource], place: str, resize: int | None) -> Identity:
    """Identify the pixels that images have, by their content or the marks of their files.

    A file has its name, and what every change of it changes: size, times and number (inode).
    """
    digest = hashlib.sha256(repr((resize, *_list_decoders())).encode())
    newest = 0
    for source in sources:
        if source.file is None:
            digest.update(b"%d\n" % len(source.content) + source.content)
            continue
        with contextlib.suppress(OSError):  # the decoder says what is wrong
            marks = os.stat(source.file)
            newest = max(newest, marks.st_ctime_ns)
            values = (marks.st_size, marks.st_mtime_ns, marks.st_ctime_ns, marks.st_ino)
            digest.update(repr((source.name.removeprefix(place), *values)).encode())
    return Identity(digest.hexdigest(), newest)


def _list_decoders() -> list[str]:
    """Return what else the pixels depend on: the libraries, and the code of the decoder."""
    pillow = import_optional("PIL", "pillow", "images", "Reading image files")
    features = import_optional("PIL.features", "pillow", "images", "Reading image files")
    names = ("libjpeg_turbo", "jpg", "zlib", "libtiff", "webp")
    versions = [str(features.version(name)) for name in names]
    return [digest_code(image_files), pillow.__version__, *versions]


def _count_bytes(source: ImageSource) -> int:
    if source.file is None:
        return len(source.content)
    try:
        return os.stat(source.file).st_size
    except OSError:
        return 0  # the decoder says what is wrong
