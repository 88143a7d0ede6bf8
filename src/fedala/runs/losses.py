"""The loss of a run: what the config names, or else what the data asks for."""

import math

import numpy as np

from fedala.data import Dataset, Federation
from fedala.data.tabular import may_be_numbers
from fedala.errors import Caution, UserError, printable
from fedala.lanes.losses import CrossEntropy, Loss, LossFunction, MultiLabel, Regression, as_loss
from fedala.options import name_option, suggest
from fedala.runs.config import Config

#: Models train well on targets of about 1; beyond this, they hardly learn, or diverge.
_LARGE_TARGETS = 10
REGRESSIONS = ("mse", "mae", "huber")
LOSSES = ("cross_entropy", "multilabel", *REGRESSIONS)


def make_loss(config: Config, federation: Federation, own: LossFunction | None = None) -> Loss:
    """Return the loss of a run, or the user's own. Refuse one that does not fit the data."""
    data = federation.dataset
    if own is not None:
        _refuse_label_options(config, "a loss of your own")
        return as_loss(own, data.y)
    name = config.loss or {"classes": "cross_entropy", "labels": "multilabel"}.get(data.kind, "mse")
    if name == "own":
        raise UserError(
            "This run has a loss of its own, a Python function: give it to run again, as loss=…."
        )
    if name not in LOSSES:
        raise UserError(f"There is no loss {name!r}{suggest(name, LOSSES)}.")
    _check_fit(name, data)
    if name == "cross_entropy":
        return CrossEntropy(config.label_smoothing, _class_weights(config, federation))
    if name == "multilabel":
        return MultiLabel(config.label_smoothing, _class_weights(config, federation))
    _refuse_label_options(config, f"the loss {name}")
    return Regression(name)


def _check_fit(name: str, data: Dataset) -> None:
    """Refuse a loss whose targets are of another kind."""
    wanted = ""
    if name == "cross_entropy" and data.kind != "classes":
        wanted, others = "class labels (whole numbers)", "multilabel, mse, mae or huber"
    elif name == "multilabel" and not data.is_binary:
        wanted, others = "a matrix of zeros and ones", "mse, mae or huber"
        if data.kind == "classes":
            others = "cross_entropy"
    elif name not in ("cross_entropy", "multilabel") and data.kind == "classes":
        wanted, others = "float targets", "cross_entropy, or give the labels as floats"
    if wanted:
        raise UserError(
            f"The loss {name} needs {wanted}, and {data.name} has {data.targets}: use {others}."
        )


def refuse_single_samples(data: Dataset) -> None:
    """Refuse whole numbers as classes if most of them have a single sample: nobody can learn them.

    Whoever names a loss has said what the numbers are.
    """
    if data.kind != "classes" or not may_be_numbers(data.class_names):
        return
    single = int((np.bincount(data.y.numpy()) == 1).sum())
    if 2 * single > data.classes:
        raise UserError(
            f"{data.name} has {data.classes:,} different whole numbers as labels, and {single:,} "
            "of them have a single sample. If they are numbers to predict, say so with "
            f"{name_option('loss', 'mse')}, mae or huber; if they are classes, with "
            f"{name_option('loss', 'cross_entropy')}."
        )


def describe_large_targets(loss: Loss, federation: Federation) -> tuple[str, ...]:
    """Return a sentence if the numbers to predict are too large for the usual learning rates."""
    rows = np.concatenate([np.arange(0), *federation.known.train])
    if not isinstance(loss, Regression) or not len(rows):
        return ()
    y = federation.dataset.y[rows].numpy().astype(np.float64).reshape(len(rows), -1)
    size = np.sqrt(np.square(y).mean(0))
    largest = int(size.argmax())
    if size[largest] <= _LARGE_TARGETS:
        return ()
    mean, std = y[:, largest].mean(), y[:, largest].std()
    note = (
        f"The targets of {printable(federation.dataset.name, 100)} are large (mean {mean:.4g}, "
        f"standard deviation {std:.4g} over the training samples), so training may diverge or "
        "hardly learn. Standardise them first, as (y − mean) / std; a prediction times std plus "
        "mean is in their unit again."
    )
    return (Caution(note),)


def _refuse_label_options(config: Config, what: str) -> None:
    for name, default in (("label_smoothing", 0.0), ("class_weights", "none")):
        if getattr(config, name) != default:
            raise UserError(
                f"{name} is for cross_entropy and multilabel, not for {what}: leave it out."
            )


def _class_weights(config: Config, federation: Federation) -> tuple[float, ...]:
    """Return a weight for each class; none at all if all count the same."""
    if config.class_weights == "none":
        return ()
    if config.class_weights == "balanced":
        return _balanced_weights(federation)
    classes = federation.dataset.classes
    try:
        weights = tuple(float(text) for text in config.class_weights.split(","))
    except ValueError:
        weights = ()
    is_valid = all(0 <= weight < math.inf for weight in weights) and any(weights)
    if len(weights) != classes or not is_valid:
        raise UserError(
            f"class_weights must be none, balanced, or {classes} numbers from 0 on, separated by "
            f"commas, for {federation.dataset.targets}; it is {config.class_weights!r}."
        )
    return weights


def _balanced_weights(federation: Federation) -> tuple[float, ...]:
    """Weigh classes by the training samples of all clients.

    A class with n_c of n samples has the weight n/(classes·n_c), a label that n_c of n samples have
    (n − n_c)/n_c. One that nobody has for training has the weight 1.
    """
    federation = federation.known
    counts = federation.counts("train").sum(0)
    samples = sum(map(len, federation.train))
    if federation.dataset.kind == "classes":
        shares = samples / len(counts) / np.maximum(counts, 1)
    else:
        shares = (samples - counts) / np.maximum(counts, 1)
    return tuple(np.where(counts > 0, shares, 1.0).tolist())
