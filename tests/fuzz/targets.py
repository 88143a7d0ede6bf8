"""All files that the program reads: sound examples, their damage, and the commands for them.

Long because it is one catalogue of all formats.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from board_results import make_result
from fuzz.mutations import misplace, mutate, repair_png

import fedala.io.tensor_files
from fedala.cells.results import COLUMNS, OLD_COLUMNS
from fedala.cli import run as run_command
from fedala.paper.experiments import tables
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.observer import RunObserver, Stopped
from fedala.runs.plan import plan

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (12, 28, 28), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
Y = np.arange(12) % 3
TEXTS = [f"words of number {i}, and ‘more’ of them" for i in range(12)]

Files = dict[str, bytes]


@dataclass(frozen=True)
class Target:
    """A command, and the files that it reads."""

    name: str
    arguments: tuple[str, ...]
    files: Callable[[], Files]
    #: Damages content behind a checksum or compression.
    inside: Callable[[Files, random.Random], Files] | None = None
    before: Callable[[], None] | None = None  # called in the child before the command
    more: Callable[[random.Random], list[str]] | None = None  # adds odd arguments

    def write(self, folder: Path, rng: random.Random | None = None) -> None:
        """Write the files: sound without `rng`, otherwise damaged in some way."""
        files = dict(_once(self.files))
        is_misplaced = rng is not None and rng.random() < 0.1
        if rng and not is_misplaced:
            if self.inside and rng.random() < 0.5:
                files = self.inside(files, rng)
            else:
                name = rng.choice(sorted(files))
                files[name] = mutate(files[name], rng)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.name.startswith("fifo"):
                os.mkfifo(path)
            else:
                path.write_bytes(content)
        if rng and is_misplaced:
            names = [name for name in sorted(files) if "fifo" not in name]
            misplace(folder / rng.choice(names), rng)

    def command(self, rng: random.Random) -> list[str]:
        return [*self.arguments, *(self.more(rng) if self.more else ())]


@cache
def _once(files: Callable[[], Files]) -> Files:
    return files()


def _divide(*data: str) -> tuple[str, ...]:
    return ("partition", "--clients", "2", "--partition", "iid", "--save", "saved.json", *data)


def _divide_natural(path: str) -> tuple[str, ...]:
    return ("partition", "--dataset", path, "--save", "saved.json")


def _run(*options: str) -> tuple[str, ...]:
    return (
        "run",
        "--rounds",
        "1",
        "--batch-size",
        "4",
        "--set",
        "fedala.max_epochs=1",
        "--out",
        "run",
        *options,
    )


def plan_only() -> None:
    """End before work starts: a sound config may be for a run of years."""

    def execute(*_: object, **__: object) -> None:
        raise SystemExit(0)

    run_command.execute = execute


def npy(array: "np.ndarray") -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def zipped(members: Files, method: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def _npz() -> Files:
    return {"my.npz": zipped({"x.npy": npy(GREY), "y.npy": npy(Y)}, zipfile.ZIP_DEFLATED)}


def _npz_inside(files: Files, rng: random.Random) -> Files:
    arrays = {"x.npy": npy(rng.choice((GREY, GREY / 7, GREY[:, 0]))), "y.npy": npy(Y)}
    name = rng.choice(("x.npy", "y.npy"))
    arrays[name] = _header(arrays[name], rng) if rng.random() < 0.5 else mutate(arrays[name], rng)
    methods = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    return {"my.npz": zipped(arrays, rng.choice(methods))}


def _header(data: bytes, rng: random.Random) -> bytes:
    """Put another header before the same numbers."""
    kinds = (
        "|u1",
        "<f2",
        ">f8",
        "<f16",
        "<i8",
        ">u8",
        "|b1",
        "|O",
        "<U4",
        "<U0",
        "|V0",
        "|S1",
        "<M8[s]",
        "<c8",
    )
    shapes = (
        (12, 28, 28),
        (12,),
        (),
        (2**40, 0),
        (0, 2**40),
        (2**62, 4),
        (-1, 3),
        (12, 1),
        (2**33,),
        (1,) * 40,
    )
    header = repr(
        {
            "descr": rng.choice(kinds),
            "fortran_order": rng.random() < 0.5,
            "shape": rng.choice(shapes),
        }
    )
    version, text = rng.choice(((1, 0), (2, 0), (3, 0))), header.encode() + b"\n"
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text + data[128:]


def idx(array: "np.ndarray") -> bytes:
    array = np.asarray(array, dtype=np.uint8)
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def _idx() -> Files:
    return {
        f"{part}-{kind}": idx(array[rows])
        for part, rows in (("train", slice(8)), ("t10k", slice(8, None)))
        for kind, array in (("images-idx3-ubyte", GREY), ("labels-idx1-ubyte", Y))
    }


def _idx_gz() -> Files:
    return {f"{name}.gz": gzip.compress(content) for name, content in _idx().items()}


def _idx_inside(files: Files, rng: random.Random) -> Files:
    name = rng.choice(sorted(files))
    return {**files, name: gzip.compress(mutate(gzip.decompress(files[name]), rng))}


def _cifar10() -> Files:
    rows = np.concatenate(
        [Y[:, None].astype(np.uint8), COLOUR.transpose(0, 3, 1, 2).reshape(12, -1)], axis=1
    )
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    return {name: rows[2 * i : 2 * i + 2].tobytes() for i, name in enumerate(names)}


def _cifar100() -> Files:
    labels = np.stack([Y, Y], axis=1).astype(np.uint8)
    rows = np.concatenate([labels, COLOUR.transpose(0, 3, 1, 2).reshape(12, -1)], axis=1)
    names = "\n".join(f"class_{i}" for i in range(100)).encode()
    return {
        "train.bin": rows[:8].tobytes(),
        "test.bin": rows[8:].tobytes(),
        "fine_label_names.txt": names,
    }


KINDS = {
    "png": {},
    "jpg": {},
    "gif": {},
    "bmp": {},
    "webp": {},
    "ppm": {},
    "tif": {"compression": "tiff_lzw"},
}


@cache
def _picture() -> bytes:
    return encoded(GREY[0])


def encoded(array: "np.ndarray", kind: str = "png") -> bytes:
    from PIL import Image

    Image.init()
    file = io.BytesIO()
    Image.fromarray(array).save(file, Image.EXTENSION[f".{kind}"], **KINDS[kind])
    return file.getvalue()


def _images() -> Files:
    kinds = list(KINDS)
    return {
        f"images/class-{y}/{i}.{kinds[i % 7]}": encoded(COLOUR[i], kinds[i % 7])
        for i, y in enumerate(Y)
    }


def _images_inside(files: Files, rng: random.Random) -> Files:
    name = rng.choice([name for name in sorted(files) if name.endswith(".png")])
    return {**files, name: repair_png(mutate(files[name], rng))}


def _pfllib() -> Files:
    files: Files = {"in/config.json": b'{"num_clients": 2, "num_classes": 3}'}
    for part in ("train", "test"):
        for client in range(2):
            file = io.BytesIO()
            np.savez_compressed(file, data={"x": GREY[client::2], "y": Y[client::2]})  # type: ignore[arg-type]
            files[f"in/{part}/{client}.npz"] = file.getvalue()
    return files


def _pfllib_inside(files: Files, rng: random.Random) -> Files:
    """Damage the pickle behind its compression and its checksum."""
    name = rng.choice([name for name in sorted(files) if name.endswith("npz")])
    with zipfile.ZipFile(io.BytesIO(files[name])) as archive:
        content = archive.read("data.npy")
    return {**files, name: zipped({"data.npy": mutate(content, rng)}, zipfile.ZIP_DEFLATED)}


def _labelled_csv() -> Files:
    rows = "".join(f'class {y},"{text}"\n' for y, text in zip(Y, TEXTS, strict=True))
    return {"my.csv": f"label,text\n{rows}".encode()}


def _table() -> Files:
    """Make a table of numbers and words with clients and parts."""
    parts = ("train", "train", "test")
    rows = "".join(f"{y},{i}.5,{'pq'[i % 2]},u{i % 2},{parts[i % 3]}\n" for i, y in enumerate(Y))
    return {"my.csv": f"label,a,b,user,split\n{rows}".encode()}


def _parquet_table() -> Files:
    users = [f"u{i % 2}" for i in range(12)]
    content = {"a": (Y / 3).tolist(), "b": [*"pq" * 6], "user": users, "label": Y.tolist()}
    return {"table/all.parquet": parquet(content, [])}


def _leaf() -> Files:
    data = {f"u{i}": {"x": [[i, 1.5], [2, 3]], "y": [0, 1]} for i in range(3)}
    return {"my.json": json.dumps({"users": [*data], "user_data": data}).encode()}


def _ag_news() -> Files:
    rows = [f'"{y + 1}","a title","{text}"\n'.encode() for y, text in zip(Y, TEXTS, strict=True)]
    return {"train.csv": b"".join(rows[:8]), "test.csv": b"".join(rows[8:])}


def parquet(columns: dict[str, list[object]], names: list[str], **options: object) -> bytes:
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    table = pa.table(columns).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def _parquet_images() -> Files:
    images = [{"bytes": encoded(image), "path": "../secret/x.png"} for image in GREY]
    content = {"image": images, "label": Y.tolist()}
    whole = parquet(content, list("0123456789"), compression="none", use_dictionary=False)
    return {"train-0.parquet": whole, "test-0.parquet": whole}


def _parquet_texts() -> Files:
    content = {"text": TEXTS, "label": Y.tolist()}
    whole = parquet(content, ["World", "Sports", "Business", "Sci/Tech"])
    return {"train-0.parquet": whole, "test-0.parquet": whole}


def _columns(files: Files, rng: random.Random) -> Files:
    """Write sound parquet files with wrong columns."""
    texts, invalid = pa.array(TEXTS), pa.array([b"\xff\xfe"] * 12)
    paths = ("../secret/x.png", "/dev/zero", "x", "\0")
    columns = [
        texts, pa.array(Y), pa.array(Y / 2), pa.array(Y > 0), pa.nulls(12), invalid,
        invalid.view(pa.string()),
        pa.array([{"bytes": None, "path": path} for path in paths * 3]),
        pa.array([{"bytes": b"\x89PNG", "path": None}] * 12), pa.array([{"a": 1}] * 12),
        pa.array([[1, 2]] * 12), pa.array([2**63 - 1, -(2**63)] * 6),
        pa.array([2**64 - 1] * 12, pa.uint64()), texts.dictionary_encode(),
        pa.array([2**62] * 12).view(pa.timestamp("ns")),
        pa.array([2**52] * 12).view(pa.timestamp("ms")), pa.array([10**30] * 12, pa.decimal128(38)),
        pa.array([[("a", 1)]] * 12, pa.map_(pa.string(), pa.int64())), pa.array([None, *TEXTS[1:]]),
        pa.array([encoded(GREY[0])] * 12),
    ]  # fmt: skip
    names = [
        rng.choice(("text", "image", "label", "labels", "img", "other", "\x1b")) for _ in range(3)
    ]
    names[:2] = rng.choice((["text", "label"], ["image", "label"], names[:2]))
    table = pa.table([rng.choice(columns) for _ in names], names=names)
    words = rng.choice(
        (b"[" * 9000, b'{"info": {"features": {"label": {"names": "ab"}}}}', b"\xff", b"null")
    )
    file = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({b"huggingface": words}), file)
    return {**files, rng.choice(sorted(files)): file.getvalue()}


_VALUES = [
    "", "0", "-1", "1", "2", "1e999", "nan", "inf", "9" * 30, "9" * 5000, "4611686018427387904",
    "2147483648", "1e-320", "1e308", "0.5", "1_000", "٣", "x", "a\nb", "\x1b[2J", "\udcff", "..",
    "../secret", "/", "/dev/zero", "~nobody/x", "~", "x" * 300, "x/" * 3000, "a" * 100_000, "true",
    "auto", "all", "dir:", "dir:nan", "dir:1e-320", "dir:1e308", "dir:0.001", "pathological:2",
    "pathological:-1", "pathological:" + "9" * 5000, "iid", "x.json", "fifo.json", "hub:",
    "hub:../x", "hub:pandas", "hub:" + "a/" * 500, "my.npz", "fifo.npz", "fifo", "fedala,fedavg",
    "fedala,fedala", "+", "+ala", "ditto+ala", "local", "all,all", "a+b+c", "../x", "cnn",
    "resnet18", "fasttext", "cpu", "float64", "bf16", "fedala.eta=1e308", "=", "a.b=c",
    "fedala.layers=99999999999", "fedala.max_epochs=9223372036854775807", "fedala.eta=", "ala.x=1",
    ".=.", "fedala.=1",
]  # fmt: skip


def _arguments(rng: random.Random) -> list[str]:
    """Choose options of `run` with mistyped or malicious values."""
    flags = [
        f"--{field.name.replace('_', '-')}" for field in fields(Config) if field.type != "bool"
    ]
    flags += ["--config", "--out"]
    chosen = rng.sample(flags, rng.choice((1, 1, 2, 3)))
    return [text for flag in chosen for text in (flag, rng.choice(_VALUES))]


def _partition() -> Files:
    rows = [
        {"train": [4 * i, 4 * i + 1], "validation": [4 * i + 2], "test": [4 * i + 3]}
        for i in range(2)
    ]
    content = {"format": "fedala-partition", "version": 1, "dataset": "my.npz", "samples": 12}
    return {
        **_npz(),
        "my.json": json.dumps({**content, "clients": [*rows, list(range(8, 12))]}).encode(),
    }


def _config() -> Files:
    return {
        **_npz(),
        "my.toml": Config(dataset="my.npz", clients=2, set={"fedala.eta": 0.5}, rounds=1)
        .text()
        .encode(),
    }


def _fifos() -> Files:
    return {**_npz(), "fifo": b"", "fifo.npz": b"", "fifo.json": b""}


def interrupted(path: Path, rounds: int, total: int = 4) -> None:
    """Make the folder `run` of a run that was stopped after some rounds, and its data."""
    (path / "my.npz").write_bytes(
        zipped({"x.npy": npy(GREY[:, :16, :16]), "y.npy": npy(Y)}, zipfile.ZIP_DEFLATED)
    )
    asked = iter(range(1, total + 1))
    config = {
        "dataset": "my.npz",
        "clients": 2,
        "partition": "iid",
        "batch_size": 4,
        "checkpoint_every": 1,
        "lanes": 1,
    }
    with contextlib.chdir(path), contextlib.suppress(Stopped):
        planned = plan(
            Config.from_values(
                {**config, "rounds": total, "method": "fedala", "set": {"fedala.max_epochs": 1}}
            )
        )
        execute(
            planned, Path("run"), observer=RunObserver(should_stop=lambda: next(asked) == rounds)
        )


def _resumed() -> Files:
    with tempfile.TemporaryDirectory() as place:
        interrupted(Path(place), 3)
        return {
            str(file.relative_to(place)): file.read_bytes()
            for file in sorted(Path(place).rglob("*"))
            if file.is_file()
        }


NEWEST = "run/checkpoint/0/0000003.json"


def _consistent(files: Files, rng: random.Random) -> Files:
    """Change a checkpoint, with checksums that agree."""
    manifest = json.loads(json.loads(files[NEWEST])["checkpoint"])
    values = [
        None,
        True,
        -1,
        0,
        1,
        2,
        10**9,
        2**70,
        0.5,
        "",
        "x",
        "../../../secret/x.png",
        "/dev/zero",
        [],
        {},
        [[]],
        "a" * 999,
    ]
    files = dict(files)
    if rng.random() < 0.5:
        key = rng.choice(
            [
                *manifest,
                "other",
                "clients.0.0",
                "clients.0.1",
                "clients.0.2",
                "clients.1.3",
                "server.0",
                "server.1",
            ]
        )
        name, *path = key.split(".")
        target = manifest
        for step in path:
            target, name = target[name], int(step)
        target[name] = rng.choice(values)
        if rng.random() < 0.1:
            del manifest[rng.choice(sorted(manifest))]
    else:
        entry = rng.choice(
            (manifest["server"], manifest["clients"][0][2:], manifest["clients"][1][2:])
        )
        name = f"run/checkpoint/0/{entry[0]}"
        tree, about = fedala.io.tensor_files.unpack(files[name])
        files[name] = fedala.io.tensor_files.pack(_another(tree, rng), about)
        new = hashlib.sha256(files[name]).hexdigest()
        manifest = json.loads(json.dumps(manifest).replace(entry[1], new))
    text = json.dumps(manifest)
    envelope = {"checksum": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": text}
    return {**files, NEWEST: json.dumps(envelope).encode()}


def _another(tree: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The tree with one leaf that is missing, or of another shape or type."""
    key = rng.choice(sorted(tree))
    leaf = tree[key]
    if isinstance(leaf, dict) and leaf and rng.random() < 0.9:
        return {**tree, key: _another(leaf, rng)}
    new = [
        torch.zeros(0),
        torch.zeros(3, 3),
        torch.tensor(1),
        torch.zeros(1, 2, dtype=torch.int64),
        {},
        {"x": torch.ones(1)},
    ]
    if isinstance(leaf, torch.Tensor):
        new += [
            leaf.double() if leaf.dtype == torch.float32 else leaf.float(),
            leaf[None],
            torch.cat([leaf, leaf]),
        ]
    rest = {name: value for name, value in tree.items() if name != key}
    return rest if rng.random() < 0.2 else {**rest, key: rng.choice(new)}


def _reported() -> Files:
    """The run folder of a finished run, as far as a report reads it."""
    with tempfile.TemporaryDirectory() as place:
        interrupted(Path(place), 4)
        read = (
            "config.toml",
            "summary.json",
            "history.csv",
            "clients.csv",
            "metrics.csv",
            "split.csv",
            "weights.csv",
        )
        found = {f"run/{name}": Path(place, "run", name).read_bytes() for name in read}
    return {
        **found,
        "run/resumed.csv": b"time,changed\n2026-01-01T00:00:00+00:00,device (cuda to cpu)\n",
    }


def _trained(name: str, data: bytes) -> Files:
    """A finished run on `data`, as far as a prediction reads it, without digests."""
    options = {"dataset": name, "clients": 2, "partition": "iid", "rounds": 1, "method": "ditto"}
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        Path(name).write_bytes(data)
        execute(plan(Config.from_values(options)), Path("run"))
        model = "run/models/ditto/seed-0/client-00000.safetensors"
        read = ("run/config.toml", "run/history.csv", "run/preprocessing.json", model)
        return {
            **{path: Path(path).read_bytes() for path in read},
            "run/clients.json": b'["a", "b"]',
        }


def _asked_images() -> Files:
    data = zipped({"x.npy": npy(GREY[:, :16, :16]), "y.npy": npy(Y)}, zipfile.ZIP_DEFLATED)
    new = zipped({"x.npy": npy(GREY[:, :16, :16])}, zipfile.ZIP_DEFLATED)
    return {**_trained("my.npz", data), "new.npz": new}


def _asked_texts() -> Files:
    rows = "".join(f'"{text}"\n' for text in TEXTS)
    trained = _trained("my.csv", _labelled_csv()["my.csv"])
    return {**trained, "new.csv": f"text\n{rows}".encode()}


def _asked_parquet() -> Files:
    files = _once(_asked_texts)
    whole = parquet({"text": TEXTS, "label": [f"class {y}" for y in Y]}, [])
    return {**{name: files[name] for name in files if name != "new.csv"}, "new.parquet": whole}


def _values(files: Files, rng: random.Random) -> Files:
    """Change a value of what the models are fed."""
    content = json.loads(files["run/preprocessing.json"])
    name = rng.choice(sorted(content))
    content[name] = rng.choice((None, True, -1, 0, 2**40, 0.5, "", "images", [], [0], [2**30], {}))
    return {**files, "run/preprocessing.json": json.dumps(content).encode()}


def _results() -> Files:
    """A results folder: a cell of a table, and the line about it."""
    [column] = [
        column for column in tables()["table2"].columns if column.name == "mnist-pathological"
    ]
    config = column.cell("fedala").config(rounds=2, seeds=1)
    columns = "method,seed,round,accuracy,loss,accuracy_joined,sent,uploaded,diverged,seconds"
    rows = "".join(f"fedala,0,{round},0.{round}1,0.5,0.{round}1,9,9,0,1.5\n" for round in range(3))
    about = {"samples": 70000, "data": "", "device": "CPU", "version": "x"}
    line = (
        "mnist-dir,fedavg,,false,0,300,300,1,0.98,260,0.98,0.97,0.4,1,1,582,582,70000,,"
        "NVIDIA H200,fedala 0.1.0"
    )
    cell = "results/mnist-pathological/fedala"
    return {
        f"{cell}/cell.json": json.dumps(about).encode(),
        f"{cell}/seeds-0-0/config.toml": config.text().encode(),
        f"{cell}/seeds-0-0/history.csv": f"{columns}\n{rows}".encode(),
        "results/results.csv": f"{','.join(OLD_COLUMNS)}\n{line}\n".encode(),
        "results/figures/figure-wl.png": _picture(),
    }


def _board_results() -> Files:
    """A csv of the leaderboard."""
    result = make_result()
    line = ",".join(str(getattr(result, name)) for name in COLUMNS)
    return {"results/gpu.csv": f"{','.join(COLUMNS)}\n{line}\n".encode()}


_WORDS = [
    "", "0", "-1", "1", "7.5", "-3", "nan", "inf", "-inf", "1e999", "9" * 400, "9" * 5000, "0.5",
    "1e308", "true", "x", "<script>", "=1+1", "a|b", "\u202e", "\x1b[2J", "\x00", "fedavg",
    "fedala", "local", "2", "99999999", "-0", "1_0", "٣",
]  # fmt: skip
_JSON = [
    None, True, -1, 0, 2**62, 10**400, 0.5, float("nan"), float("inf"), "", "x", "\ud800", "<b>",
    "\x1b", [], {}, [[1]], {"a": None}, "a" * 9999,
]  # fmt: skip


def _fields(files: Files, rng: random.Random) -> Files:
    """Tables and JSON that are sound but for one or two values."""
    files = dict(files)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(
            [name for name in sorted(files) if name.endswith((".csv", ".json", ".toml"))]
        )
        text = files[name].decode(errors="replace")
        if name.endswith(".json"):
            content = json.loads(text)
            target = content
            while (
                isinstance(inner := target.get(rng.choice(sorted(target))), dict)
                and inner
                and rng.random() < 0.8
            ):
                target = inner
            target[rng.choice(sorted(target))] = rng.choice(_JSON)
            text = json.dumps(content)
        else:
            separator = "," if name.endswith(".csv") else " = "
            lines = text.split("\n")
            row = rng.randrange(len(lines))
            fields_ = lines[row].split(separator)
            fields_[rng.randrange(len(fields_))] = rng.choice(_WORDS)
            lines[row] = separator.join(fields_)
            text = "\n".join(lines)
        files[name] = text.encode()
    return files


def _only(name: str) -> Callable[[Files, random.Random], Files]:
    return lambda files, rng: {**files, name: mutate(files[name], rng)}


@cache
def targets() -> dict[str, Target]:
    named = ("--data-dir", ".", "--dataset")
    found = [
        Target("npz", _divide("--dataset", "my.npz"), _npz, _npz_inside),
        Target("npz-run", _run("--dataset", "my.npz", "--clients", "2"), _npz, _npz_inside),
        Target("pfllib", ("convert", "pfllib", "in", "--out", "my.npz"), _pfllib, _pfllib_inside),
        Target("csv", _divide("--dataset", "my.csv"), _labelled_csv),
        Target("csv-run", _run("--dataset", "my.csv", "--clients", "2"), _labelled_csv),
        Target(
            "images", _divide("--dataset", "images", "--plot", "plot.svg"), _images, _images_inside
        ),
        Target("table", _divide_natural("my.csv"), _table),
        Target("parquet-table", _divide_natural("table"), _parquet_table),
        Target("leaf", _divide_natural("my.json"), _leaf),
        Target("mnist", _divide(*named, "mnist"), _idx),
        Target("mnist-gz", _divide(*named, "mnist"), _idx_gz, _idx_inside),
        Target("cifar10", _divide(*named, "cifar10"), _cifar10),
        Target("cifar100", _divide(*named, "cifar100"), _cifar100),
        Target("ag_news", _divide(*named, "ag_news"), _ag_news),
        Target("parquet-images", _divide(*named, "mnist"), _parquet_images, _columns),
        Target("parquet-texts", _divide(*named, "ag_news"), _parquet_texts, _columns),
        Target(
            "partition",
            _run("--dataset", "my.npz", "--partition", "my.json", "--method", "fedala,ditto"),
            _partition,
            _only("my.json"),
        ),
        Target(
            "config",
            ("run", "--config", "my.toml", "--out", "run"),
            _config,
            _only("my.toml"),
            plan_only,
        ),
        Target("resume", ("run", "--resume", "run"), _resumed, _consistent),
        Target("report", ("report", "run"), _reported, _fields),
        Target(
            "predict",
            ("predict", "run", "--client", "a", "--data", "new.npz", "--out", "p.csv"),
            _asked_images,
            _values,
        ),
        Target(
            "predict-csv",
            ("predict", "run", "--client", "0", "--data", "new.csv"),
            _asked_texts,
            _values,
        ),
        Target(
            "evaluate-parquet",
            ("evaluate", "run", "--client", "a", "--data", "new.parquet"),
            _asked_parquet,
            _only("new.parquet"),
        ),
        Target("paper-report", ("paper", "report", "results"), _results, _fields),
        Target("leaderboard-report", ("leaderboard", "report", "results"), _board_results, _fields),
        Target(
            "arguments",
            ("run", "--dataset", "my.npz", "--clients", "2", "--rounds", "1", "--out", "run"),
            _fifos,
            lambda files, rng: files,
            plan_only,
            _arguments,
        ),
    ]
    return {target.name: target for target in found}


def secret(folder: Path) -> None:
    """Beside the folder of a case: what no file may lead to."""
    folder.mkdir()
    (folder / "x.png").write_bytes(_picture())
