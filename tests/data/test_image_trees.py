"""Levels of folders in an image tree: parts, clients and classes, or one sentence."""

import pytest
from PIL import Image

from fedala.data import federate, load
from fedala.data.images import read_plain_images
from fedala.errors import UserError


def draw(root, *paths, mode="L"):
    for number, path in enumerate(paths):
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        colour = 40 * number if mode in ("L", "1") else (40 * number,) * len(mode)
        Image.new(mode, (8, 8), colour).save(file)
    return root


SITES = [
    f"{site}/{part}/{kind}/{i}.png"
    for site in ("north", "south")
    for part in ("test", "train")
    for kind in ("cat", "dog")
    for i in range(2)
]


def test_clients_may_hold_the_parts(tmp_path):
    above = [f"{part}/{site}/{rest}" for site, part, rest in (path.split("/", 2) for path in SITES)]
    inside = load(str(draw(tmp_path / "a", *SITES)), clients_by="folder")
    usual = load(str(draw(tmp_path / "b", *above)), clients_by="folder")
    assert inside.class_names == ("cat", "dog")
    assert inside.client_names == ("north", "south")
    for one, other in ((inside.y, usual.y), (inside.clients, usual.clients)):
        assert one.tolist() == other.tolist()
    assert inside.split.tolist() == usual.split.tolist() == [0] * 8 + [2] * 8
    assert [len(rows) for rows in federate(inside).test] == [4, 4]


def test_hidden_images_are_not_samples(tmp_path):
    hidden = ["cat/.ipynb_checkpoints/0-checkpoint.png", "dog/.0.png"]
    paths = ["cat/0.png", "cat/far/1.png", "dog/0.png"]
    folder = draw(tmp_path / ".mine" / "photos", *paths, *hidden)
    (folder / "dog" / "._0.png").write_bytes(b"what macOS leaves")
    assert load(str(folder)).y.tolist() == [0, 0, 1]
    files, _ = read_plain_images(folder)
    assert [file.relative_to(folder).as_posix() for file in files] == paths


def test_folders_of_parts_have_several_names(tmp_path):
    data = load(
        str(draw(tmp_path, *(f"{p}/{c}/1.png" for p in ("Training", "Testing") for c in "ab")))
    )
    assert data.class_names == ("a", "b")
    assert data.split.tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("paths", "clients_by", "message"),
    [
        (SITES, None, "folders of the same names .test, train.: if they are the clients, name"),
        (
            [path.replace("/train", "").replace("/test", "") for path in SITES],
            None,
            "north, south hold no images themselves.*clients_by='folder'",
        ),
        (
            [f"train/{path}" for path in ("ada/cat/1.png", "ada/dog/1.png", "bob/dog/1.png")],
            None,
            "ada, bob hold no images.*clients_by='folder'",
        ),
        ([*SITES, "west/cat/1.png"], "folder", "either all clients have parts"),
        ([f"train/{path}" for path in SITES], "folder", "either all clients have parts"),
        (
            [f"{site}/{kind}/{day}/1.png" for site in "pq" for kind in "ab" for day in "12"],
            "folder",
            "same names .1, 2.: remove one level",
        ),
    ],
)
def test_a_level_too_many_is_refused(tmp_path, paths, clients_by, message):
    with pytest.raises(UserError, match=message):
        load(str(draw(tmp_path, *paths)), clients_by=clients_by)


@pytest.mark.parametrize(
    "paths",
    [
        ["cat/images/1.png", "dog/images/1.png"],  # as in Tiny ImageNet
        ["cat/tabby/1.png", "cat/siam/1.png", "dog/pug/1.png"],
        ["cat/1.png", "cat/new/1.png", "cat/old/2.png", "dog/new/1.png", "dog/old/2.png"],
    ],
)
def test_folders_within_a_class_are_one_class(tmp_path, paths):
    assert load(str(draw(tmp_path, *paths))).class_names == ("cat", "dog")


def test_converted_images_are_counted(tmp_path):
    draw(tmp_path, "cat/1.png", "dog/1.png")
    assert load(str(tmp_path)).notes == ()
    draw(tmp_path, "cat/2.png", mode="RGB")
    draw(tmp_path, "dog/2.png", mode="RGBA")
    data = load(str(tmp_path))
    assert data.x.shape == (4, 3, 8, 8)
    assert data.notes == (
        "2 of 4 images are grey; all are read as RGB.",
        "1 of 4 images has an alpha channel, which is left out.",
    )
