"""Clients' states on a machine: listed, exported for use elsewhere, and deleted on request."""

import os
import time

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.mod_rounds import (  # noqa: E402
    RUN,
    App,
    LegacyApp,
    make_context,
    make_global,
    make_model,
    read_files,
    setup,
)

from fedala import UserError  # noqa: E402
from fedala.cli.app import app as cli  # noqa: E402
from fedala.flower import ala_mod, load_personal  # noqa: E402
from fedala.flower.client_store import ClientStore  # noqa: E402
from fedala.flower.stored_states import list_states, select_states  # noqa: E402


def call(folder, *words, input=None):
    """Call `fedala flower …`; return its exit code and what it printed, in one line."""
    done = CliRunner().invoke(cli, ["flower", *words, "--state-dir", str(folder)], input=input)
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def folder(tmp_path):
    """Two clients of the experiment ward, a run without a name, and files of somebody else."""
    folder = tmp_path / "state"
    named, unnamed = App(ala_mod(setup, experiment="ward")), App(ala_mod(setup))
    for client in (0, 3):
        for round in range(client + 1):
            named.call(
                "train", make_global(round), make_context(folder, **{"partition-id": client})
            )
    unnamed.call("train", make_global(0), make_context(folder))
    other = folder / "my data" / "client-00000"
    other.mkdir(parents=True)
    (other / "model.safetensors").write_text("mine")
    (folder / "ward" / "client-00000" / "notes.txt").write_text("mine")
    (folder / "link").symlink_to(folder / "ward")
    two_days_ago = time.time() - 2 * 86_400
    os.utime(next((folder / "ward" / "client-00003").iterdir()), (two_days_ago, two_days_ago))
    return folder


def test_the_list_has_every_state_and_nothing_else(folder):
    states = list_states(folder)
    assert [(state.experiment, state.client, state.round) for state in states] == [
        (f"run-{RUN}", "client-00000", 1),
        ("ward", "client-00000", 1),
        ("ward", "client-00003", 4),
    ]
    [file] = (folder / "ward" / "client-00003").iterdir()
    assert (states[2].size, states[2].changed) == (file.stat().st_size, file.stat().st_mtime)
    assert [state.belongs_to_run for state in states] == [True, False, False]
    code, text = call(folder, "state", "list")
    assert code == 0
    assert text.count("belongs to one run") == 2  # in its row, and in the sentence
    assert "3 states, " in text
    assert time.strftime("%Y-%m-%d", time.localtime(states[2].changed)) in text


def test_an_empty_folder_is_no_mistake(tmp_path):
    code, text = call(tmp_path, "state", "list")
    assert code == 0
    assert f"No client has stored anything in {tmp_path}." in text.replace("\n", "")
    code, text = call(tmp_path / "nowhere", "state", "list")
    assert code == 2
    assert "is not a folder" in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"experiment": "ward"}, ["ward/client-00000", "ward/client-00003"]),
        ({"client": 0}, [f"run-{RUN}/client-00000", "ward/client-00000"]),
        ({"client": "client-00003"}, ["ward/client-00003"]),
        ({"older_than": 1}, ["ward/client-00003"]),
        ({"older_than": 3}, []),
        ({"runs": True}, [f"run-{RUN}/client-00000"]),
        ({"runs": True, "older_than": 1}, []),
    ],
    ids=["experiment", "number", "name", "old", "older", "runs", "old-runs"],
)
def test_states_are_selected(folder, options, expected):
    assert [state.title for state in select_states(list_states(folder), **options)] == expected


def test_clearing_asks_and_deletes_only_what_was_named(folder):
    before = read_files(folder)
    for words, input, code in (
        (("--experiment", "ward", "--dry-run"), None, 0),
        (("--experiment", "ward"), "n\n", 1),
        (("--experiment", "nothing", "--yes"), None, 0),
        ((), None, 2),
        (("--all", "--runs", "--yes"), None, 2),
        (("--older-than", "-1", "--yes"), None, 2),
    ):
        assert call(folder, "state", "clear", *words, input=input)[0] == code, words
        assert read_files(folder) == before
    code, text = call(folder, "state", "clear", "--experiment", "ward", input="y\n")
    assert code == 0
    assert "Delete 2 states, " in text
    assert "within the last hour" in text
    after = read_files(folder)
    assert after.keys() < before.keys()
    assert set(before) - set(after) == {
        "ward/client-00000/round-000001.safetensors",
        "ward/client-00003",
        "ward/client-00003/round-000004.safetensors",
    }
    assert call(folder, "state", "clear", "--all", "--yes")[0] == 0
    assert f"run-{RUN}" not in read_files(folder)
    assert read_files(folder)["my data/client-00000/model.safetensors"] == b"mine"


def test_a_link_is_not_followed(folder):
    (folder / "ward" / "client-00007").symlink_to(folder / "ward" / "client-00003")
    assert len(list_states(folder)) == 3
    call(folder, "state", "clear", "--client", "7", "--yes")
    assert (folder / "ward" / "client-00003").is_dir()


def test_the_personal_model_is_what_training_returned(folder, tmp_path):
    app = App(ala_mod(setup, experiment="ward"))
    context = make_context(folder, **{"partition-id": 3})
    reply, _ = app.call("train", make_global(9), context)
    expected = reply["arrays"].to_torch_state_dict()
    personal = load_personal("ward", 3, state_dir=folder)
    make_model().load_state_dict(personal)
    out = tmp_path / "model.safetensors"
    words = ("export", "--experiment", "ward", "--client", "3", "--out", str(out))
    code, text = call(folder, *words)
    assert code == 0
    assert "(ward/client-00003, after round 5)" in text
    for model in (personal, load_file(out)):
        assert set(model) == set(expected)
        assert all(torch.equal(model[name], value) for name, value in expected.items())
    with safe_open(out, "pt") as file:
        about = file.metadata()
    assert (about["experiment"], about["client"], about["round"]) == ("ward", "client-00003", "5")
    before = out.read_bytes()
    code, text = call(folder, *words)
    assert (code, out.read_bytes()) == (2, before)
    assert "--force" in text
    assert call(folder, *words, "--force")[0] == 0


def test_arrays_without_names_get_those_of_the_model(tmp_path):
    app = LegacyApp(ala_mod(setup))
    result = app.call("train", make_global(0), make_context(tmp_path))
    personal = load_personal(state_dir=tmp_path)
    assert list(personal) == list(make_model().state_dict())
    for value, tensor in zip(personal.values(), result.parameters.tensors, strict=True):
        assert np.ascontiguousarray(value.numpy()).tobytes() in tensor


@pytest.mark.parametrize(
    ("experiment", "client", "message"),
    [
        (None, None, "holds 3 such states: name the experiment"),
        ("ward", None, "There are ward/client-00000, ward/client-00003"),
        ("other", None, "holds no such state"),
        ("ward", 4, f"It has run-{RUN}/client-00000, ward"),
    ],
    ids=["any", "experiment", "unknown", "client"],
)
def test_an_unclear_choice_says_what_there_is(folder, experiment, client, message):
    with pytest.raises(UserError, match=message):
        load_personal(experiment, client, state_dir=folder)


def test_other_formats_are_refused(folder, tmp_path):
    code, text = call(folder, "export", "--client", "3", "--out", str(tmp_path / "model.onnx"))
    assert code == 2
    assert "must end with .safetensors" in text
    assert not (tmp_path / "model.onnx").exists()


def test_a_damaged_state_is_refused_and_stays(folder):
    [file] = (folder / "ward" / "client-00003").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    before = read_files(folder)
    with pytest.raises(UserError, match="client-00003"):
        load_personal("ward", 3, state_dir=folder)
    assert read_files(folder) == before


def test_a_client_of_our_own_app_has_its_model_after_the_last_round(tmp_path):
    store = ClientStore(tmp_path, "fedala", "client-00000")
    store.save(1, {"local": {"w": torch.ones(1, 2)}, "ala": {}}, method="fedala")
    with pytest.raises(UserError, match="no personal model yet"):
        load_personal(state_dir=tmp_path)
    store.save_model({"w": torch.ones(2)})
    assert torch.equal(load_personal(state_dir=tmp_path)["w"], torch.ones(2))
