"""A client of `ala_mod` never loses its state in silence, and knows where it is."""

import logging

import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.mod_rounds import RUN, App, make_context, make_global, setup  # noqa: E402

from fedala import UserError  # noqa: E402
from fedala.flower import ala_mod, mod_state  # noqa: E402


@pytest.fixture
def lines(caplog, monkeypatch):
    """Return a function that returns the log's warnings and errors since its last call."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)  # caplog needs it

    def take():
        found = [(record.levelname, record.message) for record in caplog.records]
        caplog.clear()
        return [line for line in found if line[0] in ("WARNING", "ERROR")]

    return take


def train(app, context, rounds=1):
    """Train for some rounds; return the last (ala-lost, ala-new)."""
    for seed in range(rounds):
        _, metrics = app.call("train", make_global(seed), context)
    return metrics["ala-lost"], metrics["ala-new"]


def move(context, folder):
    """Return the same context on a machine with another disk."""
    context.node_config["state-dir"] = str(folder)
    return context


def test_two_machines_without_a_shared_folder_are_noticed_in_every_round(tmp_path, lines):
    """Flower's simulation keeps the context while Ray moves the client between machines."""
    app, context = App(ala_mod(setup)), make_context()
    folders = [tmp_path / name for name in "abab"]
    found = [train(app, move(context, folder)) for folder in folders]
    assert found == [(0, 1), (1, 1), (1, 0), (1, 0)]
    errors = [text for level, text in lines() if level == "ERROR"]
    assert len(errors) == 3
    assert "state of round 1: " in errors[0]
    assert "has none" in errors[0]
    assert "only that of round 1" in errors[1]
    assert all("state_dir=" in text for text in errors)


def test_a_shared_folder_is_silent(tmp_path, lines):
    app, context = App(ala_mod(setup, evaluate=True)), make_context(tmp_path)
    assert [train(app, context) for _ in range(3)] == [(0, 1), (0, 0), (0, 0)]
    _, metrics = app.call("evaluate", make_global(0), context)
    assert metrics["ala-lost"] == 0
    assert not lines()


def test_deleted_files_are_noticed(tmp_path, lines):
    app, context = App(ala_mod(setup, evaluate=True)), make_context(tmp_path)
    train(app, context, 2)
    [file] = tmp_path.rglob("*.safetensors")
    file.unlink()
    _, metrics = app.call("evaluate", make_global(0), context)
    assert metrics["ala-lost"] == 1
    assert train(app, context) == (1, 1)
    assert train(app, context) == (0, 0)
    assert [level for level, _ in lines()] == ["ERROR", "ERROR"]


def test_a_restarted_node_with_its_files_is_fine(tmp_path, lines):
    """A SuperNode that starts again has an empty context."""
    app = App(ala_mod(setup))
    train(app, make_context(tmp_path), 3)
    assert train(app, make_context(tmp_path)) == (0, 0)
    assert not lines()


def test_the_counter_of_another_run_is_ignored(tmp_path, lines):
    """Runs of one series share a context."""
    app, context = App(ala_mod(setup)), make_context(tmp_path)
    train(app, context, 2)
    later = make_context(tmp_path, run=RUN - 1)
    later.state = context.state
    assert train(app, later) == (0, 1)
    assert not lines()


# --- identity ---


def test_a_node_id_as_identity_is_warned_of_once(tmp_path, lines):
    app = App(ala_mod(setup))
    context = make_context(tmp_path, **{"partition-id": None})
    train(app, context, 2)
    [(level, text)] = lines()
    assert level == "WARNING"
    assert "partition-id=" in text
    assert "--auth-supernode-private-key" in text
    assert "LOST" not in text
    # The same node starts again, without a key: the SuperLink gives it another id.
    found = train(app, make_context(tmp_path, node=8, **{"partition-id": None}))
    [(_, text)] = lines()
    assert found == (0, 1)
    assert "1 other nodes. If one of them was this client, it has LOST its state" in text
    # With a registered key, it keeps its id and its files.
    train(app, make_context(tmp_path, **{"partition-id": None}))
    [(_, text)] = lines()
    assert "LOST" not in text


def test_a_partition_id_that_is_not_a_number_is_refused(tmp_path):
    with pytest.raises(UserError, match="partition-id in the node config must be a whole number"):
        train(App(ala_mod(setup)), make_context(tmp_path, **{"partition-id": "../x"}))


# --- the folder ---


def find_state_dir(tmp_path):
    """Return the folder under `tmp_path` in which something was stored."""
    [file] = tmp_path.rglob("*.safetensors")
    return file.relative_to(tmp_path).parts[0]


@pytest.mark.parametrize(
    ("in_node_config", "in_run_config", "is_argument", "is_simulated", "expected"),
    [
        (False, False, False, False, "default"),
        (False, False, True, False, "argument"),
        (True, False, True, False, "node"),
        (True, True, True, True, "node"),
        (False, True, True, True, "run"),
        (False, True, False, False, "default"),
        (False, True, True, False, "argument"),
    ],
    ids=["default", "argument", "node", "node-first", "run", "run-on-a-node", "run-is-ignored"],
)
def test_who_names_the_folder(
    in_node_config, in_run_config, is_argument, is_simulated, expected, tmp_path, monkeypatch
):
    """A run config comes from elsewhere: it chooses a folder only in a simulation."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "default"))
    monkeypatch.setattr(mod_state, "is_simulated", lambda: is_simulated)
    app = App(ala_mod(setup, state_dir=tmp_path / "argument" if is_argument else None))
    context = make_context(
        tmp_path / "node" if in_node_config else None,
        run_config={"state-dir": str(tmp_path / "run")} if in_run_config else {},
    )
    train(app, context)
    assert find_state_dir(tmp_path) == expected


def test_a_folder_that_depends_on_where_flower_starts_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="absolute path, not 'state'"):
        ala_mod(setup, state_dir="state")
    monkeypatch.setattr(mod_state, "is_simulated", lambda: True)
    context = make_context(run_config={"state-dir": "state"})
    with pytest.raises(UserError, match="absolute path, not 'state'"):
        train(App(ala_mod(setup)), context)


def test_a_name_that_leads_elsewhere_is_refused_at_once():
    with pytest.raises(UserError, match="experiment's name"):
        ala_mod(setup, experiment="../x")
