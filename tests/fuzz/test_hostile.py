"""Attacks: bombs, paths that lead elsewhere, links, programs instead of data."""

import contextlib
import gzip
import io
import json
import os
import pickle
import shutil
import struct
import time
import tomllib
import zipfile
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fuzz.bounded import attempt
from fuzz.targets import GREY, NEWEST, Y, encoded, interrupted, npy, targets, zipped
from hypothesis import given, settings
from hypothesis import strategies as st

from fedala.data import Dataset, federate
from fedala.errors import UserError
from fedala.io import untrusted
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder


@pytest.fixture
def here(tmp_path):
    place = tmp_path / "here"
    place.mkdir()
    return place


def refused(says, arguments, folder, before=None):
    outcome = attempt(list(arguments), folder, before=before)
    assert (outcome.code, outcome.fault) == (2, ""), outcome.says
    assert says in outcome.says.splitlines()[-1]


def little_memory():
    untrusted.free_memory = lambda: 64 * 2**20


def read(name):
    return targets()[name].arguments


ZEROS = bytes(100 * 2**20)


def bomb_npz(folder):
    header = io.BytesIO()
    shape = {"descr": "|u1", "fortran_order": False, "shape": (len(ZEROS) // 784, 28, 28)}
    np.lib.format.write_array_header_1_0(header, shape)
    x = header.getvalue() + ZEROS[: len(ZEROS) // 784 * 784]
    y = npy(np.arange(shape["shape"][0]) % 3)
    (folder / "my.npz").write_bytes(zipped({"x.npy": x, "y.npy": y}, zipfile.ZIP_DEFLATED))
    return read("npz")


def bomb_gzip(folder):
    targets()["mnist-gz"].write(folder)
    head = bytes((0, 0, 8, 3)) + struct.pack(">3I", len(ZEROS) // 784, 28, 28)
    name = "train-images-idx3-ubyte.gz"
    (folder / name).write_bytes(gzip.compress(head + ZEROS[: len(ZEROS) // 784 * 784]))
    return read("mnist-gz")


def bomb_images(folder):
    for name in ("a", "b"):
        (folder / "images" / name).mkdir(parents=True)
        (folder / "images" / name / "1.png").write_bytes(encoded(np.zeros((6000, 6000), np.uint8)))
    return read("images")


def bomb_rows(folder):
    """Write three million texts, which are all the one text that the file holds."""
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(10**6, np.int8)), ["x"])
    with pq.ParquetWriter(
        folder / "train-0.parquet", pa.schema([("text", texts.type), ("label", pa.int8())])
    ) as file:
        for _ in range(3):
            file.write_table(pa.table({"text": texts, "label": pa.array(np.zeros(10**6, np.int8))}))
    return read("parquet-texts")


def bomb_dictionary(folder):
    """Write a text of a megabyte, five hundred times."""
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(500, np.int8)), ["x" * 2**20])
    pq.write_table(
        pa.table({"text": texts, "label": pa.array(np.zeros(500, np.int8))}),
        folder / "train-0.parquet",
    )
    return read("parquet-texts")


@pytest.mark.parametrize("bomb", [bomb_npz, bomb_gzip, bomb_images, bomb_rows, bomb_dictionary])
def test_a_bomb_is_refused_before_it_takes_memory(bomb, here):
    arguments = bomb(here)
    assert sum(file.stat().st_size for file in here.rglob("*")) < 2**20
    refused("of memory, and only", arguments, here, little_memory)


def lower_limit():
    untrusted.ALWAYS_ALLOWED = 2**20


@pytest.mark.parametrize(
    ("bomb", "advice"),
    [
        (bomb_npz, "save it with np.savez"),
        (bomb_gzip, "unpack it with gunzip"),
        (bomb_images, "save the pixels with np.savez"),
        (bomb_dictionary, "save it as a .csv or .npz file"),
    ],
)
def test_a_file_that_unpacks_to_far_more_than_samples_do_is_refused_with_advice(bomb, advice, here):
    """It would fit into memory: the limit is on the size that a file may unpack to."""
    limit = "Above 1 MiB, at most 100 times the stored size is read"
    refused(f"{limit}: if that is right, {advice}", bomb(here), here, lower_limit)


def test_two_gigabytes_in_two_megabytes_are_refused_at_once(here):
    """A zip of one deflate stream, repeated: its header is true."""
    size = 2**31 - 2**20
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (size // 256, 16, 16)}
    )
    press = zlib.compressobj(wbits=-15)
    block = press.compress(header.getvalue()) + press.flush(zlib.Z_FULL_FLUSH)
    zeros = zlib.compressobj(wbits=-15)
    mebibyte = zeros.compress(bytes(2**20)) + zeros.flush(zlib.Z_FULL_FLUSH)
    stream = block + mebibyte * (size // 2**20) + b"\x03\x00"
    path = zip_of(
        here / "my.npz", stream, len(header.getvalue()) + size, npy(np.arange(size // 256) % 4)
    )
    assert path.stat().st_size < 3 * 2**20
    began = time.monotonic()
    refused("has 2.2 MiB that unpack to 2.06 GiB", read("npz"), here)
    assert time.monotonic() - began < 10


def zip_of(path, stream, size, y):
    """Write a zip archive whose x.npy is this stream. Only its end has the wrong checksum."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w") as file:
            file.write(b"")
        archive.writestr("y.npy", y)
    data = bytearray(path.read_bytes())
    local = data.index(b"PK\x03\x04")
    name_end = local + 30 + len("x.npy")
    old = data.index(b"PK\x03\x04", 4) - name_end
    data[name_end : name_end + old] = stream
    grown = len(stream) - old
    sizes = len(stream).to_bytes(4, "little") + size.to_bytes(4, "little")
    data[local + 18 : local + 26] = sizes
    first = data.index(b"PK\x01\x02", name_end + len(stream))
    data[first + 20 : first + 28] = sizes
    second = data.index(b"PK\x01\x02", first + 4)
    for start, width in ((second + 42, 4), (data.index(b"PK\x05\x06", second) + 16, 4)):
        moved = int.from_bytes(data[start : start + width], "little") + grown
        data[start : start + width] = moved.to_bytes(width, "little")
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("path", ["{}/secret.png", "../secret.png", "/dev/zero"])
def test_no_table_decides_which_files_are_read(path, here):
    (here.parent / "secret.png").write_bytes(encoded(GREY[0]))
    images = [{"bytes": None, "path": path.format(here.parent)}] * 12
    pq.write_table(pa.table({"image": images, "label": Y.tolist()}), here / "train-0.parquet")
    refused("a table cannot make this program read other files", read("parquet-images"), here)


def test_an_image_is_not_run_as_a_program(here):
    """PostScript is a program; pillow would start an interpreter for it."""
    for name in ("a", "b"):
        (here / "images" / name).mkdir(parents=True)
        (here / "images" / name / "1.png").write_bytes(
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
        )
    refused("is not a readable image", read("images"), here)


@pytest.mark.parametrize(
    "name",
    ["hub:pandas", "hub:../here/x", "hub:a/b/c", "hub:/etc/x", "hub:a/..", "hub:local/folder"],
)
def test_a_name_of_the_hub_is_not_a_path(name, here):
    (here / "local" / "folder").mkdir(parents=True)
    refused("owner/name", ["partition", "--dataset", name], here)


class Evil:
    def __reduce__(self):
        return os.system, ("touch unpickled",)


@pytest.mark.parametrize(
    "name", ["my.npz", "my.csv", "my.json", "my.toml", "data_batch_1", "train-0.parquet"]
)
def test_a_pickle_is_never_loaded(name, here):
    evil = io.BytesIO()
    np.save(evil, np.array([Evil()], dtype=object), allow_pickle=True)
    content = (
        zipped({"x.npy": evil.getvalue(), "y.npy": npy(Y)}, zipfile.ZIP_STORED)
        if name == "my.npz"
        else None
    )
    (here / name).write_bytes(content or pickle.dumps(Evil()))
    options = {
        "my.json": ("--partition", name), "my.toml": ("--config", name),
        "data_batch_1": ("--dataset", "cifar10", "--data-dir", "."),
        "train-0.parquet": ("--dataset", "ag_news", "--data-dir", "."),
    }.get(name, ("--dataset", name))  # fmt: skip
    refused("", ["run", "--out", "run", *options], here)
    assert [file.name for file in here.iterdir()] == [name]


def test_no_text_of_a_file_reaches_the_terminal_as_a_command(here):
    (here / "my.csv").write_text(
        "label,text\n\x1b[2J\x1b]0;owned\x07,a\n\u202eb,b\n[bold]c,d\n$\\frac$,e\n" * 4
    )
    outcome = attempt([*read("csv"), "--plot", "plot.svg"], here)
    assert (outcome.code, outcome.fault) == (0, ""), outcome.says
    assert "[bold]c" in outcome.says


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Make a run that was stopped after three of four rounds, and one that was not."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rounds in (("stopped", 3), ("whole", 4)):
        (folder / name).mkdir()
        interrupted(folder / name, rounds)
    return folder


def models_of(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in (folder / "run" / "models").rglob("*.safetensors")
    }


def damages():
    client = "run/checkpoint/0/0-1-*.safetensors"
    server = "run/checkpoint/0/server-3.safetensors"
    return {
        "manifest cut": lambda f: (f / NEWEST).write_bytes((f / NEWEST).read_bytes()[:-9]),
        "manifest empty": lambda f: (f / NEWEST).write_bytes(b""),
        "manifest edited": lambda f: (f / NEWEST).write_text(
            (f / NEWEST).read_text().replace("server-3", "server-2")
        ),
        "server cut": lambda f: (f / server).write_bytes((f / server).read_bytes()[:1000]),
        "server missing": lambda f: (f / server).unlink(),
        "client flipped": lambda f: _flip(
            max(f.glob(client), key=lambda p: int(p.stem.split("-")[2]))
        ),
        "client missing": lambda f: max(
            f.glob(client), key=lambda p: int(p.stem.split("-")[2])
        ).unlink(),
    }


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", damages())
def test_the_checkpoint_before_a_damaged_one_serves(damage, runs, tmp_path):
    shutil.copytree(runs / "stopped", tmp_path / "here")
    damages()[damage](tmp_path / "here")
    outcome = attempt(["run", "--resume", "run"], tmp_path / "here")
    assert (outcome.code, outcome.fault) == (0, ""), outcome.says
    assert "Looking for an earlier checkpoint." in outcome.says
    assert models_of(tmp_path / "here") == models_of(runs / "whole")
    assert models_of(runs / "whole")


def test_no_checkpoint_that_is_whole(runs, tmp_path):
    shutil.copytree(runs / "stopped", tmp_path / "here")
    for file in (tmp_path / "here" / "run" / "checkpoint").rglob("*.json"):
        file.write_bytes(file.read_bytes()[:50])
    refused("nothing can be resumed", ["run", "--resume", "run"], tmp_path / "here")


@pytest.mark.parametrize(
    "name",
    ["resumed.csv", "history.csv", "models", "checkpoint", "checkpoint/0", ".lock", "config.toml"],
)
def test_links_in_a_run_folder_are_not_followed(name, runs, tmp_path):
    shutil.copytree(runs / "stopped", tmp_path / "here")
    mine, target = tmp_path / "mine", tmp_path / "here" / "run" / name
    mine.mkdir()
    shutil.copytree(runs / "stopped" / "run", mine / "run")
    (mine / "run" / "checkpoint" / "0" / "my.safetensors").write_text("years of work")
    before = {file: file.read_bytes() for file in mine.rglob("*") if file.is_file()}
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    target.symlink_to(mine / "run" / name)
    refused("is a link", ["run", "--resume", "run"], tmp_path / "here")
    assert {file: file.read_bytes() for file in mine.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    "name",
    [
        "models/thesis.safetensors",
        "models/a/seed-0/notes.txt",
        "checkpoint/my.json",
        "history.csv/x",
        "mine/x",
        ".git/x",
    ],
)
def test_force_deletes_nothing_of_anybody_else(name, runs, tmp_path):
    shutil.copytree(runs / "stopped", tmp_path / "here")
    file = tmp_path / "here" / "run" / name
    if name.startswith("history"):
        file.parent.unlink()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("years of work")
    before = sorted((tmp_path / "here" / "run").rglob("*"))
    refused(
        "part of a run",
        ["run", "--dataset", "my.npz", "--out", "run", "--force"],
        tmp_path / "here",
    )
    assert sorted((tmp_path / "here" / "run").rglob("*")) == before
    assert file.read_text() == "years of work"


def test_force_leaves_what_comes_while_it_looks(runs, tmp_path, monkeypatch):
    """Only recognised files are deleted, one by one: a new file keeps its folder."""
    shutil.copytree(runs / "stopped" / "run", tmp_path / "run")
    (tmp_path / "run" / "models").mkdir()
    lock = RunFolder.lock

    def late(self):
        (tmp_path / "run" / "models" / "late.txt").write_text("mine")
        return lock(self)

    monkeypatch.setattr(RunFolder, "lock", late)
    with pytest.raises(UserError), RunFolder.create(tmp_path / "run", Config(), force=True):
        pass
    assert (tmp_path / "run" / "models" / "late.txt").read_text() == "mine"


def test_force_does_not_follow_links(runs, tmp_path):
    shutil.copytree(runs / "stopped" / "run", tmp_path / "run")
    (tmp_path / "mine" / "fedala" / "seed-0").mkdir(parents=True)
    file = tmp_path / "mine" / "fedala" / "seed-0" / "global.safetensors"
    file.write_text("years of work")
    (tmp_path / "run" / "models").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="part of a run"):
        RunFolder.check_output(tmp_path / "run", force=True)
    assert file.read_text() == "years of work"


def test_a_model_that_is_not_one(tmp_path):
    path = tmp_path / "models" / "fedavg" / "seed-0" / "global.safetensors"
    path.parent.mkdir(parents=True)
    for content in (
        b"",
        b"\xff" * 100,
        (2**62).to_bytes(8, "little") + b"{}",
        b"\x02" + bytes(7) + b"{}x",
    ):
        path.write_bytes(content)
        with (
            pytest.warns(UserWarning, match="cannot be verified"),
            pytest.raises(UserError, match="is damaged, or was not written by this program"),
        ):
            RunFolder(tmp_path).model("fedavg", 0)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
)
DATA = Dataset("my", torch.zeros(12, 2), torch.arange(12) % 3, 3)


@settings(max_examples=60, deadline=None)
@given(
    clients=VALUES
    | st.lists(
        st.lists(st.integers(-1, 12)) | st.fixed_dictionaries({"train": VALUES, "test": VALUES})
    )
)
def test_any_json_is_a_partition_or_a_sentence(clients, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(
        json.dumps({"format": "fedala-partition", "version": 1, "samples": 12, "clients": clients})
    )
    with contextlib.suppress(UserError):
        federation = federate(DATA, str(path), None)
        given_away = np.concatenate([*federation.train, *federation.validation, *federation.test])
        assert len(set(given_away.tolist())) == len(given_away)
        assert all(0 <= index < 12 for index in given_away)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*Config.__dataclass_fields__]) | st.text(max_size=9), VALUES, max_size=4
    )
)
def test_any_values_are_a_config_or_a_sentence(values):
    with contextlib.suppress(UserError):
        config = Config.from_values(values)
        assert Config.from_values(tomllib.loads(config.text())) == config


@given(st.text(max_size=3000))
def test_a_sentence_is_one_line_that_can_be_shown(text):
    said = str(UserError(f"{text}."))
    assert said.isprintable()
    assert len(said) <= 1010
    assert said.endswith(".")
