"""An app with `ala_mod(evaluate=True)` evaluates the model that its training would start from."""

import numpy as np
import pytest
import torch

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.mod_rounds import (  # noqa: E402
    App,
    LegacyApp,
    make_context,
    make_global,
    read_files,
    setup,
)

from fedala import UserError  # noqa: E402
from fedala.flower import ala_mod  # noqa: E402
from fedala.io.tensor_files import load  # noqa: E402


def are_equal(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("rounds", [1, 3], ids=["initial-stage", "later"])
def test_the_evaluated_model_is_the_one_that_training_starts_from(rounds, tmp_path):
    app = App(ala_mod(setup, layers=1, evaluate=True))
    for round in range(rounds):
        app.call("train", make_global(round), make_context(tmp_path))
    sent = make_global(9)
    _, metrics = app.call("evaluate", sent, make_context(tmp_path))
    app.call("train", sent, make_context(tmp_path))
    evaluated, trained_from = app.seen[-2:]
    assert are_equal(evaluated, trained_from)
    assert are_equal({n: evaluated[n] for n in ("0.weight", "0.bias")}, sent)
    assert not np.array_equal(evaluated["2.weight"], sent["2.weight"])
    assert metrics == {"num-examples": 1, "ala-fault": 0, "ala-lost": 0, "ala-new": 0}


@pytest.mark.parametrize("evaluate", [True, "stored"], ids=["learned", "stored"])
def test_training_is_the_same_as_without_evaluation(evaluate, tmp_path):
    """`setup` and training draw random numbers. Evaluation writes nothing, and leaves none out."""
    uploads = []
    for folder, is_evaluated in ((tmp_path / "a", True), (tmp_path / "b", False)):
        app, context = App(ala_mod(setup, evaluate=evaluate)), make_context(folder)
        sent = [make_global(round) for round in range(4)]
        torch.manual_seed(5)
        for arrays in sent:
            if is_evaluated:
                before = read_files(tmp_path), dict(context.state)
                app.call("evaluate", arrays, context)
                assert (read_files(tmp_path), dict(context.state)) == before
            reply, _ = app.call("train", arrays, context)
        uploads.append(reply["arrays"].to_torch_state_dict())
    assert are_equal(*uploads)
    assert read_files(tmp_path / "a") == read_files(tmp_path / "b")


def test_a_client_evaluates_the_received_model_before_its_first_training(tmp_path):
    app, sent = App(ala_mod(setup, evaluate=True)), make_global(0)
    sent["2.bias"][0] = float("nan")  # it is not touched at all
    _, metrics = app.call("evaluate", sent, make_context(tmp_path / "state"))
    assert all(torch.equal(app.seen[0][n].nan_to_num(), sent[n].nan_to_num()) for n in sent)
    assert metrics["ala-new"] == 1
    assert not list(tmp_path.iterdir())


def test_stored_weights_can_be_used_as_they_are(tmp_path):
    """The blend is local + W · (received − local), with the local model and W of the file."""
    app, sent = App(ala_mod(setup, evaluate="stored")), make_global(9)
    app.call("train", make_global(0), make_context(tmp_path))
    app.call("evaluate", sent, make_context(tmp_path))
    assert are_equal(app.seen[-1], sent)  # W is not learned before the second training
    app.call("train", make_global(1), make_context(tmp_path))
    app.call("evaluate", sent, make_context(tmp_path))
    [file] = tmp_path.rglob("*.safetensors")
    state, _ = load(file)
    for name in ("2.weight", "2.bias"):
        local, weights = state["local"][name], state["ala"][f"weights.{name}"]
        blend = local + (sent[name] - local) * weights
        torch.testing.assert_close(app.seen[-1][name], blend, rtol=0, atol=0)
    assert not are_equal(app.seen[-1], sent)


def test_a_legacy_client_evaluates_the_same_model(tmp_path):
    new, old = (kind(ala_mod(setup, evaluate=True)) for kind in (App, LegacyApp))
    old.call("train", make_global(0), make_context(tmp_path))
    old.call("train", make_global(1), make_context(tmp_path))
    result = old.call("evaluate", make_global(9), make_context(tmp_path))
    assert (result.loss, result.num_examples) == (0.5, 1)
    assert result.metrics == {"accuracy": 0.25, "ala-fault": 0, "ala-lost": 0, "ala-new": 0}
    old.call("train", make_global(9), make_context(tmp_path))
    for evaluated, trained_from in zip(*old.seen[-2:], strict=True):
        np.testing.assert_array_equal(evaluated, trained_from)
    assert not np.array_equal(old.seen[-1][2], make_global(9)["2.weight"])
    # The files of one app are those of the other.
    new.call("evaluate", make_global(9), make_context(tmp_path))
    assert not are_equal(new.seen[-1], make_global(9))


def test_a_damaged_state_is_reported_and_left_to_training(tmp_path):
    app = App(ala_mod(setup, evaluate=True))
    app.call("train", make_global(0), make_context(tmp_path))
    [file] = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    before = read_files(tmp_path)
    _, metrics = app.call("evaluate", make_global(9), make_context(tmp_path))
    assert (metrics["ala-lost"], metrics["ala-new"]) == (1, 1)
    assert are_equal(app.seen[-1], make_global(9))
    assert read_files(tmp_path) == before
    _, metrics = app.call("train", make_global(9), make_context(tmp_path))
    assert metrics["ala-lost"] == 1
    _, metrics = app.call("evaluate", make_global(9), make_context(tmp_path))
    assert metrics["ala-lost"] == 0


def test_a_wrong_choice_is_refused():
    with pytest.raises(UserError, match="evaluate must be True"):
        ala_mod(setup, evaluate="yes")
