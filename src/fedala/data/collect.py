"""The samples that a client hands to ALA: tensors, NumPy arrays, a `Dataset` or a `DataLoader`."""

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from fedala.errors import UserError
from fedala.lanes.trees import leaves, tree_map

#: The most samples of data of unknown length, such as an `IterableDataset` without `__len__`.
STREAM_LIMIT = 100_000

Pair = tuple[Any, Any]
"""Inputs and targets: trees of tensors or arrays with a row for each sample."""


def collect_samples(
    data: Any,
    choose: Callable[[int], np.ndarray],
    split: Callable[[Any], Any] = lambda batch: batch,
) -> Pair:
    """Return the inputs and targets of the chosen samples, as trees of tensors.

    `choose` gets the number of samples, and returns the positions of those that are wanted.
    `split` turns a batch into a pair.
    """
    if isinstance(data, Dataset) or _is_arrow_dataset(data):
        if not isinstance(data, IterableDataset) and _get_length(data) is None:
            raise UserError(f"The dataset has no length: give {type(data).__name__} a __len__.")
        data = DataLoader(data, batch_size=256)
    if isinstance(data, DataLoader):
        if data.batch_sampler is not None and not isinstance(data.dataset, IterableDataset):
            x, y = tree_map(torch.as_tensor, _pick_samples(data, choose, split))
            return x, y
        pair = _check_pair(_concatenate(_read_batches(data, split)))
    else:
        pair = _check_pair(split(data))
    rows = choose(_count_rows(pair))
    x, y = tree_map(lambda leaf: torch.as_tensor(leaf[rows]), pair)
    return x, y


def _is_arrow_dataset(data: Any) -> bool:
    """Tell whether it is a dataset of Hugging Face, whose class torch does not know."""
    return hasattr(data, "__getitems__") and hasattr(data, "column_names")


def _get_length(data: Any) -> int | None:
    """Return the length that a dataset or sampler says it has, or None."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _count_rows(tree: Any) -> int:
    return len(next(leaf for _, leaf in leaves(tree)))


def _make_endless_error() -> UserError:
    return UserError(
        f"The data has not ended after {STREAM_LIMIT} samples and names no length: give the "
        "dataset (or its sampler) a __len__, or hand over a finite part of it."
    )


def _list_keys(sampler: Any) -> list[Any]:
    """List what a sampler yields, up to the length that it names.

    If it names no length and does not end, refuse it.
    """
    length = _get_length(sampler)
    keys = list(islice(sampler, STREAM_LIMIT + 1 if length is None else length))
    if length is None and len(keys) > STREAM_LIMIT:
        raise _make_endless_error()
    return keys


def _read_batches(loader: DataLoader[Any], split: Callable[[Any], Any]) -> list[Pair]:
    """Read the batches of a loader without a sampler, up to the length that its dataset names.

    A stream may never end. If it names no length, refuse it after `STREAM_LIMIT` samples.
    """
    length = _get_length(loader.dataset) if isinstance(loader.dataset, IterableDataset) else None
    pairs: list[Pair] = []
    count = 0
    for batch in loader:
        if length is not None and count >= length:
            break
        pair = _check_pair(split(batch))
        pairs.append(pair)
        count += _count_rows(pair)
        if length is None and count > STREAM_LIMIT:
            raise _make_endless_error()
    if length is not None and count > length:
        pairs[-1] = tree_map(lambda leaf: leaf[: len(leaf) - (count - length)], pairs[-1])
    return pairs


def _pick_samples(
    loader: DataLoader[Any], choose: Callable[[int], np.ndarray], split: Callable[[Any], Any]
) -> Pair:
    """Return the chosen samples of a loader's epoch, each once and in the dataset's own order."""
    batches: Any = loader.batch_sampler
    sampler = (
        batches.sampler
        if type(batches) is BatchSampler
        else list(chain.from_iterable(_list_keys(batches)))
    )
    if (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):  # a shuffle yields all samples, and its generator is the user's: draw nothing from it
        sampler = range(sampler.num_samples)
    keys = np.unique(np.array(_list_keys(sampler)))
    samples = _read_samples(loader.dataset, keys[choose(len(keys))].tolist())
    if not samples:
        return torch.empty(0), torch.empty(0)
    try:
        return _check_pair(split(loader.collate_fn(samples)))
    except (RuntimeError, TypeError, KeyError) as error:
        raise UserError(f"The samples cannot be put together as one batch: {error}.") from error


def _read_samples(dataset: Any, keys: list[Any]) -> list[Any]:
    """Read samples one by one, or at once if the dataset can, as a loader does."""
    read_many = getattr(dataset, "__getitems__", None)
    return list(read_many(keys)) if callable(read_many) else [dataset[key] for key in keys]


def _concatenate(pairs: Sequence[Pair]) -> Pair:
    if not pairs:
        return torch.empty(0), torch.empty(0)
    try:
        x, y = tree_map(lambda *parts: torch.cat([torch.as_tensor(part) for part in parts]), *pairs)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"The batches cannot be put together: {error}.") from error
    return x, y


def _check_pair(data: Any) -> Pair:
    """Return `data` if it is inputs and targets with a row for each sample, or refuse it."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise UserError(
            "The data must be a pair (inputs, targets), a Dataset of such pairs, or a DataLoader."
        )
    for name, tree in zip(("inputs", "targets"), data, strict=True):
        tables = [leaf for _, leaf in leaves(tree)]
        if not tables or not all(_is_table(leaf) for leaf in tables):
            raise UserError(
                f"The {name} must be tensors or NumPy arrays, with a row for each sample."
            )
    lengths = {len(leaf) for _, leaf in leaves(tuple(data))}
    if len(lengths) != 1:
        raise UserError(
            f"Inputs and targets must have the same number of samples, not {sorted(lengths)}."
        )
    return data[0], data[1]


def _is_table(leaf: Any) -> bool:
    is_numeric = isinstance(leaf, Tensor) or (
        isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"
    )
    return is_numeric and leaf.ndim > 0
