"""Texts: their tokens and their vocabulary."""

import hashlib
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from unicodedata import unidata_version

import numpy as np
import torch

from fedala.data.cache import Identity, digest_code, load_or_make
from fedala.data.catalogue import LENGTH

#: From here on, a cache pays.
_MANY_TEXTS = 10_000

# torchtext's `basic_english`, as for the paper's vocabulary: punctuation is a token, or is dropped.
_BASIC_ENGLISH = str.maketrans(
    {
        "'": " '  ",
        '"': "",
        ".": " . ",
        ",": " , ",
        "(": " ( ",
        ")": " ) ",
        "!": " ! ",
        "?": " ? ",
        ";": " ",
        ":": " ",
    }
)


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case basic-English tokens."""
    return text.lower().translate(_BASIC_ENGLISH).replace("<br />", " ").split()


def build_vocabulary(texts: list[list[str]]) -> dict[str, int]:
    """Number the tokens from 1, by frequency and then by the alphabet; 0 is unknown and padding."""
    count = Counter(chain.from_iterable(texts))
    ordered = sorted(count, key=lambda token: (-count[token], token))
    return {token: number for number, token in enumerate(ordered, start=1)}


def encode_texts(
    texts: Sequence[str], tokens: Sequence[str] | None = None, length: int | None = LENGTH
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return texts as int32 N×`length`, cut or padded with 0, and the tokens of ids 1, 2, ….

    With `tokens`, these are the vocabulary, and other words are unknown: 0. Without a `length`, it
    is that of the longest text, at most `LENGTH`: a model that averages over all positions would
    see little of short texts among much padding.
    """
    split = [tokenize(text) for text in texts]
    if length is None:
        length = min(LENGTH, max(map(len, split), default=0)) or 1
    index = (
        build_vocabulary(split)
        if tokens is None
        else {token: number for number, token in enumerate(tokens, start=1)}
    )
    ids = np.zeros((len(split), length), dtype=np.int32)
    for row, words in zip(ids, split, strict=True):
        words = words[:length]
        row[: len(words)] = [index.get(word, 0) for word in words]
    return torch.from_numpy(ids), tuple(index)


def build_tokens(
    texts: Sequence[str], place: str, length: int | None
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Encode the texts of a dataset with their own vocabulary. Those of a large one are kept.

    `place` is the file or folder that they are in.
    """

    def identify() -> Identity:
        # Which letters are upper-case ones depends on the version of Unicode.
        code = digest_code(sys.modules[__name__])
        digest = hashlib.sha256(repr((code, unidata_version, length)).encode())
        for text in texts:
            content = text.encode(errors="surrogatepass")
            digest.update(b"%d\n" % len(content) + content)
        return Identity(digest.hexdigest())

    def encode() -> tuple[torch.Tensor, Sequence[str]]:
        return encode_texts(texts, length=length)

    if len(texts) < _MANY_TEXTS:
        return encode_texts(texts, length=length)
    ids, tokens = load_or_make(place, f"texts, {length}", identify, encode)
    return ids, tuple(tokens)


def fit_ids(
    ids: torch.Tensor, tokens: Sequence[str], known: Sequence[str], length: int
) -> torch.Tensor:
    """Return encoded texts with the ids and the length that texts have elsewhere.

    `tokens` are the words of the ids, and `known` those of the new ones; unknown words are 0.
    """
    if tuple(tokens) != tuple(known):
        number = {token: position for position, token in enumerate(known, start=1)}
        table = [0, *(number.get(token, 0) for token in tokens)]
        ids = torch.tensor(table, dtype=ids.dtype)[ids.long()]
    return torch.nn.functional.pad(ids[:, :length], (0, max(0, length - ids.shape[1])))
