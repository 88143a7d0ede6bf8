"""LEAF's JSON files: users with their samples."""

import json

import pytest

from fedala.data import federate, load
from fedala.errors import UserError


def write(path, **users):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    sizes = [len(y) for _, y in users.values()]
    content = {"users": list(users), "num_samples": sizes, "user_data": data}
    path.write_text(json.dumps(content))


def test_users_are_clients_and_folders_are_parts(tmp_path):
    write(tmp_path / "train" / "all_data_0.json", bob=([[1, 2], [3, 4]], [0, 1]), nobody=([], []))
    write(tmp_path / "train" / "all_data_1.json", ada=([[5, 6.5], [7, 8]], [1, 1]))
    write(tmp_path / "test" / "all_data_0.json", ada=([[9, 10]], [0]), bob=([[0, 0]], [1]))
    own = load(str(tmp_path))
    assert own.client_names == ("ada", "bob")
    assert own.clients.tolist() == [1, 1, 0, 0, 0, 1]
    assert own.x.tolist() == [[1, 2], [3, 4], [5, 6.5], [7, 8], [9, 10], [0, 0]]
    assert own.y.tolist() == [0, 1, 1, 1, 0, 1]
    assert own.split.tolist() == [0, 0, 0, 0, 2, 2]
    assert own.notes == (f"The files of {tmp_path} name 2 users, who are the clients.",)
    assert [len(rows) for rows in federate(own).test] == [1, 1]


def test_one_file_has_no_parts_and_784_numbers_are_an_image(tmp_path):
    write(tmp_path / "all.json", ada=([[0.5] * 784, [1] * 784], ["b", "a"]))
    own = load(str(tmp_path / "all.json"))
    assert tuple(own.x.shape) == (2, 1, 28, 28)
    assert (own.class_names, own.y.tolist(), own.split) == (("a", "b"), [1, 0], None)
    assert "read as images of 28×28 pixels" in own.notes[1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([1], "not in LEAF's layout"),
        ({"user_data": [1]}, "not in LEAF's layout"),
        ({"user_data": {"u": 3}}, "user u must have two lists of one length"),
        ({"user_data": {"u": {"x": [[1]], "y": [0, 1]}}}, "two lists of one length"),
        ({"user_data": {"u": {"x": ["to be"], "y": ["o"]}}}, "write texts to a .csv file"),
        ({"user_data": {"u": {"x": [[1], [1, 2]], "y": [0, 1]}}}, "all of one length"),
        ({"user_data": {"u": {"x": [[1], [True]], "y": [0, 1]}}}, "a list of numbers"),
        ({"user_data": {"u": {"x": [[1], [2]], "y": [0, None]}}}, "label must be a number"),
        (
            {"user_data": {"u": {"x": [[1]], "y": [0]}, "v": {"x": [[1, 2]], "y": [1]}}},
            "more numbers than others",
        ),
        ({"user_data": {}}, "is empty"),
    ],
)
def test_an_unsound_file(tmp_path, content, says):
    (tmp_path / "d.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=says):
        load(str(tmp_path / "d.json"))


def test_options_that_do_not_apply_are_refused(tmp_path):
    write(tmp_path / "d.json", ada=([[1], [2]], [0, 1]))
    with pytest.raises(UserError, match="leave clients_by out"):
        load(str(tmp_path / "d.json"), clients_by="user")
    with pytest.raises(UserError, match="label_column is for tables"):
        load(str(tmp_path / "d.json"), label_column="y")
