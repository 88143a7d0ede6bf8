"""The values that a config leaves open: the paper's for its datasets, and usual ones for others."""

from dataclasses import replace
from typing import Any

from fedala.data import Dataset, Federation, default_partition
from fedala.data.catalogue import find_known
from fedala.methods.server_optimizer import default_lr
from fedala.models import list_fitting_models
from fedala.runs.config import Config

#: Rounds of a run on the user's own data.
ROUNDS = 100
#: Learning rates of models that have the same for all datasets.
RATES = {"resnet18": 0.1, "fasttext": 0.1}
#: Learning rate of Adam and AdamW, for every dataset and model. The others are for SGD.
ADAM_RATE = 0.001
#: Own texts are mostly shorter than the news that 0.1 is for.
OWN_TEXTS = {"fasttext": 0.5}
TABULAR = {"mlp": 0.1, "cnn1d": 0.1, "lstm": 0.5}


def resolve(config: Config, federation: Federation) -> Config:
    """Return the config with the usual values for its dataset and model where it has None."""
    dataset, known = federation.dataset, find_known(config.dataset)
    fitting = list_fitting_models(dataset)
    model = known.model if known and known.model in fitting else fitting[0]
    values: dict[str, Any] = {"rounds": known.rounds if known else ROUNDS, "model": model}
    # Images stay as usual: as bytes, or as the floats that the user has made.
    if not config.has_own_model and dataset.x.is_floating_point() and dataset.x.ndim < 4:
        values["normalize"] = "standard"
    # What depends on a swept option is each point's own.
    if "optimizer" not in config.sweep:
        values["lr"] = choose_rate(replace(config, model=config.model or model), dataset)
    if config.server_optimizer != "none" and "server_optimizer" not in config.sweep:
        values["server_lr"] = default_lr(config.server_optimizer)
    values["partition"] = default_partition(dataset)
    rounds = int(config.rounds or values["rounds"])
    values["record_weights"] = -(-rounds // 20)  # about 20 times
    if config.schedule == "step" and "schedule" not in config.sweep:
        values["decay_every"] = max(1, rounds // 3)  # more rounds later do not change it
    missing = {name: value for name, value in values.items() if getattr(config, name) is None}
    return replace(config, clients=len(federation.train), **missing)


def choose_rate(config: Config, dataset: Dataset) -> float:
    """Return the usual learning rate of an optimiser with a model and a dataset."""
    if config.optimizer != "sgd":
        return ADAM_RATE
    known, model = find_known(config.dataset), str(config.model)
    usual = known.lr if known else 0.005 if dataset.vocabulary is None else 0.1
    if config.has_own_model:  # nothing is known of it
        return usual
    if known is None and model in OWN_TEXTS:
        return OWN_TEXTS[model]
    if model in TABULAR and dataset.kind == "numbers":
        return TABULAR[model] / 5  # squared errors are steeper than cross-entropy
    return {**RATES, **TABULAR}.get(model, usual)
