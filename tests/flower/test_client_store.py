"""A client's state is private, in the folder that the node's operator chose. Links are refused."""

import os
import stat

import pytest
import torch

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from fedala import UserError  # noqa: E402
from fedala.flower.client_store import ClientStore  # noqa: E402

STATE = {"local": {"w": torch.ones(1, 2)}}


@pytest.mark.parametrize("folder", ["state", "state/experiment", "state/experiment/client-00000"])
@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_link_instead_of_a_folder_is_refused(folder, is_dangling, tmp_path):
    target = tmp_path / "elsewhere"
    if not is_dangling:
        target.mkdir()
    link = tmp_path / folder
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    with pytest.raises(UserError, match=f"{link} is a link"):
        ClientStore(tmp_path / "state", "experiment", "client-00000")
    assert is_dangling or not list(target.iterdir())


def test_a_file_instead_of_a_folder_is_refused(tmp_path):
    (tmp_path / "state").write_text("mine")
    with pytest.raises(UserError, match="cannot hold a client's state"):
        ClientStore(tmp_path / "state", "experiment", "client-00000")


def test_a_link_instead_of_a_state_is_set_aside_and_not_read(tmp_path):
    store = ClientStore(tmp_path, "experiment", "client-00000")
    store.save(1, STATE)
    other = tmp_path / "other"
    store.state_path(1).rename(other)
    store.state_path(1).symlink_to(other)
    before = other.read_bytes()
    assert store.load(1) is None
    assert not store.state_path(1).exists()
    store.state_path(1).symlink_to(tmp_path / "nowhere")
    assert store.load(1) is None
    store.state_path(1).symlink_to(other)
    store.save(1, STATE)
    assert not store.state_path(1).is_symlink()
    model = store.folder / "model.safetensors"
    model.symlink_to(other)
    store.save_model({"w": torch.zeros(2)})
    assert not model.is_symlink()
    assert other.read_bytes() == before


def test_existing_folders_become_private(tmp_path):
    """The operator's own folder stays readable for others, but only its owner can write to it."""
    root = tmp_path / "state"
    folder = root / "experiment" / "client-00000"
    folder.mkdir(parents=True)
    for path in (root, folder.parent, folder):
        path.chmod(0o777)
    ClientStore(root, "experiment", "client-00000")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (root, folder.parent, folder)]
    assert modes == [0o755, 0o700, 0o700]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
@pytest.mark.parametrize(
    ("mode", "is_refused"),
    [(0o777, True), (0o1777, False), (0o755, False)],
    ids=["open", "sticky", "closed"],
)
def test_a_folder_of_another_user_is_used_only_if_they_cannot_replace_our_files(
    mode, is_refused, tmp_path
):
    root = tmp_path / "state"
    root.mkdir()
    root.chmod(mode)
    os.chown(root, 12345, 12345)
    if is_refused:
        with pytest.raises(UserError, match="belongs to another user"):
            ClientStore(root, "experiment", "client-00000")
        return
    store = ClientStore(root, "experiment", "client-00000")
    os.chown(store.folder, 12345, 12345)
    with pytest.raises(UserError, match="client-00000 belongs to another user"):
        ClientStore(root, "experiment", "client-00000")


def test_files_with_other_names_are_ignored(tmp_path):
    store = ClientStore(tmp_path, "experiment", "client-00000")
    for name in ("round-x.safetensors", "round-000001.safetensors.damaged-1", "round-.safetensors"):
        (store.folder / name).write_bytes(b"")
    store.save(2, STATE)
    assert store.list_rounds() == [2]
