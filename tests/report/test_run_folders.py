"""Run folders from anywhere: a damaged one is refused in one sentence, odd values show as text."""

import json
import os
import re
from pathlib import Path

import pytest
from folders import made_up

from fedala.errors import UserError
from fedala.report import page


def name_missing_folder(path):
    return path / "nothing"


def make_empty_folder(path):
    (path / "empty").mkdir()
    return path / "empty"


def make_begun_folder(path):
    folder = made_up(path / "run")
    (folder.path / "history.csv").unlink()
    return folder.path


def replace_file(name, text):
    def make(path):
        folder = made_up(path / "run")
        (folder.path / name).write_text(text)
        return folder.path

    return make


CLIENTS = "method,seed,round,client,samples,accuracy,loss\nfedala,0,6,0,{},0.5,0.5\n"


def damage_line(number, line):
    def make(path):
        folder = made_up(path / "run")
        lines = (folder.path / "history.csv").read_text().splitlines()
        (folder.path / "history.csv").write_text(
            "\n".join([*lines[:number], line, *lines[number + 1 :]]) + "\n"
        )
        return folder.path

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (name_missing_folder, "There is no folder"),
        (make_empty_folder, "is not a run folder, and contains none"),
        (make_begun_folder, "nothing to report yet"),
        (replace_file("config.toml", "a: b"), "cannot be read"),
        (replace_file("summary.json", "{"), "not readable JSON"),
        (replace_file("summary.json", "[" * 99_999), "nested too deeply"),
        (replace_file("summary.json", '{"command": "\\ud800"}'), "text that is not Unicode"),
        (replace_file("summary.json", '{"seconds": 1, "seconds": 2}'), "'seconds' is there twice"),
        (replace_file("summary.json", '{"seconds": 1' + "0" * 400 + "}"), "more than 64 bits"),
        (replace_file("summary.json", "[1]"), "is not a run's summary"),
        (replace_file("history.csv", "method,seed\nfedavg,0\n"), "not the table of a run"),
        (
            replace_file("history.csv", "method,seed,round\nfedavg,zero,0\n"),
            "history.csv is damaged",
        ),
        (
            replace_file("history.csv", "method,seed,round\nfedavg,0,0,0,0\n"),
            "nothing to report yet",
        ),
        (
            damage_line(3, "fedala,0,1,0.2"),
            "damaged, or not the table of a run: line 4 has not as many columns",
        ),
        (damage_line(3, "fedala,0,1,5.0,0,0,1,1,1,0,1"), "an accuracy of 5.0 is not from 0 to 1"),
        (
            replace_file("weights.csv", "method\nfedavg\n"),
            "weights.csv is damaged, or not the table",
        ),
        (
            replace_file("split.csv", "client,class,name,train,validation,test\nnan,0,a,1,1,1\n"),
            "client is nan, which is not a whole number",
        ),
        (
            replace_file("split.csv", "client,class,name,train,validation,test\n0,0,a,-1,1,1\n"),
            "train is -1, which is less than 0",
        ),
        (
            replace_file("clients.csv", CLIENTS.format("1" + "0" * 400)),
            "a number of more than 64 bits",
        ),
        (
            replace_file("clients.csv", CLIENTS.format(2**63)),
            "samples is 9223372036854775808, which has more than 64 bits",
        ),
        (
            replace_file("clients.csv", CLIENTS.format("1" + "0" * 5000)),
            "clients.csv is damaged",
        ),
        (
            damage_line(3, "fedala,0,1,0.5,0,-2,1,1,1,0,1"),
            "accuracy_joined is -2, which is not from 0 to 1",
        ),
        (damage_line(3, "fedala,0,1,0.5,0,0.5,1,1,1,0,-1"), "seconds is -1, which is not a time"),
        (damage_line(3, "fedala,0,1,0.5,0,0.5,1,1,1,0,inf"), "seconds is inf, which is not a time"),
        (damage_line(3, "fedala,0,-1,0.5,0,0.5,1,1,1,0,1"), "round is -1, which is less than 0"),
    ],
)
def test_a_folder_that_cannot_be_reported_is_one_sentence(tmp_path, make, says):
    with pytest.raises(UserError, match=says) as refusal:
        page.write([make(tmp_path)])
    assert re.fullmatch(r"[^\n]+\.", str(refusal.value))


@pytest.mark.parametrize(
    "value", [None, True, -1, 0.5, 2**62, "x\n<b>", [], [[1]], {}, {"a": {"b": [None]}}]
)
@pytest.mark.parametrize(
    "key", ["methods", "seconds", "command", "versions", "data", "majority_share"]
)
def test_a_summary_of_other_types_is_shown_as_text(tmp_path, key, value):
    folder = made_up(tmp_path / "run")
    for summary in (
        {key: value},
        {key: {"fedala": value, "title": value}},
        {key: {"fedala": {"title": value}}},
    ):
        (folder.path / "summary.json").write_text(json.dumps(summary))
        text = page.write([folder.path]).read_text(encoding="utf-8")
        assert "<b>" not in text


@pytest.mark.parametrize("word", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_shown(tmp_path, word):
    """A run whose clients diverged writes such numbers."""
    folder = made_up(tmp_path / "run")
    (folder.path / "summary.json").write_text(
        f'{{"seconds": {word}, "versions": {{"torch": {word}}}}}'
    )
    assert "nan" in page.write([folder.path]).read_text(encoding="utf-8") or word != "NaN"


@pytest.mark.parametrize(
    "name",
    ["summary.json", "history.csv", "clients.csv", "split.csv", "weights.csv", "resumed.csv"],
)
@pytest.mark.parametrize("kind", ["pipe", "zeros", "folder"])
def test_pipes_devices_and_folders_are_not_ignored(tmp_path, name, kind):
    path = made_up(tmp_path / "run").path / name
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "zeros":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
    with pytest.raises(UserError, match=f"{name} is not a file"):
        page.write([path.parent])


def test_a_folder_whose_name_is_not_unicode_is_reported(tmp_path):
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[2J"))
    place.mkdir()
    runs_ = [made_up(place / name).path for name in ("a", "b")]
    text = page.write([*runs_, made_up(tmp_path / "c").path], tmp_path / "all.html").read_text(
        encoding="utf-8"
    )
    assert "\ufffd\ufffd[2J/a" in text


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path):
    folder = made_up(tmp_path / "run")
    with pytest.raises(UserError, match="its folder must exist"):
        page.write([folder.path], tmp_path / "no" / "x.html")
    with pytest.raises(UserError, match="cannot be written"):
        page.write([folder.path], tmp_path / ("x" * 300 + ".html"))
