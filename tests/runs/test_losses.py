"""Runs with other losses than cross-entropy, from the data to the report."""

import csv
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import fedala
from fedala.cli.app import app
from fedala.data import Dataset, Federation, federate, write_partition
from fedala.errors import UserError
from fedala.lanes.losses import CrossEntropy, MultiLabel, Regression
from fedala.methods import list_methods
from fedala.metrics import ACCURACY, LABEL_ACCURACY, MSE, OWN_LOSS
from fedala.records import MODEL_KINDS
from fedala.report import page
from fedala.report.plots import draw_runs
from fedala.report.runs import find_runs
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder
from fedala.runs.losses import describe_large_targets, make_loss
from fedala.runs.plan import plan

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(72, 5)).astype(np.float32)
SLOPES = RANDOM.normal(size=(5, 3))
NUMBERS = (X @ SLOPES[:, 0] + 1).astype(np.float32)
LABELS = (X @ SLOPES > 0.3).astype(np.float32)
CLASSES = (X @ SLOPES).argmax(1)


def numbers():
    return Dataset("numbers", torch.from_numpy(X), torch.from_numpy(NUMBERS), 1)


def labels():
    return Dataset("labels", torch.from_numpy(X), torch.from_numpy(LABELS), 3)


def classes():
    return Dataset("classes", torch.from_numpy(X), torch.from_numpy(CLASSES), 3)


def own_loss(output, y):
    return (output[:, 0] - y).abs().mean()


def linear(outputs):
    return lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, outputs))


OPTIONS = {"partition": "iid", "clients": 4, "device": "cpu", "lr": 0.05, "batch_size": 5}
KINDS = {
    "cross_entropy": (classes, 3, {"label_smoothing": 0.1, "class_weights": "balanced"}),
    "multilabel": (labels, 3, {"label_smoothing": 0.1, "class_weights": "1,2,0.5"}),
    "mse": (numbers, 1, {}),
    "mae": (numbers, 1, {}),
    "huber": (numbers, 1, {}),
    "own": (numbers, 1, {"loss": own_loss}),
}


def normalized(outputs):
    """Make a model that every method takes: FedBN needs normalisation."""
    return lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, outputs))


def run(kind, make_model=linear, **options):
    make_data, outputs, settings = KINDS[kind]
    settings = {"loss": kind, **settings, **OPTIONS, **options}
    return fedala.run(dataset=make_data(), model=make_model(outputs), **settings)


def outputs_of(result, federation, client, out=None):
    """Return a saved client's outputs and targets on its test samples."""
    model = linear(federation.dataset.classes)()
    model.load_state_dict(result.models[0, client])
    rows = federation.test[client]
    with torch.no_grad():
        return model(federation.dataset.x[rows]), federation.dataset.y[rows]


#: Short initial stages and fine-tuning, which show nothing more when they are long.
QUICK = {"ala.max_epochs": 2, "fedala.max_epochs": 2, "fedavg-c.epochs": 1, "fedprox-c.epochs": 1}


#: Methods that work with one label for each sample, and refuse other targets.
NEED_CLASSES = {"fedrod", "fedrod+ala", "fedproto", "gpfl", "gpfl+ala", "fedpac", "fedpac+ala"}


@pytest.mark.parametrize("kind", ["cross_entropy", "multilabel", "huber", "own"])
def test_every_method_runs_with_every_loss(kind):
    """Two rounds of all methods are finite; the score is what the loss asks for."""
    refusing = set() if kind == "cross_entropy" else NEED_CLASSES
    names = [name for name in list_methods() if name not in refusing]
    options = {"rounds": 2, "clients": 2, "save_models": False, "set": QUICK}
    result = run(kind, normalized, method=",".join(names), **options)
    assert len(result.methods) == len(names)
    for name in refusing:
        with pytest.raises(UserError, match="works with the classes of the samples"):
            run(kind, normalized, method=name, clients=2)
    for one in result.methods.values():
        assert all(np.isfinite([row.score, row.loss]).all() for row in one.history), one.title
        assert (
            one.metric.name
            == {
                "cross_entropy": "accuracy",
                "multilabel": "label_accuracy",
                "huber": "mse",
                "own": "own_loss",
            }[kind]
        )


def test_the_mean_squared_error_is_that_of_the_saved_models():
    """Σ (output − y)² / Σ samples, by hand from the models that the run ends with."""
    result = run("mse", method="fedala", rounds=3)
    federation = federate(numbers(), "iid", 4)
    errors = []
    for client in range(4):
        output, y = outputs_of(result, federation, client)
        errors += [(float(a) - float(b)) ** 2 for a, b in zip(output[:, 0], y, strict=True)]
    last = result.history[-1]
    assert last.metric == MSE
    assert last.score == pytest.approx(np.mean(errors), rel=1e-5)
    assert last.score == pytest.approx(last.loss, rel=1e-6)
    with pytest.raises(AttributeError, match="mean squared error: use score"):
        _ = last.accuracy
    with pytest.raises(AttributeError, match="use best_score"):
        _ = result.best_accuracy


def test_the_best_round_of_an_error_is_the_lowest():
    result = run("mse", method="fedavg", rounds=6, seeds=2, validation=0.3)
    [one] = result.methods.values()
    for seed, best in zip((0, 1), one.best, strict=True):
        rows = [row for row in one.history if row.seed == seed]
        assert best == min(row.score for row in rows) < rows[0].score
        picked = min(rows, key=lambda row: row.score_validation)
        assert one.validation_picked[seed] == picked.score
    assert one.best_score == one.best.mean()


@pytest.mark.parametrize("kind", ["mse", "multilabel"])
def test_further_models_have_columns_of_their_metric(kind, tmp_path):
    options = {"method": "fedavg", "rounds": 2, "lr": None, "patience": 2}
    options |= {"sweep": {"lr": "0.05,0.001"}}
    result = run(kind, evaluate="trained,received,global", out=tmp_path / "run", **options)
    name = result.methods["fedavg[lr=0.05]"].metric.name
    assert name == {"mse": "mse", "multilabel": "label_accuracy"}[kind]
    for row in result.methods["fedavg[lr=0.05]"].history:
        assert row.metrics[f"{name}_received"] == row.metrics[f"{name}_global"] == row.score
    assert f"{name}_trained" in row.metrics
    lines = RunFolder.open(tmp_path / "run").rows("metrics.csv")
    last = [line for line in lines if line["round"] == 2 and line["method"].endswith("0.05]")]
    assert [line["model"] for line in last] == list(MODEL_KINDS)
    assert {f"{name}_worst", "loss", "bytes_sent"} < last[0].keys()
    assert not {"accuracy", "f1", "auc"} & last[0].keys()
    assert ("r2" in last[0], "rmse" in last[0]) == (kind == "mse",) * 2
    [found] = find_runs([tmp_path / "run"])  # the history is read again
    assert f"{name}_trained" in page.write([found.path]).read_text()


def test_label_accuracy_is_the_share_of_right_decisions():
    result = run("multilabel", method="fedala", rounds=3, label_smoothing=0, class_weights="none")
    federation = federate(labels(), "iid", 4)
    right, losses, samples = 0.0, 0.0, 0
    for client in range(4):
        output, y = outputs_of(result, federation, client)
        right += float(((output.sigmoid() > 0.5) == (y > 0.5)).sum()) / 3
        losses += float(F.binary_cross_entropy_with_logits(output, y, reduction="sum")) / 3
        samples += len(y)
    last = result.history[-1]
    assert last.metric == LABEL_ACCURACY
    assert last.score == pytest.approx(right / samples, rel=1e-6)
    assert last.loss == pytest.approx(losses / samples, rel=1e-5)
    best = max(row.score for row in result.history)
    assert result.best_score == best


def test_an_own_loss_is_the_score_and_must_be_given_again(tmp_path):
    """A resumed run with its own loss equals an undisturbed one, and cannot resume without it."""
    whole = run("own", method="fedala", rounds=4, out=tmp_path / "whole")
    run("own", method="fedala", rounds=2, out=tmp_path / "part")
    assert 'loss = "own"' in (tmp_path / "part" / "config.toml").read_text()
    again = {"dataset": numbers(), "model": linear(1), "resume": tmp_path / "part", "rounds": 4}
    with pytest.raises(UserError, match="has a loss of its own"):
        fedala.run(**again)
    resumed = fedala.run(**again, loss=own_loss)
    assert [row.score for row in resumed.history] == [row.score for row in whole.history]
    assert whole.history[0].metric == OWN_LOSS
    assert all(row.score == row.loss for row in whole.history)
    refused = CliRunner().invoke(app, ["run", "--resume", str(tmp_path / "part")])
    assert refused.exit_code == 2
    assert "its own model" in refused.output


def test_an_own_loss_on_labels_is_scored_by_accuracy():
    def focal(output, y):
        own = output.log_softmax(1).gather(1, y[:, None])[:, 0]
        return -((1 - own.exp()) ** 2 * own).mean()

    options = {**OPTIONS, "dataset": classes(), "model": linear(3), "rounds": 2}
    result = fedala.run(method="fedavg", loss=focal, **options)
    plain = fedala.run(method="fedavg", **options)
    assert result.history[0].metric == ACCURACY
    assert result.history[0].accuracy == plain.history[0].accuracy  # of the initial model
    assert result.history[0].loss != plain.history[0].loss


class AutoEncoder(nn.Module):
    """Scores, and the samples reconstructed from what the scores are made of."""

    def __init__(self, arrange):
        super().__init__()
        self.encoder, self.decoder, self.head = nn.Linear(5, 4), nn.Linear(4, 5), nn.Linear(4, 3)
        self.arrange = arrange

    def forward(self, x):
        features = self.encoder(x).relu()
        return self.arrange(self.head(features), (self.decoder(features) - x).square())


@pytest.mark.parametrize(
    ("arrange", "parts"),
    [
        (lambda logits, errors: {"logits": logits, "errors": errors}, ("logits", "errors")),
        (lambda *parts: parts, (0, 1)),
    ],
    ids=["dict", "tuple"],
)
@pytest.mark.parametrize("lanes", [1, 3])
def test_an_own_loss_on_labels_gets_the_whole_output(arrange, parts, lanes):
    """The loss is that of a model that returns both parts side by side, in one tensor."""

    def add_errors(logits, errors, y):
        return F.cross_entropy(logits, y) + errors.mean()

    def of_parts(output, y):
        return add_errors(*(output[part] for part in parts), y)

    def of_columns(output, y):
        return add_errors(output[:, :3], output[:, 3:], y)

    options = {**OPTIONS, "dataset": classes(), "rounds": 2, "lanes": lanes, "method": "fedala"}
    result = fedala.run(**options, model=lambda: AutoEncoder(arrange), loss=of_parts)
    columns = partial(AutoEncoder, lambda *parts: torch.cat(parts, 1))
    expected = fedala.run(**options, model=columns, loss=of_columns)
    losses = [[row.loss for row in one.history] for one in (result, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert result.history[0].metric == ACCURACY


@pytest.mark.parametrize(
    ("arrange", "says"),
    [
        (lambda *parts: SimpleNamespace(logits=parts[0]), "This model returns a SimpleNamespace"),
        (lambda logits, errors: (logits, errors.mean()), r"its '1' is a tensor of shape \(\)"),
    ],
)
def test_an_output_that_cannot_be_taken_sample_by_sample_is_refused(arrange, says):
    with pytest.raises(UserError, match=says):
        fedala.run(
            **OPTIONS,
            dataset=classes(),
            model=lambda: AutoEncoder(arrange),
            loss=lambda output, y: F.cross_entropy(output[0], y),
        )


@pytest.mark.parametrize(
    ("make_data", "options", "loss"),
    [
        (classes, {}, CrossEntropy()),
        (labels, {}, MultiLabel()),
        (numbers, {}, Regression("mse")),
        (labels, {"loss": "huber"}, Regression("huber")),
        (classes, {"label_smoothing": 0.1}, CrossEntropy(0.1)),
        (labels, {"class_weights": "1, 2,0"}, MultiLabel(0.0, (1.0, 2.0, 0.0))),
    ],
)
def test_the_data_asks_for_a_loss(make_data, options, loss):
    federation = federate(make_data(), "iid", 4)
    assert make_loss(Config.from_values(options), federation) == loss


def test_balanced_weights_are_inverse_to_the_training_samples():
    """n/(classes·n_c) over all clients; a label's ones weigh (n − n_c)/n_c."""
    rows = (np.array([0, 1, 2]), np.array([3, 4, 5, 6, 7]))
    rest = (np.array([8]), np.array([9]))
    y = torch.tensor([0, 0, 0, 0, 1, 1, 0, 0, 1, 2])
    data = Dataset("own", torch.zeros(10, 2), y, 3)
    balanced = Config.from_values({"class_weights": "balanced"})
    none = (rows[0][:0],) * 2
    loss = make_loss(balanced, Federation(data, rows, rest, none))
    assert loss.weights == pytest.approx((8 / 18, 8 / 6, 1.0))
    data = Dataset("own", torch.zeros(10, 2), F.one_hot(y), 3)
    loss = make_loss(balanced, Federation(data, rows, rest, none))
    assert loss.weights == pytest.approx((2 / 6, 6 / 2, 1.0))


@pytest.mark.parametrize(
    ("make_data", "options", "says"),
    [
        (classes, {"loss": "mse"}, "mse needs float targets, and classes has 3 classes"),
        (classes, {"loss": "multilabel"}, "zeros and ones, and classes has 3 classes: use cross"),
        (numbers, {"loss": "multilabel"}, "zeros and ones, and numbers has 1 float target"),
        (numbers, {"loss": "cross_entropy"}, r"class labels \(whole numbers\), and numbers has 1"),
        (labels, {"loss": "cross_entropy"}, "and labels has 3 labels: use multilabel"),
        (classes, {"loss": "crossentropy"}, "There is no loss 'crossentropy'.*cross_entropy"),
        (classes, {"loss": "own"}, "give it to run again"),
        (numbers, {"label_smoothing": 0.1}, "label_smoothing is for cross_entropy and multilabel"),
        (numbers, {"class_weights": "balanced"}, "not for the loss mse"),
        (classes, {"loss": own_loss, "class_weights": "1,1,1"}, "not for a loss of your own"),
        (classes, {"class_weights": "1,2"}, "or 3 numbers from 0 on, separated by commas"),
        (classes, {"class_weights": "a,b,c"}, "or 3 numbers from 0 on"),
        (classes, {"class_weights": "1,-1,1"}, "or 3 numbers from 0 on"),
        (classes, {"class_weights": "0,0,0"}, "or 3 numbers from 0 on"),
        (classes, {"label_smoothing": 2}, "label_smoothing"),
        (numbers, {"partition": "dir:0.1"}, "dir:0.1 divides samples by their class, and numbers"),
        (
            labels,
            {"partition": "pathological:2"},
            "use iid, quantity:0.5, a partition file",
        ),
        (numbers, {"model": linear(2)}, r"into a tensor of shape \(2, 2\).*each of the 1 float"),
        (labels, {"model": linear(2)}, r"one output for each of the 3 labels: \(2, 3\)"),
        (numbers, {"loss": lambda output, y: 1.0}, "as a tensor of one number, not float"),
        (numbers, {"loss": lambda output, y: output @ y}, "The loss cannot be computed from an"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(make_data, options, says):
    outputs = make_data().classes
    with pytest.raises(UserError, match=says):
        fedala.run(**{"dataset": make_data(), "model": linear(outputs), **OPTIONS, **options})


def test_float_targets_in_an_npz_file_reach_the_report(tmp_path):
    """`fedala run` and `fedala partition` on a file; tables, plots and page follow the metric."""
    images = RANDOM.integers(0, 255, (40, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "numbers.npz", x=images, y=images.mean((1, 2)) / 64 - 2)
    np.savez(tmp_path / "labels.npz", x=images, y=images[:, :3, 0] > 99)
    for name in ("numbers", "labels"):
        options = ["--dataset", str(tmp_path / f"{name}.npz"), "--partition", "iid"]
        options += ["--clients", "3"]
        shown = CliRunner().invoke(app, ["partition", *options])
        assert shown.exit_code == 0, shown.output
        assert {"numbers": "1 float target", "labels": "3 labels"}[name] in shown.output
        options += ["--rounds", "2", "--device", "cpu", "--out", str(tmp_path / name)]
        done = CliRunner().invoke(app, ["run", *options, "--lr", "0.01"])
        assert done.exit_code == 0, done.output
    with (tmp_path / "numbers" / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"mse", "mse_joined"} < rows[0].keys()
    assert "accuracy" not in rows[0]
    with (tmp_path / "numbers" / "split.csv").open() as file:
        split = list(csv.DictReader(file))
    assert [(row["client"], row["name"]) for row in split] == [
        (str(client), "all samples") for client in range(3)
    ]
    runs = find_runs([tmp_path / "numbers", tmp_path / "labels"])
    text = page.render_page(runs)
    for words in ("mean squared error", "Label accuracy in %", "labels together"):
        assert words.lower() in text.lower()
    alone = page.render_page(runs[:1])
    assert "Lowest test mean squared error" in alone
    assert "accuracy</" not in alone
    assert {"mse", "label_accuracy", "clients-mse"} <= draw_runs(runs).keys()


def test_a_partition_file_and_a_federation_hold_float_targets(tmp_path):
    federation = federate(numbers(), "iid", 3, 5)
    write_partition(federation, tmp_path / "mine.json")
    again = federate(numbers(), str(tmp_path / "mine.json"), None)
    assert all(map(np.array_equal, again.train, federation.train))
    other = Dataset("other", torch.from_numpy(X), torch.from_numpy(NUMBERS + 0.1), 1)
    with pytest.raises(UserError, match="whose labels differ"):
        federate(other, str(tmp_path / "mine.json"), None)
    assert plan(Config.from_values({}), federation, linear(1)).loss == Regression("mse")


def test_large_targets_are_named_before_the_run_with_the_figures_that_standardise_them():
    """The figures are those of training samples, and a target of standard deviation 1 is fine."""
    data = numbers()
    mean, std = NUMBERS.mean(), NUMBERS.std()
    for scale, shift, is_large in ((1e5, 3e5, True), (0, 11, True), (1, 0, False), (1, 5, False)):
        y = torch.from_numpy((scale * (NUMBERS - mean) / std + shift).astype(np.float32))
        federation = federate(replace(data, y=y), "iid", 4)
        for loss in ("mse", "mae", "huber"):
            found = describe_large_targets(Regression(loss), federation)
            assert bool(found) is is_large, (scale, shift)
        assert not describe_large_targets(MultiLabel(), federation)
    y = 1e5 * NUMBERS + 3e5
    federation = federate(replace(data, y=torch.from_numpy(y)), "iid", 4)
    own = y[np.concatenate(federation.train)].astype(np.float64)
    [sentence] = plan(Config.from_values({}), federation, linear(1)).notes
    assert f"(mean {own.mean():.4g}, standard deviation {own.std():.4g} over" in sentence
    assert "Standardise them first, as (y − mean) / std" in sentence


def test_counts_are_by_label_or_of_all_samples():
    federation = federate(labels(), "iid", 4)
    counts = federation.counts()
    rows = np.concatenate([federation.train[1], federation.test[1]])
    assert counts[1].tolist() == LABELS[rows].sum(0).tolist()
    assert counts.sum(0).tolist() == LABELS.sum(0).tolist()
    federation = federate(numbers(), "iid", 4)
    assert federation.counts().tolist() == [[18]] * 4
    assert federation.sizes().tolist() == [18] * 4


def test_the_examples_of_the_documentation_run(capsys):
    text = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
    torch.manual_seed(0)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "losses.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    patterns = (r"mean squared error \d", r"\d\d\.\d% of the labels", r"pinball loss \d")
    assert len(printed) == 3
    assert all(map(re.match, patterns, printed))
