"""A user's own model in `run`: wrong use is a sentence, and the last layer is that used last."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import Net
from torch import Tensor, nn

from fedala import ALA, UserError, run
from fedala.data import Dataset, Federation
from fedala.models import fasttext
from fedala.runs.config import Config
from fedala.runs.execute import execute
from fedala.runs.model_trial import first_output
from fedala.runs.observer import RunObserver
from fedala.runs.plan import plan

QUICK = {"rounds": 1, "clients": 2, "partition": "iid", "batch_size": 10}
ONE = Net()


def small_dataset() -> Dataset:
    random = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.randn(60, 1, 6, 6, generator=random) + y.view(-1, 1, 1, 1)
    return Dataset("own", x, y, 3)


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(5, 3), nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)).relu())


class OneHot(nn.Module):
    """`one_hot` takes int64 only."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.one_hot(x, 9).to(self.fc.weight.dtype).mean(1))


@pytest.mark.parametrize(("scores", "count"), [(3, 0), (4, 1), (1000, 1)])
def test_more_scores_than_classes_are_said(scores, count):
    def make():
        return nn.Sequential(nn.Flatten(), nn.Linear(36, scores))

    config = Config.from_values({**QUICK, "method": "fedavg"})
    notes = plan(config, small_dataset(), make).notes
    assert len(notes) == count
    assert all(f"gives {scores:,} scores, and own has 3 classes" in note for note in notes)


def with_data(model, **options):
    return run(method="fedavg", dataset=small_dataset(), model=model, **{**QUICK, **options})


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (ONE, "and not a model: each seed starts from weights of its own, so Net is made"),
        (Net().state_dict(), "and not a state dict: the function may load it"),
        (3, "and not int"),
        (lambda: ONE, "this one returns the same model, or its layers, again"),
        (lambda: nn.Sequential(ONE), "this one returns the same model, or its layers, again"),
        (nn.Linear, "cannot be made: .*in_features.*such as lambda: Net"),
        (lambda: Net().state_dict(), "this one returns OrderedDict"),
        (lambda: Net().to("meta"), "on the device meta"),
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), "its layer is lazy"),
    ],
)
def test_what_makes_no_model_is_refused(model, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        with_data(model, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_loss_without_a_mean_is_refused():
    with pytest.raises(UserError, match=r"shape \(2,\): use reduction='mean'"):
        with_data(Net, loss=nn.CrossEntropyLoss(reduction="none"))


@pytest.mark.parametrize("make", [lambda: Net().requires_grad_(False), nn.Flatten])
def test_a_model_that_cannot_learn_is_refused(make, tmp_path):
    with pytest.raises(UserError, match="has no parameters that learn"):
        with_data(make, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_whose_last_layer_learns_is_taken():
    def make() -> nn.Module:
        model = Net().requires_grad_(False)
        model.out.requires_grad_(True)
        return model

    assert len(with_data(make).history) == 2


@pytest.mark.parametrize("method", ["fedala", "fedrep"])
def test_the_order_of_registration_does_not_matter(method):
    """The head comes first in `HeadFirst`, and is the last layer all the same."""
    planned = plan(Config.from_values({**QUICK, "method": method}), small_dataset(), HeadFirst)
    assert planned.layers == (("head.weight", "head.bias"), ("body.weight", "body.bias"))
    model = planned.make_skeleton()
    if method == "fedala":
        assert planned.methods[0].ala_parameters(model, 1) == ("head.weight", "head.bias")
    else:
        assert planned.methods[0].ala_parameters(model, 1) == ("body.weight", "body.bias")


@pytest.mark.parametrize(
    ("methods", "options", "lines"),
    [
        ("fedala", {}, ["head.weight, head.bias: 18 of 203 parameters"]),
        ("fedala,ditto+ala,fedavg", {}, ["head.weight, head.bias: 18 of 203 parameters"]),
        ("fedala", {"server_optimizer": "adam"}, ["head.weight, head.bias: 18 of 203 parameters"]),
        (
            "fedala,ditto+ala,fedrep+ala",
            {"set": {"fedala.layers": 2}},
            [
                "head.weight, head.bias, body.weight, body.bias: 203 of 203 parameters (fedala)",
                "head.weight, head.bias: 18 of 203 parameters (ditto+ala)",
                "body.weight, body.bias: 185 of 203 parameters (fedrep+ala)",
            ],
        ),
        ("fedavg", {}, []),
    ],
)
def test_a_run_says_what_ala_blends(methods, options, lines):
    config = Config.from_values({**QUICK, "method": methods, **options})
    planned = plan(config, small_dataset(), HeadFirst)
    assert planned.blended == tuple(f"ALA blends {line}." for line in lines)
    said = []
    execute(planned, None, observer=RunObserver(on_message=said.append))
    assert [line for line in said if line.startswith("ALA blends")] == list(planned.blended)


def test_a_server_without_samples_finds_the_same_order_as_its_clients():
    """On Flower, it has two samples of zeros."""
    config = Config.from_values({**QUICK, "clients": 1, "method": "fedrep"})
    made_up = Dataset("own", torch.zeros(2, 1, 6, 6), torch.tensor([0, 1]), 3)
    rows = (np.arange(2),)
    server = plan(config, Federation(made_up, rows, rows, rows), HeadFirst)
    assert server.layers == plan(config, small_dataset(), HeadFirst).layers
    assert server.layers[0] == ("head.weight", "head.bias")


def test_a_model_in_double_precision_runs_in_that_of_the_run():
    one, other = (with_data(make, seed=3) for make in (Net, lambda: Net().double()))
    assert [len(result.methods["fedavg"].history) for result in (one, other)] == [2, 2]


def test_short_tokens_and_labels_become_indices():
    x = torch.randint(9, (40, 4), dtype=torch.int32)
    y = torch.randint(3, (40,))
    run(method="fedavg", dataset=Dataset("own", x, y, 3, vocabulary=9), model=OneHot, **QUICK)
    report = ALA(max_epochs=1).initialize(OneHot(), OneHot(), (x, y.to(torch.int32)))
    assert report.epochs == 1


def test_a_table_of_too_few_words_is_refused():
    """The highest word is in the last text: two texts of a trial would not find it."""
    x, y = torch.zeros(40, 4, dtype=torch.int32), torch.arange(40) % 3
    x[-1, 2] = 3000
    words = Dataset("words", x, y, 3)
    with pytest.raises(UserError, match=r"highest word is 3,000, so a table needs .* 3,001 rows"):
        run(method="fedavg", dataset=words, model=lambda: fasttext(3000, 3), **QUICK)
    done = run(method="fedavg", dataset=words, model=lambda: fasttext(3001, 3), **QUICK)
    assert len(done.history) == 2


def test_a_model_that_nobody_has_run_says_that_its_order_is_not_known():
    with pytest.warns(UserWarning, match="order in which they are registered: give governs"):
        assert ALA().governs(HeadFirst()) == ("body.weight", "body.bias")
    assert "has not been run" in ALA().describe(HeadFirst())
    table = ALA().describe(HeadFirst(), torch.zeros(2, 36)).splitlines()
    assert table[1].split() == ["1", "18", "18", "18", "head"]
    assert table[2].split() == ["2", "185", "185", "0", "body"]
    assert len(table) == 3


def test_a_model_that_cannot_train_on_a_single_sample_is_refused_if_it_would_have_to():
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout())

    random = np.random.default_rng(0)
    x, y = random.normal(size=(30, 4)).astype("f4"), np.arange(30) % 3
    with pytest.raises(UserError, match="Client 1 has a single training sample, and the model"):
        run(method="fedavg", dataset=[(x[:20], y[:20]), (x[20:22], y[20:22])], model=build)
    with pytest.raises(UserError, match="With batch_size 1, the model cannot train on a batch"):
        run(method="fedavg", dataset=[(x, y), (x, y)], model=build, batch_size=1)


def test_a_trial_in_training_mode_leaves_the_model_as_it_is():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.BatchNorm1d(3))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    first_output(model, small_dataset(), training=True)
    assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())
