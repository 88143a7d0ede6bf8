"""Trees of tensors come back from disk to the bit, or with an error."""

import contextlib
import os
import threading

import pytest
import torch

from fedala.io import files, tensor_files

TREE = {
    "base": {},
    "local": {"a/b.weight": torch.randn(1, 3, 2), "odd . name\n": torch.tensor([7])},
    "trained": torch.tensor([True, False]),
    "empty": torch.zeros(1, 0, 4),
}


def test_a_tree_comes_back_with_its_description(tmp_path):
    digest = tensor_files.save(tmp_path / "t.safetensors", TREE, {"round": 3, "β": "ρ"})
    tree, about = tensor_files.load(tmp_path / "t.safetensors", digest)
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
    tree, _ = tensor_files.unpack(tensor_files.pack({"t": tensor}))
    assert torch.equal(tree["t"], tensor)
    dense = tensor.numel() == tensor.untyped_storage().nbytes() // tensor.element_size()
    if dense:
        longer = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
        assert [tree["t"].stride(d) for d in longer] == [tensor.stride(d) for d in longer]


def test_a_shared_tensor_is_stored_once_and_a_part_without_its_whole():
    whole = torch.randn(100, 4)
    small = tensor_files.pack({"a": whole[:1]})
    shared = tensor_files.pack({"a": whole, "b": {"c": whole}})
    assert len(small) < 500
    assert len(shared) < len(tensor_files.pack({"a": whole})) + 100
    tree, _ = tensor_files.unpack(shared)
    assert torch.equal(tree["a"], whole)
    assert torch.equal(tree["b"]["c"], whole)
    overlapping, _ = tensor_files.unpack(tensor_files.pack({"a": whole[:3], "b": whole[2:5]}))
    assert torch.equal(overlapping["b"], whole[2:5])


def test_a_file_with_another_digest_is_refused(tmp_path):
    digest = tensor_files.save(tmp_path / "t", TREE)
    tensor_files.save(tmp_path / "t", {"other": torch.zeros(1)})
    with pytest.raises(files.DamagedFile, match="checksum"):
        tensor_files.load(tmp_path / "t", digest)


def test_no_damage_goes_unseen_or_ends_in_a_traceback(tmp_path):
    digest = tensor_files.save(tmp_path / "t", TREE)
    whole = (tmp_path / "t").read_bytes()
    for end in (0, 1, 8, 40, len(whole) // 2, len(whole) - 1):
        (tmp_path / "t").write_bytes(whole[:end])
        for expected in (digest, None):
            with pytest.raises(files.DamagedFile, match="damaged"):
                tensor_files.load(tmp_path / "t", expected)
    for position in range(len(whole)):
        bits = bytearray(whole)
        bits[position] ^= 16
        (tmp_path / "t").write_bytes(bits)
        with pytest.raises(files.DamagedFile):
            tensor_files.load(tmp_path / "t", digest)
        with contextlib.suppress(files.DamagedFile):
            tensor_files.load(tmp_path / "t")  # without a digest, other values may be read
    with pytest.raises(files.DamagedFile, match="cannot be read"):
        tensor_files.load(tmp_path / "none")


@pytest.mark.skipif(os.name == "nt", reason="has no pipes that are files")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "t")
    writer = os.open(tmp_path / "t", os.O_RDWR)
    threading.Timer(1, os.close, [writer]).start()  # or the reader would wait for ever
    with pytest.raises(files.DamagedFile, match="is not a file"):
        tensor_files.load(tmp_path / "t")


def test_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "VERSION", 99)
    data = tensor_files.pack({})
    monkeypatch.undo()
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(files.DamagedFile, match="version 99"):
        tensor_files.load(tmp_path / "t")


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path):
    path = tmp_path / "t"
    tensor_files.save(path, {"w": torch.ones(1, 4)}, {"round": 3})
    whole = path.read_bytes()
    positions = [len(whole) - 1, len(whole) - 13, whole.index(b"round") + 9]
    for position in positions:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(files.DamagedFile):
            tensor_files.load(path)
