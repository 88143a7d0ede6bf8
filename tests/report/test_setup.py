"""What the page and sentences say of a run's set-up: scaling, defaults, methods that cannot."""

import warnings

import numpy as np
import pytest

from fedala import UserError, load, run
from fedala.report import page
from fedala.runs.config import Config
from fedala.runs.plan import plan
from fedala.runs.results import describe_spread


def test_the_page_shows_how_features_are_scaled_and_python_says_the_defaults(tmp_path, capfd):
    random = np.random.default_rng(0)
    x = random.normal(250_000, 90_000, size=(80, 3)).astype("float32")
    result = run(
        dataset=(x, np.arange(80) % 2),
        method="local,fedavg",
        model="mlp",
        partition="iid",
        clients=2,
        rounds=1,
        device="cpu",
        progress=True,
        out=tmp_path / "run",
    )
    said = capfd.readouterr().err
    assert f"lr {result.config.lr:g} (the default here; lr changes it)" in said
    text = page.write([tmp_path / "run"]).read_text()
    assert "The model is fed (x − mean) / std of each" in text
    assert "1 round" in repr(result)
    assert "1 rounds" not in repr(result)
    with pytest.raises(UserError, match="as in method='fedavg'"):
        load(tmp_path / "run")


def test_methods_that_cannot_train_with_an_optimizer_are_named_with_those_that_can():
    config = Config.from_values({"method": "partialfed,fedavg,fedala", "optimizer": "adamw"})
    with pytest.raises(UserError, match="Leave out partialfed, as in method='fedavg,fedala',"):
        plan(config)
    with pytest.raises(UserError, match=r"^PartialFed cannot train[^L]*$"):
        plan(Config.from_values({"method": "partialfed", "optimizer": "adamw"}))


def test_infinite_scores_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert describe_spread(np.array([np.inf, 1.0]))["mean"] == np.inf
