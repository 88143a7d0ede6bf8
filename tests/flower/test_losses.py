"""Float targets on Flower: the same figures as in a simulation, and scores that are checked."""

import math

import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

import torch  # noqa: E402
from flower.inprocess import RUN, build_federation, make_samples, run_in_process  # noqa: E402
from flower.test_parity import assert_same_rows  # noqa: E402
from flwr.app import Context, RecordDict  # noqa: E402
from small import Net  # noqa: E402

import fedala  # noqa: E402
from fedala.data import Dataset, Federation  # noqa: E402
from fedala.errors import UserError  # noqa: E402
from fedala.flower import CustomApp  # noqa: E402
from fedala.flower.experiment import prepare_client, prepare_server, read_run_config  # noqa: E402
from fedala.flower.reply_checks import _check_scores  # noqa: E402
from fedala.metrics import ACCURACY, LABEL_ACCURACY, MSE  # noqa: E402


def with_targets(data, loss):
    """Return the same samples with float targets: a number, or a label for each class."""
    if loss == "multilabel":
        return Dataset("own", data.x, torch.nn.functional.one_hot(data.y, 3), 3)
    return Dataset("own", data.x, data.y / 2 - 0.4, 1)


def custom_app(loss):
    outputs = 3 if loss == "multilabel" else 1
    return CustomApp(
        lambda: Net(outputs),
        lambda context: with_targets(make_samples(context.node_config["partition-id"]), loss),
        (1, 6, 6),
        outputs,
    )


@pytest.mark.parametrize(
    "options",
    [{"loss": "mse"}, {"loss": "multilabel", "label_smoothing": 0.1, "class_weights": "1,2,3"}],
)
def test_a_federation_equals_the_simulation(options, tmp_path):
    custom = custom_app(options["loss"])
    _, federated = run_in_process(tmp_path, custom=custom, method="fedala", **options)
    joint = build_federation()
    data = with_targets(joint.dataset, options["loss"])
    federation = Federation(data, joint.train, joint.test, joint.validation)
    simulated = fedala.run(
        dataset=federation, model=custom.model, method="fedala", lanes="1", **RUN, **options
    )
    assert_same_rows(federated.history, simulated.history)
    assert federated.history[-1].metric == simulated.history[-1].metric != ACCURACY


def test_what_only_one_side_knows_is_refused():
    config, _ = read_run_config({"clients": 3, "class_weights": "balanced"})
    with pytest.raises(UserError, match="here nobody has them"):
        prepare_server(config, custom_app("multilabel"))
    context = Context(1, 100, {"partition-id": 0}, RecordDict(), {"clients": 3})
    with pytest.raises(UserError, match=r"have 1 float target: name the loss in the run config"):
        prepare_client(context, custom_app("mse"))


@pytest.mark.parametrize(
    ("metric", "values", "is_possible"),
    [
        (ACCURACY, [3.0, 1.0, 4.0], True),
        (ACCURACY, [2.5, 1.0, 4.0], False),
        (LABEL_ACCURACY, [2.5, 1.0, 4.0], True),
        (LABEL_ACCURACY, [4.5, 1.0, 4.0], False),
        (LABEL_ACCURACY, [math.nan, 1.0, 4.0], False),
        (MSE, [17.5, 1.0, 4.0], True),
        (MSE, [math.inf, math.nan, 4.0], True),
        (MSE, [-0.1, 1.0, 4.0], False),
        (MSE, [1e305, 1.0, 4.0], False),
        (MSE, [1.0, 1.0, -4.0], False),
    ],
)
def test_scores_are_checked_by_their_metric(metric, values, is_possible):
    if is_possible:
        assert len(_check_scores(values, True, ("test",), "scores", metric)) == 1
    else:
        with pytest.raises(UserError, match="scores are not possible"):
            _check_scores(values, True, ("test",), "scores", metric)
