"""A client's state is where the node's operator says, and nobody else's: no link leads it elsewhere."""

import os
import stat

import pytest
import torch

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from fedala import UserError  # noqa: E402
from fedala.flower.client_store import Kept  # noqa: E402

STATE = {"local": {"w": torch.ones(1, 2)}}


@pytest.mark.parametrize("place", ["state", "state/experiment", "state/experiment/client-00000"])
@pytest.mark.parametrize("dangles", [False, True])
def test_a_link_in_the_place_of_a_folder_is_not_followed(place, dangles, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    if not dangles:
        elsewhere.mkdir()
    link = tmp_path / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere)
    with pytest.raises(UserError, match=f"{link} is a link"):
        Kept(tmp_path / "state", "experiment", "client-00000")
    assert dangles or not list(elsewhere.iterdir())


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "state").write_text("mine")
    with pytest.raises(UserError, match="cannot hold a client's state"):
        Kept(tmp_path / "state", "experiment", "client-00000")


def test_a_link_in_the_place_of_a_state_is_set_aside_and_not_read(tmp_path):
    kept = Kept(tmp_path, "experiment", "client-00000")
    kept.save(1, STATE)
    theirs = tmp_path / "theirs"
    kept.path(1).rename(theirs)
    kept.path(1).symlink_to(theirs)
    before = theirs.read_bytes()
    assert kept.load(1) is None
    assert not kept.path(1).exists()
    kept.path(1).symlink_to(tmp_path / "nowhere")
    assert kept.load(1) is None
    kept.path(1).symlink_to(theirs)
    kept.save(1, STATE)
    assert not kept.path(1).is_symlink()
    model = kept.folder / "model.safetensors"
    model.symlink_to(theirs)
    kept.save_model({"w": torch.zeros(2)})
    assert not model.is_symlink()
    assert theirs.read_bytes() == before


def test_folders_that_are_there_are_closed_to_others(tmp_path):
    """The operator's own folder stays readable for whoever could read it, and is writable for its owner alone."""
    root = tmp_path / "state"
    folder = root / "experiment" / "client-00000"
    folder.mkdir(parents=True)
    for path in (root, folder.parent, folder):
        path.chmod(0o777)
    Kept(root, "experiment", "client-00000")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (root, folder.parent, folder)]
    assert modes == [0o755, 0o700, 0o700]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
@pytest.mark.parametrize(
    ("mode", "is_refused"),
    [(0o777, True), (0o1777, False), (0o755, False)],
    ids=["open", "sticky", "closed"],
)
def test_a_folder_of_somebody_else_is_used_only_if_they_cannot_exchange_ours(
    mode, is_refused, tmp_path
):
    root = tmp_path / "state"
    root.mkdir()
    root.chmod(mode)
    os.chown(root, 12345, 12345)
    if is_refused:
        with pytest.raises(UserError, match="belongs to another user"):
            Kept(root, "experiment", "client-00000")
        return
    kept = Kept(root, "experiment", "client-00000")
    os.chown(kept.folder, 12345, 12345)
    with pytest.raises(UserError, match="client-00000 belongs to another user"):
        Kept(root, "experiment", "client-00000")


def test_files_of_other_names_are_left_alone(tmp_path):
    kept = Kept(tmp_path, "experiment", "client-00000")
    for name in ("round-x.safetensors", "round-000001.safetensors.damaged-1", "round-.safetensors"):
        (kept.folder / name).write_bytes(b"")
    kept.save(2, STATE)
    assert kept.rounds() == [2]
