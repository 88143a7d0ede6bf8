"""The samples of newcomers, with the classes, words and columns of the run that they join."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedala.data import Dataset, Federation
from fedala.data.catalogue import LENGTH
from fedala.data.columns import Wanted
from fedala.data.dataset import PARTS
from fedala.data.federation import split_share
from fedala.data.frames import is_frame
from fedala.data.from_python import make_raw
from fedala.data.load import build_more, load_more
from fedala.data.matching import match_classes, order_features
from fedala.data.preprocessing import Preprocessing
from fedala.data.text import fit_ids
from fedala.runs.config import Config
from fedala.runs.losses import REGRESSIONS
from fedala.runs.server_state import FinishedRun


def make_federation(finished: FinishedRun, data: Any, first: int) -> Federation:
    """Return the newcomers as the clients from a number on; the ones before have no samples."""
    if isinstance(data, Federation):
        own, dataset = data, _match_features(data.dataset, finished.folder.preprocessing())
    else:
        dataset = _load(finished, data)
        own = _divide(dataset, finished.config, first)
    nothing = (np.arange(0),) * first
    parts: dict[str, Any] = {part: (*nothing, *getattr(own, part)) for part in PARTS}
    # The positions in a list are no names: they would be those of the run's first clients.
    own_names = () if isinstance(data, list) else own.client_names
    names = tuple(map(str, range(first))) + own_names if own_names else ()
    return Federation(dataset, **parts, client_names=names, held_out=len(own.train))


def _load(finished: FinishedRun, data: Any) -> Dataset:
    """Return the new samples with the classes, words and columns of the run."""
    config, fed = finished.config, finished.folder.preprocessing()
    names = fed.class_names if fed and fed.class_names else finished.class_names
    if isinstance(data, Dataset):
        return _match(data, names, fed)
    is_regression = config.loss in REGRESSIONS
    features = fed.feature_names if fed else ()
    wanted = Wanted(
        config.clients_by,
        config.label_column,
        config.dropped_columns,
        is_regression,
        features,
        is_further=True,
    )
    known: dict[str, Any] = {
        "tokens": fed.tokens if fed else (),
        "length": fed.shape[0] if fed else LENGTH,
        "feature_names": features,
    }
    if isinstance(data, str | Path):
        return load_more(str(data), names, config.resize, wanted, **known)
    if is_frame(data):
        columns = [str(column) for column in data.columns]
        clients = wanted.clients if wanted.clients in columns else None
        raw = make_raw(data, "The new data", wanted._replace(clients=clients))
    else:
        raw = make_raw(data, "The new data", wanted._replace(clients=None))
    dataset = build_more("The new data", raw, names, **known)
    is_tokens = dataset.vocabulary is not None and fed is not None
    return replace(dataset, vocabulary=fed.vocabulary) if fed and is_tokens else dataset


def _match(data: Dataset, names: tuple[str, ...], fed: Preprocessing | None) -> Dataset:
    """Return a dataset with the numbers that its words, columns and classes have in the run."""
    data = _match_features(data, fed)
    if data.kind != "classes":
        return data
    y = match_classes(data.y.numpy(), data.class_names, names, data.name)
    return replace(data, y=torch.from_numpy(y), classes=len(names), class_names=names)


def _match_features(data: Dataset, fed: Preprocessing | None) -> Dataset:
    """Return a dataset with the numbers that its words and columns have in the run."""
    if fed and fed.tokens and data.tokens:
        x = fit_ids(data.x, data.tokens, fed.tokens, fed.shape[0])
        data = replace(data, x=x, tokens=fed.tokens, vocabulary=fed.vocabulary)
    elif fed and fed.feature_names and data.feature_names:
        x = order_features(data.x, data.feature_names, fed.feature_names)
        data = replace(data, x=x, feature_names=fed.feature_names)
    return data


def _divide(dataset: Dataset, config: Config, first: int) -> Federation:
    """Give each client its samples: in the order of the data if they say how they are split."""
    owners = np.zeros(len(dataset.y)) if dataset.clients is None else dataset.clients.numpy()
    splits = []
    for client in range(max(1, len(dataset.client_names))):
        share = np.flatnonzero(owners == client)
        if dataset.split is None:
            splits.append(split_share(share, config.partition_seed, first + client))
        else:
            given = dataset.split.numpy()[share]
            splits.append({part: share[given == i] for i, part in enumerate(PARTS)})
    parts: dict[str, Any] = {part: tuple(own[part] for own in splits) for part in PARTS}
    return Federation(dataset, **parts, client_names=dataset.client_names)
