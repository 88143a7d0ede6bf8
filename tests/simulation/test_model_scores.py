"""Which model is tested: each kind is the model that it says, in any number of lanes."""

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    f1_score,
    mean_absolute_error,
    mean_squared_error,
    r2_score,
    roc_auc_score,
)
from small import Net, evaluate, ragged_task, same_rows

from fedala.lanes.cohort import Cohort
from fedala.lanes.losses import MultiLabel, Regression
from fedala.lanes.trees import leaves
from fedala.methods import make
from fedala.metrics import MAE, MSE
from fedala.records import MODEL_KINDS
from fedala.simulation.metrics import list_plain_figures
from fedala.simulation.model_scores import EvaluationSchedule, TrainedRound, has_details

SIZES = [30, 9, 0, 17, 12, 3]
EVERYBODY = sum(max(1, size // 3) for size in SIZES)
ALL = {"evaluate": MODEL_KINDS, "metrics_every": 1}


def figures_of(evaluations):
    """By seed, round and kind of model."""
    return {
        (one.row.seed, one.row.round, model): dict(figures)
        for one in evaluations
        for model, figures in one.models
    }


def run(method, sizes=SIZES, *, rounds=2, **options):
    task = ragged_task(sizes)
    settings = {**ALL, **options}
    _, evaluations, models = evaluate(method, task, rounds=rounds, **settings)
    return task, figures_of(evaluations), evaluations, models


def same_figures(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for key, figures in found.items():
        assert figures == pytest.approx(expected[key], abs=tolerance), key


@pytest.mark.parametrize(("method", "ratio"), [("fedavg", 0.5), ("fedala", 1), ("ditto+ala", 0.5)])
def test_lanes_threads_and_seeds_change_nothing(method, ratio):
    quick = {} if method == "fedavg" else {f"{method.replace('ditto+', '')}.max_epochs": 2}
    options = {"join_ratio": ratio, "settings": quick}
    _, alone, *_ = run(method, lanes=1, seeds=(0, 1), **options)
    same_figures(run(method, lanes=2, threads=2, seeds=(0, 1), **options)[1], alone, 1e-10)
    own = run(method, lanes=None, seeds=(1,), **options)[1]
    same_figures(own, {key: value for key, value in alone.items() if key[0] == 1}, 1e-10)


@pytest.mark.parametrize("method", ["fedavg", "fedala", "apple", "fedrep"])
def test_further_models_change_nothing_else(method):
    """The history is the same to the bit, but for the further columns."""
    _, plain, _ = evaluate(method, ragged_task(SIZES), rounds=2)
    _, _, evaluations, _ = run(method)
    further = {f"accuracy_{kind}" for kind in MODEL_KINDS}
    assert not any(one.models for one in plain)
    for one, other in zip(evaluations, plain, strict=True):
        cells, expected = one.row.columns(), other.row.columns()
        for name in (cells.keys() | expected.keys()) - further - {"seconds"}:
            assert cells[name] == pytest.approx(expected[name], abs=0, nan_ok=True), name
        assert (one.client_scores == other.client_scores).all()


def predict(task, model, rows):
    """What a plain module says of some samples."""
    module = Net().double()
    module.load_state_dict({name: value[0] for name, value in model.items()})
    with torch.no_grad():
        probabilities = module.eval()(task.x[rows]).softmax(-1).numpy()
    return task.y[rows].numpy(), probabilities


def reference(task, model_of):
    """Figures over all samples, of plain modules and scikit-learn."""
    parts = [
        predict(task, model_of(client), rows) for client, rows in enumerate(task.parts["test"])
    ]
    targets, probabilities = (np.concatenate(part) for part in zip(*parts, strict=True))
    predicted = probabilities.argmax(1)
    several = [(y, p) for y, p in parts if len(set(y)) > 1]
    return {
        "clients": len(parts),
        "samples": len(targets),
        "accuracy": np.mean(targets == predicted),
        "accuracy_mean": np.mean([np.mean(y == p.argmax(1)) for y, p in parts]),
        "f1": f1_score(targets, predicted, average="macro"),
        "f1_mean": np.mean([f1_score(y, p.argmax(1), average="macro") for y, p in several]),
        "auc": roc_auc_score(targets, probabilities, multi_class="ovr"),
    }


@pytest.mark.parametrize(
    ("method", "ratio"),
    [("fedavg", 1), ("fedavg", 0.5), ("fedala", 1), ("fedala", 0.5), ("fedamp", 1)],
)
def test_the_figures_are_those_of_the_saved_models(method, ratio):
    """Of the initialised models of all clients, absent ones too, and of the global model."""
    task, found, _, models = run(method, join_ratio=ratio)
    personal = {client: model for (_, client), model in models.items()}
    for kind, model_of in (
        ("initialized", lambda client: personal.get(client, personal.get(None))),
        ("global", lambda client: personal[None]),
    ):
        if kind == "global" and method == "fedamp":
            assert (0, 2, kind) not in found
            continue
        figures = found[0, 2, kind]
        expected = reference(task, model_of)
        assert {name: figures[name] for name in expected} == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("method", ["local", "fedavg"])
def test_the_trained_model_of_a_round_is_in_the_next_row(method):
    """Local starts each round with it. In round 1, FedAvg trains the same models as Local."""
    _, local, evaluations, _ = run("local")
    assert "accuracy_trained" not in evaluations[0].row.columns()
    for round in (1, 2):
        same = {"t": local[0, round, "trained"]}
        same_figures(same, {"t": local[0, round, "initialized"]}, 1e-10)
    _, found, evaluations, _ = run(method)
    trained = found[0, 1, "trained"]
    plain = {name: trained[name] for name in trained if not name.startswith("bytes")}
    expected = {name: local[0, 1, "trained"][name] for name in plain}
    assert plain == pytest.approx(expected, abs=1e-10)
    assert evaluations[1].row.metrics["accuracy_trained"] == trained["accuracy"]


def test_apple_is_tested_with_its_composed_model():
    """Alone in its federation, a client begins a round with the model that it ended the last."""
    _, found, *_ = run("apple", [30], settings={"apple.eta": 0.5})
    for round in (1, 2):
        own, expected = ({"t": found[0, round, kind]} for kind in ("trained", "initialized"))
        same_figures(own, expected, 1e-10)


def test_absent_clients_count_only_for_the_initialised_and_the_global_model():
    _, found, evaluations, _ = run("fedala", join_ratio=0.5)
    for kind, clients in (("initialized", 6), ("global", 6), ("received", 3), ("trained", 3)):
        assert found[0, 2, kind]["clients"] == clients
        assert (found[0, 2, kind]["samples"] == EVERYBODY) == (clients == 6)
    assert found[0, 2, "initialized"]["accuracy"] == evaluations[-1].row.accuracy
    _, joined, evaluations, _ = run("fedala", join_ratio=0.5, eval_clients="joined")
    assert joined[0, 2, "initialized"]["clients"] == 3
    assert joined[0, 2, "initialized"]["accuracy"] == evaluations[-1].row.accuracy
    assert joined[0, 2, "global"]["clients"] == 6


def test_fedavg_starts_from_the_received_model_which_is_the_global_one():
    _, found, *_ = run("fedavg")
    for round in range(3):
        assert found[0, round, "received"] == found[0, round, "initialized"]
        same = {"g": found[0, round, "global"]}
        same_figures(same, {"g": found[0, round, "initialized"]}, 1e-10)


@pytest.mark.parametrize("method", ["local", "fedrep", "fedfomo", "apple"])
def test_a_model_that_a_method_does_not_have_is_named_once(method):
    said = []
    _, found, evaluations, _ = run(method, on_message=said.append)
    assert len(said) == 2
    assert "sends no whole model, so its received model is not evaluated" in said[0]
    assert "has no whole global model, so its global model is not evaluated" in said[1]
    assert {kind for *_, kind in found} == {"initialized", "trained"}
    columns = evaluations[-1].row.columns()
    assert "accuracy_received" not in columns
    assert "accuracy_global" not in columns


def test_bytes_are_counted_by_type():
    """A counter of BatchNorm has 8 bytes, and so has a float64; FedRep's head stays at home."""
    whole = sum(v.numel() * 8 for v in Net().state_dict().values())
    head = (6 * 3 + 3) * 8
    for method, expected in (("fedavg", whole), ("fedrep", whole - head), ("local", 0)):
        _, found, *_ = run(method)
        assert "bytes_sent" not in found[0, 0, "initialized"]
        figures = found[0, 2, "initialized"]
        assert (figures["bytes_sent"], figures["bytes_uploaded"]) == (expected, expected)


def test_a_model_that_diverged_does_not_count(monkeypatch):
    """The figures of the trained models are those of the others."""
    _, calm, *_ = run("local", rounds=1)
    task = ragged_task(SIZES)

    def poisoned(self, step, state, *args, train=Cohort.train, **options):
        state = train(self, step, state, *args, **options)
        for lane, client in enumerate(self.clients):
            if client == 3:
                for _, leaf in leaves(state):
                    leaf[lane] = float("nan") if leaf.is_floating_point() else leaf[lane]
        return state

    monkeypatch.setattr(Cohort, "train", poisoned)
    _, evaluations, _ = evaluate("local", task, rounds=1, lanes=None, **ALL)
    found = figures_of(evaluations)[0, 1, "trained"]
    assert found["clients"] == 5
    assert found["samples"] == EVERYBODY - 17 // 3
    assert found["accuracy"] != calm[0, 1, "trained"]["accuracy"]
    assert all(np.isfinite(list(found.values())))
    assert evaluations[0].row.diverged == 1


@pytest.mark.parametrize(
    ("every", "eval_every", "expected"),
    [(0, 1, [5]), (2, 1, [0, 2, 4, 5]), (3, 2, [0, 4, 5]), (None, 1, [])],
)
def test_detailed_metrics_come_when_they_are_due(every, eval_every, expected):
    """If a round is not evaluated, they come with the next evaluation."""
    for kinds in (("initialized",), MODEL_KINDS):
        _, found, evaluations, _ = run(
            "fedavg", rounds=5, metrics_every=every, eval_every=eval_every, evaluate=kinds
        )
        for (_, round, kind), figures in found.items():
            assert ("auc" in figures) == ("ece_mean" in figures) == (round in expected), kind
            assert "accuracy_worst" in figures
        rounds = [one.row.round for one in evaluations]
        assert sorted({round for _, round, _ in found}) == (rounds if len(kinds) > 1 else expected)


def test_classes_and_numbers_have_detailed_metrics_and_several_labels_have_none():
    task = ragged_task(SIZES)
    assert has_details(task)
    for y in (task.y.double(), torch.eye(3, dtype=torch.int64)[task.y], {"label": task.y}):
        task.y = y
        assert not has_details(task)
    for loss, expected in ((Regression("huber"), True), (MultiLabel(), False)):
        task.loss = loss
        assert has_details(task) is expected


def test_the_figures_of_a_regression_are_those_of_scikit_learn():
    """A round is tested with its initialised and its trained models, in any number of lanes."""

    def run_regression(**options):
        task = ragged_task(SIZES)
        task.loss, task.y = Regression("mse"), torch.nn.functional.one_hot(task.y, 3).double()
        _, evaluations, models = evaluate("local", task, rounds=2, **{**ALL, **options})
        return task, figures_of(evaluations), evaluations, models

    task, found, evaluations, models = run_regression(lanes=1)
    parts = []
    for (_, client), model in models.items():
        module = Net().double()
        module.load_state_dict({name: value[0] for name, value in model.items()})
        rows = task.parts["test"][client]
        parts.append((task.y[rows].numpy(), module.eval()(task.x[rows]).detach().numpy()))
    y, predicted = (np.concatenate(both) for both in zip(*parts, strict=True))
    figures = found[0, 2, "initialized"]
    assert figures["mse"] == pytest.approx(mean_squared_error(y, predicted))
    assert figures["rmse"] == pytest.approx(np.sqrt(mean_squared_error(y, predicted)))
    assert figures["mae"] == pytest.approx(mean_absolute_error(y, predicted))
    assert figures["r2"] == pytest.approx(r2_score(y, predicted))
    own = [mean_squared_error(*part) for part in parts]
    assert figures["rmse_mean"] == pytest.approx(np.mean(np.sqrt(own)))
    assert figures["mse_worst"] == pytest.approx(max(own))
    assert evaluations[-1].row.metrics["mse_trained"] == found[0, 2, "trained"]["mse"]
    same_figures(run_regression(lanes=None)[1], found, 1e-10)


def test_an_earlier_checkpoint_of_a_regression_has_the_plain_figures():
    """It had the columns of classifiers: 7 plain figures, and 8 that were unknown.

    The last plain one was the mean of the lowest errors, which is not that of the worst clients.
    """
    figures = torch.full((1, 15), np.nan, dtype=torch.float64)
    figures[0, :7] = torch.arange(7) + 1
    state = {"traffic": torch.tensor([[8, 9]]), "figures": figures}
    for metric in (MSE, MAE):
        known = TrainedRound.restore(state, 1, metric).trained_model(0)
        assert list(known) == list_plain_figures(metric)[:-1]
        assert list_plain_figures(metric)[-1] == f"{metric.name}_worst"
        assert list(known.values()) == [1, 2, 3.0, 4.0, 5.0, 6.0]
    with pytest.raises(ValueError, match="another run"):
        TrainedRound.restore({**state, "figures": figures[:, :9]}, 1, MSE)


def test_a_run_by_default_asks_for_nothing_more():
    """A normal round costs what it did: nothing further is tested or collected."""
    schedule = EvaluationSchedule(rounds=9, eval_every=1, metrics_every=0)
    for round in range(1, 10):
        request = schedule.make_request(
            round, train=True, evaluates_received=False, evaluates_absent=False
        )
        assert request.predicts == set()
        assert not request.evaluate_received
        assert not request.evaluate_trained
    last = schedule.make_request(10, train=False, evaluates_received=False, evaluates_absent=False)
    assert last.predicts == {"initialized"}


def test_a_round_that_is_done_again_keeps_the_row_before(monkeypatch):
    """A round that fails is done again, and the trained models before it are not forgotten."""
    _, expected, rows, _ = run("fedala", rounds=3, lanes=None)
    failing = [torch.OutOfMemoryError("CUDA out of memory")]
    own = type(make("fedala"))
    aggregate = own.aggregate

    def fail_once(self, server, uploads, server_round):
        if server_round.round == 2 and failing:
            raise failing.pop()
        return aggregate(self, server, uploads, server_round)

    monkeypatch.setattr(own, "aggregate", fail_once)
    _, found, evaluations, _ = run("fedala", rounds=3, lanes=None)
    assert not failing
    same_figures(found, expected, 1e-10)
    same_rows([one.row for one in evaluations], [one.row for one in rows], 1e-10)
