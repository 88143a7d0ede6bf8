"""Decoded samples from the cache are those of the files, or the cache does not count."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

from fedala.data import cache, decoding, load, text
from fedala.errors import CacheWarning, UserError
from fedala.io import image_files, tensor_files

RANDOM = np.random.default_rng(0)


def draw(path, size=(10, 8), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], len(mode)) if len(mode) > 1 else (size[1], size[0])
    Image.fromarray(RANDOM.integers(0, 256, shape, dtype=np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path):
    """Return a folder of images, as it must look to be called large."""
    for label in ("cat", "dog"):
        for number in range(4):
            draw(tmp_path / "photos" / label / f"{number}.jpg")
    return tmp_path / "photos"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Cache small datasets, and files that have just been written."""
    monkeypatch.setattr(decoding, "_MANY_IMAGES", 2)
    monkeypatch.setattr(text, "_MANY_TEXTS", 2)
    monkeypatch.setattr(cache, "_SAME_TIME", -3600)
    monkeypatch.setattr(decoding, "count_cores", lambda: 1)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def decoded(monkeypatch):
    """List how many images are decoded at a time, from now on."""
    counts = []
    decode_block = decoding.decode_block

    def count(sources, *rest):
        counts.append(len(sources))
        return decode_block(sources, *rest)

    monkeypatch.setattr(decoding, "decode_block", count)
    return counts


def read_plainly(folder):
    """Decode the images of a folder as one would by hand."""
    files = sorted(folder.rglob("*.jpg"))
    return np.stack([np.asarray(Image.open(file)).transpose(2, 0, 1) for file in files])


def the_file(folder):
    [file] = folder.glob("*.safetensors")
    return file


@pytest.mark.parametrize("resize", [None, 6])
def test_the_cache_holds_what_the_files_hold(folder, kept, decoded, monkeypatch, resize):
    first = load(str(folder), resize=resize)
    assert decoded == [8]
    second = load(str(folder), resize=resize)
    assert decoded == [8]
    monkeypatch.setenv(cache.VARIABLE, "off")
    without = load(str(folder), resize=resize)
    assert decoded == [8, 8]
    for other in (first, second):
        assert other.x.equal(without.x)
        assert other.y.equal(without.y)
        assert other.notes == without.notes
    if resize is None:
        np.testing.assert_array_equal(second.x.numpy(), read_plainly(folder))


def test_another_way_to_the_same_folder(folder, kept, decoded, monkeypatch):
    (folder.parent / "link").symlink_to(folder)
    monkeypatch.chdir(folder.parent)
    for name in (str(folder), "photos", "./photos", "link"):
        load(name)
    assert decoded == [8]


def test_sizes_are_kept_apart(folder, kept, decoded):
    sides = [load(str(folder), resize=side).x.shape[-1] for side in (5, 6, 5, 6)]
    assert (sides, decoded) == ([5, 6, 5, 6], [8, 8])


def test_notes_are_kept(folder, kept, decoded):
    draw(folder / "cat" / "9.png", mode="L")
    notes = [load(str(folder)).notes for _ in range(2)]
    assert notes == [("1 of 9 images is grey; all are read as RGB.",)] * 2
    assert decoded == [9]


def rewrite_in_place(folder):
    """Other content of the same length, with the old time of the file."""
    file = folder / "cat" / "1.jpg"
    marks, size = file.stat(), file.stat().st_size
    draw(file)
    content = file.read_bytes()
    file.write_bytes(
        content[:size] if len(content) > size else content + bytes(size - len(content))
    )
    os.utime(file, ns=(marks.st_atime_ns, marks.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (size, marks.st_mtime_ns)


def replace_with_older(folder):
    draw(folder.parent / "other.jpg")
    os.utime(folder.parent / "other.jpg", (0, 0))
    os.replace(folder.parent / "other.jpg", folder / "cat" / "1.jpg")


def swap(folder):
    one, other, third = (folder / "cat" / name for name in ("1.jpg", "2.jpg", "x"))
    for source, target in ((one, third), (other, one), (third, other)):
        source.rename(target)


def link(folder):
    draw(folder.parent / "other.jpg")
    (folder / "cat" / "1.jpg").unlink()
    (folder / "cat" / "1.jpg").symlink_to(folder.parent / "other.jpg")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: draw(folder / "cat" / "1.jpg"),
        lambda folder: draw(folder / "cat" / "9.jpg"),
        lambda folder: (folder / "cat" / "1.jpg").unlink(),
        lambda folder: (folder / "cat" / "1.jpg").rename(folder / "cat" / "9.jpg"),
        lambda folder: (folder / "cat" / "1.jpg").rename(folder / "dog" / "1b.jpg"),
        rewrite_in_place,
        replace_with_older,
        swap,
        link,
    ],
    ids=[
        "changed", "added", "removed", "renamed", "moved",
        "same-size-and-time", "replaced", "swapped", "linked",
    ],
)  # fmt: skip
def test_a_change_of_the_files_counts(folder, kept, change):
    before = load(str(folder)).x
    change(folder)
    after = load(str(folder)).x
    np.testing.assert_array_equal(after.numpy(), read_plainly(folder))
    assert not after.equal(before)
    assert len(list(kept.glob("*.safetensors"))) == 1, "the earlier file stays"


def test_a_copy_elsewhere_is_another_dataset(folder, kept, decoded):
    load(str(folder))
    shutil.copytree(folder, folder.parent / "copy")
    load(str(folder.parent / "copy"))
    assert decoded == [8, 8]


@pytest.mark.parametrize("age", [1.0, 3.0])
def test_files_that_may_change_unnoticed_are_not_kept(folder, kept, monkeypatch, age):
    """Within two seconds, a second change may leave the time of the first."""
    monkeypatch.setattr(cache, "_SAME_TIME", 2.0)
    newest = max(file.stat().st_ctime for file in folder.rglob("*"))
    monkeypatch.setattr(cache.time, "time", lambda: newest + age)
    load(str(folder))
    assert len(list(kept.glob("*.safetensors"))) == (age > 2)


def test_files_that_change_while_they_are_decoded_are_not_kept(folder, kept, monkeypatch):
    decode_block = decoding.decode_block

    def change(*arguments):
        headers = decode_block(*arguments)
        draw(folder / "cat" / "0.jpg")
        return headers

    monkeypatch.setattr(decoding, "decode_block", change)
    load(str(folder))
    assert not list(kept.glob("*.safetensors"))


def test_another_decoder_decodes_again(folder, kept, decoded, monkeypatch):
    load(str(folder))
    monkeypatch.setattr("PIL.__version__", "0")
    load(str(folder))
    assert decoded == [8, 8]


DAMAGE = {
    "flipped in the pixels": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "another note": lambda data: data.replace(rb"rest\": []", rb"rest\": 12"),
    "cut": lambda data: data[:-1],
    "cut in the header": lambda data: data[:20],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"0",
    "zeros": lambda data: bytes(len(data)),
    "a huge header": lambda data: b"\xff" * 8 + data[8:],
    "another shape": lambda data: data.replace(b"[8,3,8,10]", b"[8,3,10,8]"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_noticed_and_repaired(folder, kept, decoded, how):
    before = load(str(folder)).x.clone()
    sound = the_file(kept).read_bytes()
    damaged = DAMAGE[how](sound)
    assert damaged != sound
    the_file(kept).write_bytes(damaged)
    with pytest.warns(CacheWarning, match=r"\.safetensors is damaged, so .* again"):
        assert load(str(folder)).x.equal(before)
    assert decoded == [8, 8]
    assert load(str(folder)).x.equal(before)
    assert decoded == [8, 8], "the file is not sound again"


def test_nothing_is_copied_and_nothing_reaches_the_file(folder, kept):
    load(str(folder))
    data = the_file(kept).read_bytes()
    x = load(str(folder)).x
    if sys.platform == "linux":
        with open("/proc/self/maps", encoding="utf-8") as maps:
            [line] = [line for line in maps if str(the_file(kept)) in line]
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        assert start < x.data_ptr() < end
    x.zero_()
    assert the_file(kept).read_bytes() == data
    the_file(kept).unlink()  # somebody clears the cache
    assert not x.any()


def test_a_file_of_another_user_is_not_damaged(folder, kept, decoded, monkeypatch):
    load(str(folder))
    monkeypatch.setattr(cache.os, "access", lambda *_: False)
    with pytest.warns(CacheWarning) as said:
        load(str(folder))
    assert decoded == [8, 8]
    assert "cannot be read, so the samples are decoded again." in str(said[0].message)


@pytest.mark.parametrize("fault", ["read-only", "full", "too small", "a file", "no locks"])
def test_a_fault_of_the_disk_costs_the_cache_alone(folder, kept, monkeypatch, fault):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if fault == "read-only":
        monkeypatch.setattr(cache.Path, "mkdir", fail)
    elif fault == "full":
        monkeypatch.setattr(tensor_files, "save_file", fail)
    elif fault == "too small":
        usage = shutil.disk_usage("/")
        monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: usage._replace(free=3000))
    elif fault == "a file":
        kept.write_text("not a folder")
    else:
        monkeypatch.setattr(cache.FileLock, "acquire", fail)
    with pytest.warns(CacheWarning, match=r"cannot be kept in .*; FEDALA_CACHE names another"):
        x = load(str(folder)).x
    np.testing.assert_array_equal(x.numpy(), read_plainly(folder))
    assert not [file for file in kept.parent.rglob("*") if file.name.endswith((".new", "ors"))]


def test_two_at_once_decode_once(folder, kept, decoded):
    """The second waits for the first, and takes what it has made."""
    found = []
    threads = [threading.Thread(target=lambda: found.append(load(str(folder)).x)) for _ in range(2)]
    kept.mkdir()
    # Whoever looks finds nothing, and then waits.
    with FileLock(kept / f"{cache._name_file(str(folder), 'images, None')}.lock"):
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    assert found[0].equal(found[1])
    assert decoded == [8]


def test_nobody_waits_for_ever(folder, kept, monkeypatch):
    monkeypatch.setattr(cache, "_PATIENCE", 0.01)
    load(str(folder))
    [path] = kept.glob("*.lock")
    the_file(kept).unlink()
    held = FileLock(path, is_singleton=False)
    with held, pytest.warns(CacheWarning, match="another process"):
        x = load(str(folder)).x
    np.testing.assert_array_equal(x.numpy(), read_plainly(folder))


def test_small_datasets_leave_no_trace(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    load(str(folder))
    assert not (tmp_path / "cache").exists()


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.find_cache_folder() == tmp_path / ".cache" / "fedala"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert str(cache.find_cache_folder()) == "/elsewhere/fedala"
    monkeypatch.setenv(cache.VARIABLE, "~/mine")
    assert cache.find_cache_folder() == tmp_path / "mine"
    monkeypatch.setenv(cache.VARIABLE, "off")
    assert cache.find_cache_folder() is None


def test_texts_are_kept(tmp_path, kept, monkeypatch):
    file = tmp_path / "texts.csv"
    file.write_text("label,text\na,One two\nb,three ‘two’ two\n", encoding="utf-8")
    first = load(str(file))
    with monkeypatch.context() as patch:
        patch.setattr(text, "tokenize", None)
        second = load(str(file))
    assert second.x.equal(first.x)
    assert second.x.dtype == torch.int32
    assert second.tokens == first.tokens == ("two", "one", "three", "‘two’")
    file.write_text("label,text\na,One six\nb,three ‘two’ two\n", encoding="utf-8")
    assert "six" in load(str(file)).tokens


def test_tables_of_images_are_kept(tmp_path, kept, decoded):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def write(*names):
        contents = [(tmp_path / name).read_bytes() for name in names]
        columns = {"image": [{"bytes": content} for content in contents], "label": [0, 1]}
        pq.write_table(pa.table(columns), tmp_path / "images.parquet")

    for name in ("a.png", "b.png", "c.png"):
        draw(tmp_path / name)
    write("a.png", "b.png")
    first, second = (load(str(tmp_path / "images.parquet")).x for _ in range(2))
    assert decoded == [2]
    assert second.equal(first)
    write("a.png", "c.png")
    third = load(str(tmp_path / "images.parquet")).x
    assert third[0].equal(first[0])
    assert not third[1].equal(first[1])


@pytest.fixture
def processes(folder, monkeypatch):
    """Decode in two processes, block by block of three images."""
    monkeypatch.setattr(decoding, "_MANY_IMAGES", 2)
    monkeypatch.setattr(decoding, "_BLOCK_IMAGES", 3)
    monkeypatch.setattr(decoding, "count_cores", lambda: 2)
    started = []

    class Watched(decoding.DecoderProcess):
        def __init__(self):
            super().__init__()
            started.append(self._process)

    monkeypatch.setattr(decoding, "DecoderProcess", Watched)
    yield started
    assert all(process.poll() is not None for process in started), "a process still runs"


@pytest.mark.parametrize("resize", [None, 6])
def test_processes_decode_the_same(folder, processes, monkeypatch, decoded, resize):
    found = load(str(folder), resize=resize).x
    assert len(processes) == 2
    assert decoded == []
    monkeypatch.setattr(decoding, "count_cores", lambda: 1)
    assert found.equal(load(str(folder), resize=resize).x)
    assert decoded == [3, 3, 2]


def test_processes_say_what_is_wrong(folder, processes, monkeypatch):
    draw(folder / "cat" / "0.jpg", mode="L")  # those after it have colours
    (folder / "cat" / "3.jpg").write_bytes(b"nothing")
    draw(folder / "dog" / "3.jpg", size=(9, 9))
    with pytest.raises(UserError, match=r"cat/3\.jpg is not a readable image"):
        load(str(folder))
    draw(folder / "cat" / "3.jpg")
    with pytest.raises(UserError, match=r"dog/3\.jpg has 9×9 pixels, .*cat/0\.jpg has 10×8"):
        load(str(folder))
    draw(folder / "dog" / "3.jpg")
    assert load(str(folder)).notes == ("1 of 8 images is grey; all are read as RGB.",)


@pytest.mark.parametrize("fault", ["killed", "cannot start"])
def test_without_processes_this_one_decodes(folder, processes, decoded, monkeypatch, fault):
    def fail(*_, **__):
        raise OSError(errno.EAGAIN, "no more processes")

    if fault == "cannot start":
        monkeypatch.setattr(subprocess, "Popen", fail)
    else:
        monkeypatch.setattr(image_files, "share_code", dict)
        monkeypatch.setattr(image_files.sys, "executable", "false")
    np.testing.assert_array_equal(load(str(folder)).x.numpy(), read_plainly(folder))
    assert sum(decoded) == 8


def test_progress_is_said_now_and_then(folder, monkeypatch, capsys):
    monkeypatch.setattr(decoding, "_BLOCK_IMAGES", 3)
    monkeypatch.setattr(decoding, "_FIRST", 0)
    monkeypatch.setattr(decoding, "_EVERY", 0)
    load(str(folder))
    lines = capsys.readouterr().err.splitlines()
    assert f"{folder}: 3 of 8 images are decoded." in lines


def test_a_command_says_it_in_a_sentence(folder, kept, capsys):
    from fedala.cli.app import app

    load(str(folder))
    the_file(kept).write_bytes(b"")
    with pytest.raises(SystemExit), warnings.catch_warnings(action="always"):
        app(["partition", "--dataset", str(folder), "--clients", "2"])
    said = capsys.readouterr().err
    assert said.startswith("Warning: The cache file ")
    assert "is damaged, so the samples are decoded again." in said
