"""Damage to a file: to its entry in the folder, its bytes, its lines, and single numbers.

Subtle damage matters most: if one digit changes, the file is still a valid table.
"""

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], None]

#: Values that are numbers to some readers, and never an accuracy, a round or a count.
VALUES = ("nan", "1e999", "-3", "7.5", "9" * 400)
#: The most single digits of a file that are changed, one at a time, spread over all of them.
DIGITS = 14
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")


def mutations(path: Path, twin: Path | None) -> dict[str, Damage]:
    """List what can happen to a file, by name. `twin` is the same file of another run, or None."""
    found = _to_the_place(twin) | _to_the_bytes(path.read_bytes())
    if path.suffix in (".csv", ".json", ".toml", ".html"):
        found |= _to_the_lines(path) | _to_the_numbers(path)
    return found


def _to_the_place(twin: Path | None) -> dict[str, Damage]:
    found: dict[str, Damage] = {
        "removed": Path.unlink,
        "a folder": _instead(Path.mkdir),
        "a pipe": _instead(os.mkfifo),
        "a link to a zero device": _instead(lambda path: path.symlink_to("/dev/zero")),
        "a link to nothing": _instead(lambda path: path.symlink_to("nowhere")),
    }
    if twin is not None and twin.is_file():
        found["that of another run"] = _with(twin.read_bytes())
    return found


def _to_the_bytes(data: bytes) -> dict[str, Damage]:
    rng, size = random.Random(len(data)), len(data)
    middle = size // 2
    noise, first = rng.randbytes(16), rng.randrange(max(1, size - 16))
    changed = {
        "empty": b"",
        "half of it": data[:middle],
        "a byte short": data[:-1],
        "a bit flipped at the start": _flipped(data, min(12, size - 1)),
        "a bit flipped in the middle": _flipped(data, middle),
        "a bit flipped at the end": _flipped(data, size - 2),
        "random bytes over it": data[:first] + noise + data[first + 16 :],
        "zeros over it": data[:middle] + bytes(min(64, size - middle)) + data[middle + 64 :],
        "all zeros": bytes(size),
        "NUL bytes after it": data + bytes(64),
        "garbage after it": data + b"\nx,\x80?{\xff\n",
        "twice": data + data,
    }
    return {name: _with(text) for name, text in changed.items() if text != data}


def _to_the_lines(path: Path) -> dict[str, Damage]:
    text = path.read_bytes().decode()
    lines = text.splitlines(keepends=True)
    middle = len(lines) // 2
    whole = {
        "with a byte-order mark": "\ufeff" + text,
        "with CRLF line ends": text.replace("\n", "\r\n"),
        "not UTF-8": None,
        "another first line": re.sub(r"[a-z]{3,}", "other", text, count=1),
        "a lone surrogate": re.sub(r'([:=] ")', r"\1\\ud800", text, count=1),
        "a terminal escape": re.sub(r'([:=] "|\n)', "\\1\x1b[2J", text, count=1),
    }
    if len(lines) > 1:
        dropped, doubled, swapped = ([*lines] for _ in range(3))
        del dropped[middle]
        doubled.insert(middle, lines[middle])
        swapped[-2:] = swapped[:-3:-1]
        whole |= {
            "the last line dropped": "".join(lines[:-1]),
            "the first line dropped": "".join(lines[1:]),
            "a middle line dropped": "".join(dropped),
            "a line doubled": "".join(doubled),
            "the last line doubled": text + lines[-1],
            "two lines swapped": "".join(swapped),
            "only the first line": lines[0],
        }
    found = {
        name: _with(other.encode())
        for name, other in whole.items()
        if other is not None and other != text
    }
    found["not UTF-8"] = _with(text.encode("utf-16"))
    return found


def _to_the_numbers(path: Path) -> dict[str, Damage]:
    text = path.read_bytes().decode()
    places = _numbers_of_table(text) if path.suffix == ".csv" else _numbers_of_text(path, text)
    found: dict[str, Damage] = {}
    if not places:
        return found
    is_manifest = path.parent.parent.name == "checkpoint"  # one checksum covers all of it
    most = 3 if is_manifest else DIGITS
    names = list(places)
    told = [
        where
        for where in places
        if where.split(",")[0] in ("accuracy", "best", "mean", "round", "rounds", "samples")
    ]
    chosen = names if len(names) <= most else [names[k * len(names) // most] for k in range(most)]
    for where in dict.fromkeys([*chosen, *told[:3]]):
        found[f"a digit of {where}"] = _over(text, places[where], _other_digit)
    for where in dict.fromkeys([*told[:3], names[len(names) // 2]]):
        for value in VALUES:
            found[f"{value if len(value) < 9 else '400 digits'} for {where}"] = _over(
                text, places[where], lambda _, value=value: value
            )
    return found


def _numbers_of_table(text: str) -> dict[str, tuple[int, int]]:
    """Find one number of every column, as a span: from the last line, or from one in the middle."""
    header, *lines = text.splitlines(keepends=True)
    found: dict[str, tuple[int, int]] = {}
    for column, name in enumerate(header.strip().split(",")):
        for number in (
            (len(lines) - 1, len(lines) // 2)
            if name == "accuracy"
            else (-column % max(1, len(lines)),)
        ):
            if not lines:
                continue
            cells = lines[number].rstrip("\n").split(",")
            if len(cells) > column and _NUMBER.fullmatch(cells[column]):
                start = (
                    len(header)
                    + sum(map(len, lines[:number]))
                    + sum(len(cell) + 1 for cell in cells[:column])
                )
                found[f"{name}, line {number + 2}"] = (start, start + len(cells[column]))
    return found


def _numbers_of_text(path: Path, text: str) -> dict[str, tuple[int, int]]:
    """Find the numbers behind a key of JSON or TOML, or in an HTML page's data."""
    if path.suffix == ".html":
        return {}  # nobody reads it
    found, name = {}, ""
    for match in re.finditer(r'"?([\w.]+)"?(?=\s*[:=])|(?<=[ "])-?\d[\d.]*(?=[,"\s])', text):
        if match[1]:
            name = match[1]
        elif _NUMBER.fullmatch(match[0]):
            label = next(
                f"{name}{', again' * again}"
                for again in range(99)
                if f"{name}{', again' * again}" not in found
            )
            found[label] = match.span()
    return found


def _other_digit(number: str) -> str:
    """Change 0.58 to 0.68, and 14 to 15."""
    last = re.search(r"\d(?!\d)", number)
    assert last
    at = number.index(".") + 1 if "." in number else last.start()
    return f"{number[:at]}{(int(number[at]) + 1) % 10}{number[at + 1 :]}"


def _over(text: str, span: tuple[int, int], change: Callable[[str], str]) -> Damage:
    start, end = span
    return _with((text[:start] + change(text[start:end]) + text[end:]).encode())


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data


def _with(data: bytes) -> Damage:
    def write(path: Path) -> None:
        path.unlink()  # it may be a hard link to the sound file
        path.write_bytes(data)

    return write


def _instead(make: Callable[[Path], None]) -> Damage:
    def put(path: Path) -> None:
        path.unlink()
        make(path)

    return put
