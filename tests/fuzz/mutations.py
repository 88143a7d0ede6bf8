"""Damage to a file: to its bytes, and to its entry in the file system."""

import os
import random
import zlib
from pathlib import Path

_NUMBERS = [
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
_WORDS = [
    b"\x00", b"\n", b"\r", b'"', b"'", b",", b"{", b"}", b"[" * 5000, b"{'a':" * 3000, b"]", b"-1",
    b"1e999", b"NaN", b"Infinity", b"9" * 5000, b"0x" + b"f" * 5000, b"null", b"true",
    b"../../secret/x", b"/dev/zero", b"\xff\xfe", "\u202e".encode(), "é́".encode(), b"\xed\xa0\x80",
    b"\x1b[2J", b"$\\frac$", b"[/bold]", b"%s%n", b"a." * 3000,
]  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Make one to four changes: cut, flip, overwrite, repeat, move, or insert an odd value."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        size = len(changed)
        # Headers are at the beginning or at the end, and matter most.
        at = min(
            size,
            rng.choice(
                (rng.randrange(size + 1), rng.randrange(65), max(0, size - rng.randrange(1, 200)))
            ),
        )
        length = rng.choice((1, 2, 4, 8, rng.randrange(1, 100)))
        match rng.randrange(9):
            case 0:
                del changed[at:]
            case 1 | 2:
                for position in range(at, min(at + rng.choice((1, 1, 8)), size)):
                    changed[position] ^= 1 << rng.randrange(8)
            case 3:
                changed[at : at + length] = rng.randbytes(length)
            case 4:
                width = rng.choice((1, 2, 4, 8))
                number = rng.choice(_NUMBERS) % 256**width
                changed[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
            case 5:
                del changed[at : at + length]
            case 6:
                changed[at:at] = changed[at : at + length] * rng.choice((1, 2, 100))
            case 7:
                changed[at:at] = rng.choice(_WORDS)
            case 8:
                other = rng.randrange(size + 1)
                changed[at:at] = changed[other : other + length]
    return bytes(changed)


def repair_png(data: bytes) -> bytes:
    """Correct the checksums of all chunks, so that a reader looks at their content."""
    out, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        body = data[at + 4 : at + 8 + length]
        out += data[at : at + 4] + body + zlib.crc32(body).to_bytes(4, "big")
        at += 12 + length
    return bytes(out)


def misplace(path: Path, rng: random.Random) -> None:
    """Replace a file by something else."""
    content = path.read_bytes()
    path.unlink()
    match rng.randrange(11):
        case 0:
            path.touch()
        case 1:
            path.mkdir()
        case 2:
            os.mkfifo(path)
        case 3:
            path.symlink_to(path.name)
        case 4:
            path.symlink_to(
                rng.choice(("/dev/zero", "/dev/null", "/dev/full", "/proc/self/mem", "/"))
            )
        case 5:
            with path.open("wb") as file:
                file.write(content)
                file.truncate(rng.choice((2**42, 2**43)))
        case 6:
            path.with_name("other\u202e\n\x1b[2J" + path.suffix).write_bytes(content)
        case 7:
            path.symlink_to("..")
        case 8:
            path.write_bytes(content * 50)
        case 9:
            pass
        case 10:
            path.symlink_to(path.parent / ("../" * rng.randrange(1, 5)) / "secret" / "x.png")
