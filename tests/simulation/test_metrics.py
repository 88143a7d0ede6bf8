"""Metrics are those of scikit-learn, also on clients that lack classes; the rest is by hand."""

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from fedala.lanes.evaluation import Predictions
from fedala.metrics import MAE, MSE
from fedala.simulation.metrics import (
    balanced_accuracy,
    calibration_error,
    macro_f1,
    one_vs_rest_auc,
    summarize_predictions,
    summarize_scores,
)


def reference_auc(found):
    """The mean over the classes that have samples inside and outside."""
    areas = []
    for label in range(found.probabilities.shape[1]):
        is_inside = found.targets == label
        if 0 < is_inside.sum() < len(is_inside):
            areas.append(roc_auc_score(is_inside, found.probabilities[:, label]))
    return np.mean(areas) if areas else np.nan


def references(found):
    return {
        "f1": f1_score(found.targets, found.predicted, average="macro"),
        "balanced_accuracy": balanced_accuracy_score(found.targets, found.predicted),
        "auc": reference_auc(found),
    }


def draw_client(random, size, labels, classes=6, decimals=8):
    """Predictions for targets of some classes; few decimals make ties."""
    targets = random.choice(labels, size)
    scores = random.gumbel(size=(size, classes)) + 1.5 * np.eye(classes)[targets]
    probabilities = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    probabilities = probabilities.round(decimals)
    return Predictions(targets, probabilities.argmax(1), probabilities)


def test_infinite_scores_spread_without_a_warning():
    scores = np.array([[np.inf, np.inf, 4], [1e200, 1.0, 1]])
    figures = summarize_scores(scores, MSE)
    assert (figures["mse"], figures["mse_mean"], figures["mse_worst"]) == (np.inf, np.inf, np.inf)
    assert np.isnan(figures["mse_std"])


RAGGED = [(40, [0, 1, 2, 3]), (7, [5]), (1, [2]), (23, [1, 4]), (15, [0, 5])]


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
@pytest.mark.parametrize("decimals", [8, 1])
@pytest.mark.parametrize("seed", range(3))
def test_metrics_are_those_of_scikit_learn(seed, decimals):
    """Over all samples, and as means over the clients for which a metric is defined."""
    random = np.random.default_rng(seed)
    clients = [draw_client(random, size, own, decimals=decimals) for size, own in RAGGED]
    pooled = Predictions(*(np.concatenate(parts) for parts in zip(*clients, strict=True)))
    found = summarize_predictions(clients)
    own = [references(client) for client in clients if len(set(client.targets)) > 1]
    for name, value in references(pooled).items():
        assert found[name] == pytest.approx(value, abs=1e-12), name
        mean = np.nanmean([figures[name] for figures in own])
        assert found[f"{name}_mean"] == pytest.approx(mean, abs=1e-12), name


def test_a_model_that_always_gives_one_class_gains_nothing_from_clients_of_that_class():
    """The first client has the classes 0 and 1, the others one of them: they tell nothing apart."""
    targets = [np.array([0, 0, 0, 1]), np.array([0, 0]), np.array([1])]
    clients = [Predictions(y, np.zeros_like(y), np.full((len(y), 2), 0.5)) for y in targets]
    found = summarize_predictions(clients)
    assert found["balanced_accuracy_mean"] == found["balanced_accuracy"] == 0.5
    assert found["f1_mean"] == pytest.approx((6 / 7 + 0) / 2)
    assert found["auc_mean"] == 0.5
    undefined = summarize_predictions(clients[1:])
    names = ("f1_mean", "balanced_accuracy_mean", "auc_mean")
    assert np.isnan([undefined[name] for name in names]).all()
    assert undefined["ece_mean"] == pytest.approx(0.5)


def test_all_classes_at_once_as_scikit_learn_averages_them():
    random = np.random.default_rng(7)
    found = draw_client(random, 200, range(4), classes=4)
    whole = found.probabilities / found.probabilities.sum(1, keepdims=True)
    found = found._replace(probabilities=whole)
    expected = roc_auc_score(found.targets, whole, multi_class="ovr", average="macro")
    assert one_vs_rest_auc(found) == pytest.approx(expected, abs=1e-12)
    expected = balanced_accuracy_score(found.targets, found.predicted)
    assert balanced_accuracy(found) == pytest.approx(expected, abs=1e-12)


def test_a_class_that_is_only_predicted_counts_for_f1_alone():
    """Classes 0 and 2: F1 of 0 is 2·1/(2·1 + 0 + 1), that of 2 is 0; the recall of 0 is 1/2."""
    found = Predictions(np.array([0, 0]), np.array([0, 2]), np.full((2, 3), 1 / 3))
    assert macro_f1(found) == pytest.approx((2 / 3 + 0) / 2)
    assert balanced_accuracy(found) == pytest.approx(1 / 2)
    assert np.isnan(one_vs_rest_auc(found))


def test_the_calibration_error_by_hand():
    """Bins of a fifteenth: 0.6 is the upper edge of its bin, 0.59 is in the same one, 0.95 is not.

    In the first bin, one of two is right: |1 − (0.6 + 0.59)|; in the other, one: |1 − 0.95|.
    """
    first = np.array([0.6, 0.59, 0.95])
    probabilities = np.stack([first, 1 - first], 1)
    found = Predictions(np.array([0, 1, 0]), np.array([0, 0, 0]), probabilities)
    assert calibration_error(found) == pytest.approx((0.19 + 0.05) / 3)
    shifted = found._replace(probabilities=np.stack([first + 0.01, 0.99 - first], 1))
    # 0.61 is in the next bin: |1 − 0.61|, |0 − 0.6| and |1 − 0.96|.
    assert calibration_error(shifted) == pytest.approx((0.39 + 0.6 + 0.04) / 3)


def test_numbers_that_are_not_finite_leave_what_the_predictions_give():
    probabilities = np.array([[np.nan, np.nan], [0.5, 0.5]])
    found = summarize_predictions([Predictions(np.array([0, 1]), np.array([0, 0]), probabilities)])
    assert np.isnan([found["auc"], found["ece"], found["auc_mean"]]).all()
    assert found["balanced_accuracy"] == pytest.approx(0.5)


def test_metrics_of_numbers_by_hand():
    """Errors 1, 0 and −2: MAE 3/3, RMSE √(5/3), R² 1 − 5/8. The second client does not vary."""
    first = Predictions(np.array([1.0, 3.0, 5.0]), np.array([2.0, 3.0, 3.0]), np.empty((3, 0)))
    second = Predictions(np.array([2.0]), np.array([5.0]), np.empty((1, 0)))
    assert summarize_predictions([first], MSE) == pytest.approx(
        {"mae": 1, "rmse": np.sqrt(5 / 3), "r2": 3 / 8}
        | {"mae_mean": 1, "rmse_mean": np.sqrt(5 / 3), "r2_mean": 3 / 8}
    )
    both = summarize_predictions([first, second], MAE)
    assert both["mae_mean"] == pytest.approx((1 + 3) / 2)
    assert both["r2_mean"] == pytest.approx(3 / 8)
    bad = summarize_predictions([second._replace(predicted=np.array([np.inf]))], MSE)
    assert np.isnan(list(bad.values())).all()


def test_the_worst_errors_are_the_largest():
    found = summarize_scores(np.array([[8.0, 1, 4], [1.0, 1, 4], [0, 0, 0]]), MSE)
    assert (found["mse"], found["mse_worst"]) == (9 / 8, 2.0)


def test_scores_by_hand():
    """Eleven clients with samples; the worst tenth is one of them, with 1 of 4."""
    scores = np.array([[1, 2.0, 4], [0, 0, 0], *([[3, 1.0, 6]] * 5), *([[8, 2.0, 8]] * 5)])
    found = summarize_scores(scores)
    accuracies = [0.25, *([0.5] * 5), *([1.0] * 5)]
    assert found == pytest.approx(
        {
            "clients": 11,
            "samples": 4 + 30 + 40,
            "accuracy": (1 + 15 + 40) / 74,
            "loss": (2 + 5 + 10) / 74,
            "accuracy_mean": np.mean(accuracies),
            "accuracy_std": np.std(accuracies),
            "accuracy_worst": 0.25,
        }
    )
    twice = summarize_scores(np.concatenate([scores, scores]))
    assert twice["accuracy_worst"] == pytest.approx(0.25)  # two of 22
    assert summarize_scores(np.zeros((3, 3))) == {"clients": 0, "samples": 0}
