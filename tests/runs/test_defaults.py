"""Own data without further options: model, rounds, learning rate and standardisation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from runs.test_images import BYTES
from runs.test_resume import same
from small import assert_close
from torch import nn
from typer.testing import CliRunner

import fedala
from fedala.cli.app import app
from fedala.data import Dataset, standardization
from fedala.errors import UserError
from fedala.flower.experiment import Experiment, give_figures, prepare_server
from fedala.lanes.normalization import Normalization
from fedala.runs.build import build_task
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.folder import RunFolder
from fedala.runs.plan import plan

Y = torch.arange(60) % 3
OPTIONS = {"method": "fedala", "clients": 3, "partition": "iid", "batch_size": 4, "device": "cpu"}


def data(*shape, y=Y, name="mine"):
    x = np.random.default_rng(0).normal(10, 5, (60, *shape)).astype(np.float32)
    x[:, 0] += 3 * Y.numpy().reshape(-1, *[1] * (len(shape) - 1))
    return Dataset(name, torch.from_numpy(x), y, 3 if y.ndim == 1 else y.shape[1])


TEXTS = Dataset("letters", torch.ones(60, 200, dtype=torch.int32), Y, 3, vocabulary=9)


def planned(dataset, make_model=None, **options):
    config = Config.from_values({**OPTIONS, "dataset": dataset.name, **options})
    return plan(config, dataset, make_model)


@pytest.mark.parametrize(
    ("dataset", "options", "wanted"),
    [
        (data(5), {}, ("mlp", 0.1, 100, "standard")),
        (data(3, 20), {}, ("cnn1d", 0.1, 100, "standard")),
        (data(20, 3), {}, ("lstm", 0.5, 100, "standard")),
        (data(3, 20), {"model": "lstm"}, ("lstm", 0.5, 100, "standard")),
        (data(1, 20, 20), {}, ("cnn", 0.005, 100, None)),
        (data(1, 20, 20), {"model": "mlp"}, ("mlp", 0.1, 100, None)),
        (data(5), {"normalize": "none"}, ("mlp", 0.1, 100, "none")),
        (data(5), {"lr": 0.3, "rounds": 7}, ("mlp", 0.3, 7, "standard")),
        (data(64, name="digits"), {}, ("mlp", 0.1, 30, "standard")),
        (Dataset("i", BYTES.repeat(1, 1, 3, 3), Y, 3), {}, ("cnn", 0.005, 100, None)),
        (Dataset("mnist", BYTES.repeat(1, 1, 3, 3), Y, 3), {}, ("cnn", 0.1, 2000, None)),
        (TEXTS, {}, ("fasttext", 0.5, 100, None)),
        (data(5), {"optimizer": "adamw"}, ("mlp", 0.001, 100, "standard")),
        (data(64, name="digits"), {"optimizer": "adam"}, ("mlp", 0.001, 30, "standard")),
        (data(5), {"optimizer": "adam", "lr": 0.3}, ("mlp", 0.3, 100, "standard")),
    ],
)
def test_what_is_not_said_has_a_usual_value(dataset, options, wanted):
    config = planned(dataset, **options).config
    assert (config.model, config.lr, config.rounds, config.normalize) == wanted


@pytest.mark.parametrize(
    ("options", "rates", "says"),
    [
        ({}, [0.1, 0.001, 0.001], "lr 0.1 for sgd, 0.001 for adam, 0.001 for adamw (the"),
        ({"lr": 0.3}, [0.3, 0.3, 0.3], "lr 0.3 (the"),
    ],
)
def test_each_point_of_a_sweep_has_the_rate_of_its_own_optimizer(options, rates, says):
    checked = planned(data(5), sweep={"optimizer": "sgd,adam,adamw"}, **options)
    assert [member.config.lr for member in checked.members] == rates
    for group in checked.groups:
        assert checked.for_group(group).config.lr == group.members[0].variant.recipe.lr
    assert checked.describe_rate(is_default=True).startswith(says)


def test_a_sweep_of_optimizers_resumes_with_the_same_rates(tmp_path):
    options = {"method": "fedavg", "sweep": {"optimizer": "sgd,adam"}, "checkpoint_every": 1}
    execute(planned(data(5), rounds=3, **options), tmp_path / "whole")
    execute(planned(data(5), rounds=1, **options), tmp_path / "parts")
    config = RunFolder.open(tmp_path / "parts").config()
    execute(plan(replace(config, rounds=3), data(5)), tmp_path / "parts", resume=True)
    whole, parts = (RunFolder.open(tmp_path / name).history() for name in ("whole", "parts"))
    assert len(whole) == 2
    for label, rows in whole.items():
        assert [row.score for row in parts[label]] == [row.score for row in rows]


def test_an_own_model_gets_samples_as_they_are():
    checked = planned(data(5), lambda: nn.Linear(5, 3))
    assert (checked.config.normalize, checked.normalization) == (None, None)
    assert checked.config.lr == 0.005
    assert planned(data(5), lambda: nn.Linear(5, 3), normalize="standard").normalization.mean


@pytest.mark.parametrize(
    ("shape", "options", "axes"),
    [
        ((5,), {}, 0),
        ((3, 20), {}, (0, 2)),
        ((20, 3), {}, (0, 1)),
        ((3, 20), {"normalize": "standard:last"}, (0, 1)),
    ],
)
def test_the_training_samples_of_a_run_have_mean_0_and_deviation_1(shape, options, axes):
    checked = planned(data(*shape), precision="float64", **options)
    task, _ = build_task(checked)
    rows = torch.from_numpy(np.concatenate(checked.federation.train))
    x = task.inputs(rows).numpy()
    assert np.abs(x.mean(axes)).max() < 1e-10
    assert np.abs(x.std(axes) - 1).max() < 1e-10


def test_figures_may_be_given_for_features():
    given = planned(data(2), normalize="1,2/3,4").normalization
    assert given == Normalization((1.0, 2.0), (3.0, 4.0))
    assert planned(data(20, 3), normalize="1,2,3/1").normalization.is_channels_last
    with pytest.raises(UserError, match="2 means, and the samples of mine have 5 features"):
        planned(data(5), normalize="1,2/3,4")


def test_a_standardised_run_resumes_to_the_bit_and_pieces_do_not_matter(tmp_path, monkeypatch):
    options = {"rounds": 4, "checkpoint_every": 1, "lr": 0.1}
    execute(planned(data(5), **options), tmp_path / "whole")
    execute(planned(data(5), **{**options, "rounds": 2}), tmp_path / "parts")
    execute(planned(data(5), **options), tmp_path / "parts", resume=True)
    same(tmp_path / "whole", tmp_path / "parts")
    files = [RunFolder.open(tmp_path / name).preprocessing() for name in ("whole", "parts")]
    assert files[0] == files[1]
    assert files[0].normalization == planned(data(5)).normalization
    monkeypatch.setattr(standardization, "_CHUNK", 10)
    pieces = planned(data(5)).normalization
    np.testing.assert_allclose(pieces.std, files[0].normalization.std, rtol=1e-13)


@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_other_targets_are_learned(kind):
    x = data(5).x
    y = torch.stack([(x[:, 0] > 12), (x[:, 1] > 10)], 1).float()
    if kind == "numbers":
        y = torch.stack([x[:, 0] - 12, x[:, 1] - 10], 1) / 5
    dataset = Dataset("mine", x, y, 2)
    options = {**OPTIONS, "method": "fedavg", "eval_every": 30, "save_models": False}
    history = fedala.run(dataset=dataset, rounds=30, **options).history
    assert history[-1].loss < 0.7 * history[0].loss


def test_nodes_get_the_figures_of_the_simulation():
    """On Flower, nobody could fit them, so that `standard` itself is refused."""
    checked = planned(data(20, 3), rounds=2)
    given = give_figures(checked)
    federation, config = checked.federation, given.config
    experiment = Experiment.build(config, federation, None)
    assert experiment.plan.normalization == checked.normalization
    rows = torch.arange(60)
    assert torch.equal(experiment.task.inputs(rows), build_task(checked)[0].inputs(rows))
    for normalize in ("standard", None):
        refused = Config.from_values({**OPTIONS, "dataset": "mine", "normalize": normalize})
        with pytest.raises(UserError, match="samples of all clients"):
            Experiment.build(refused, federation, None)
    assert give_figures(planned(data(5), normalize="1/2")).config.normalize == "1/2"


def test_a_server_without_samples_refuses_to_fit(tmp_path):
    np.savez(tmp_path / "mine.npz", x=data(5).x.numpy(), y=Y.numpy())
    values = {**OPTIONS, "dataset": str(tmp_path / "mine.npz")}
    with pytest.raises(UserError, match="give the figures"):
        prepare_server(Config.from_values(values), None)
    prepare_server(Config.from_values({**values, "normalize": "none"}), None)


@pytest.mark.parametrize(
    ("options", "says", "says_not"),
    [
        (
            ["--rounds", "1"],
            ["mlp, lr 0.1 (the default here; --lr changes it)", "(default for mlp; --normalize"],
            "steps",
        ),
        (["--rounds", "1", "--lr", "0.2", "--normalize", "none"], ["lr 0.2, rounds"], "(default"),
    ],
)
def test_defaults_are_said_aloud(options, says, says_not, tmp_path):
    np.savez(tmp_path / "mine.npz", x=data(5).x.numpy(), y=Y.numpy())
    arguments = ["run", "--dataset", str(tmp_path / "mine.npz"), "--out", str(tmp_path / "run")]
    usual = ["--method", "fedavg", "--clients", "3", "--partition", "iid", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, *usual, *options], env={"COLUMNS": "500"})
    assert result.exit_code == 0, result.output
    line = " ".join(result.stderr.split())
    assert all(part in line for part in says)
    assert says_not not in line


def test_a_network_in_lanes_learns_from_standardised_features():
    """With features of very different scales, which no model learns from as they are."""
    dataset = data(5)
    scales = torch.tensor([1e-3, 1e4, 1.0, 1e2, 1e-2])
    scaled = Dataset("mine", dataset.x * scales, Y, 3)
    models = []
    for one in (dataset, scaled):
        result = fedala.run(dataset=one, rounds=2, precision="float64", lanes="all", **OPTIONS)
        models.append(result.models)
    for key, model in models[0].items():
        assert_close(models[1][key], model, 1e-4)
