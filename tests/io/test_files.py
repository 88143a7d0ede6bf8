"""Files that are whole or not there, and trees that come back to the bit."""

import contextlib
import os
import stat
import subprocess
import sys
import threading

import pytest
import torch

from fedala.errors import UserError
from fedala.io import files

TREE = {
    "base": {},
    "local": {"a/b.weight": torch.randn(1, 3, 2), "odd . name\n": torch.tensor([7])},
    "trained": torch.tensor([True, False]),
    "empty": torch.zeros(1, 0, 4),
}


def test_a_tree_comes_back_with_its_words(tmp_path):
    digest = files.save(tmp_path / "t.safetensors", TREE, {"round": 3, "β": "ρ"})
    tree, about = files.load(tmp_path / "t.safetensors", digest)
    assert about == {"round": 3, "β": "ρ"}
    assert tree.keys() == TREE.keys()
    assert tree["base"] == {}
    assert tree["local"].keys() == TREE["local"].keys()
    for name, value in TREE["local"].items():
        assert torch.equal(tree["local"][name], value)
    assert torch.equal(tree["trained"], TREE["trained"])
    assert tree["empty"].shape == (1, 0, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(1, 4, 3, 5, 5).squeeze(0).clone(memory_format=torch.channels_last).unsqueeze(0),
        torch.randn(3, 4).T,
        torch.randn(2, 3, 4).permute(1, 2, 0),
        torch.randn(1, 3).expand(4, 3),
        torch.randn(8, 6)[:, ::2],
        torch.randn(4, dtype=torch.float64)[1:3],
        torch.tensor(3.5),
    ],
)
def test_values_come_back_and_so_does_the_order_in_memory(tensor, tmp_path):
    """Torch adds up in the order of memory: another layout would give other last bits."""
    tree, _ = files.unpack(files.pack({"t": tensor}))
    assert torch.equal(tree["t"], tensor)
    dense = tensor.numel() == tensor.untyped_storage().nbytes() // tensor.element_size()
    if dense:
        longer = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
        assert [tree["t"].stride(d) for d in longer] == [tensor.stride(d) for d in longer]


def test_what_is_one_tensor_is_kept_once_and_what_is_a_part_is_taken_out():
    whole = torch.randn(100, 4)
    small, shared = files.pack({"a": whole[:1]}), files.pack({"a": whole, "b": {"c": whole}})
    assert len(small) < 500
    assert len(shared) < len(files.pack({"a": whole})) + 100
    tree, _ = files.unpack(shared)
    assert torch.equal(tree["a"], whole)
    assert torch.equal(tree["b"]["c"], whole)
    overlapping, _ = files.unpack(files.pack({"a": whole[:3], "b": whole[2:5]}))
    assert torch.equal(overlapping["b"], whole[2:5])


def test_another_file_than_the_one_noted_is_refused(tmp_path):
    digest = files.save(tmp_path / "t", TREE)
    files.save(tmp_path / "t", {"other": torch.zeros(1)})
    with pytest.raises(files.Damaged, match="checksum"):
        files.load(tmp_path / "t", digest)


def test_no_damage_goes_unseen_or_ends_in_a_traceback(tmp_path):
    digest = files.save(tmp_path / "t", TREE)
    whole = (tmp_path / "t").read_bytes()
    for end in (0, 1, 8, 40, len(whole) // 2, len(whole) - 1):
        (tmp_path / "t").write_bytes(whole[:end])
        for noted in (digest, None):
            with pytest.raises(files.Damaged, match="damaged"):
                files.load(tmp_path / "t", noted)
    for place in range(len(whole)):
        bits = bytearray(whole)
        bits[place] ^= 16
        (tmp_path / "t").write_bytes(bits)
        with pytest.raises(files.Damaged):
            files.load(tmp_path / "t", digest)
        with contextlib.suppress(files.Damaged):
            files.load(
                tmp_path / "t"
            )  # without a checksum, values may differ, and nothing else may happen
    with pytest.raises(files.Damaged, match="cannot be read"):
        files.load(tmp_path / "none")


@pytest.mark.skipif(os.name == "nt", reason="has no pipes that are files")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "t")
    writer = os.open(tmp_path / "t", os.O_RDWR)
    threading.Timer(1, os.close, [writer]).start()  # or whoever waits would wait for ever
    with pytest.raises(files.Damaged, match="is not a file"):
        files.load(tmp_path / "t")


def test_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "VERSION", 99)
    data = files.pack({})
    monkeypatch.undo()
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(files.Damaged, match="version 99"):
        files.load(tmp_path / "t")


@pytest.mark.parametrize("fault", ["flush", "replace"])
def test_a_fault_leaves_the_old_file_and_nothing_else(fault, tmp_path, monkeypatch):
    files.replace(tmp_path / "f", b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files if fault == "flush" else os, fault, fail)
    with pytest.raises(OSError, match="No space"):
        files.replace(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_link_in_the_way_is_not_followed(tmp_path):
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / ".f.new").symlink_to(tmp_path / "precious")
    files.replace(tmp_path / "f", b"new")
    assert (tmp_path / "precious").read_bytes() == b"mine"
    assert (tmp_path / "f").read_bytes() == b"new"


def test_private_files_are_private(tmp_path):
    files.replace(tmp_path / "f", b"x", private=True)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600


def test_a_lock_is_held_by_one_and_not_by_the_dead(tmp_path):
    hold = f"""
import time, sys, pathlib
from fedala.io import files
with files.lock(pathlib.Path({str(tmp_path / "lock")!r}), "busy"):
    print("held", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="taken"), files.lock(tmp_path / "lock", "taken"):
            pass
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with files.lock(tmp_path / "lock", "taken"):
        pass


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path):
    path = tmp_path / "t"
    files.save(path, {"w": torch.ones(1, 4)}, {"round": 3})
    whole = path.read_bytes()
    places = [len(whole) - 1, len(whole) - 13, whole.index(b"round") + 9]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(files.Damaged):
            files.load(path)
