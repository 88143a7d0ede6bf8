"""ALA takes samples in any form, and refuses data that is not samples."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from ala.common import EXACT, FINE, PAIR, X, Y, assert_same, entries, labels, learn_on, mlp, twins
from ala.models import TEXTS, Attention, TwoInputs
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

from fedala import ALA, UserError

# --- any data -------------------------------------------------------------------------------------


class Pairs(Dataset):
    """A map-style dataset of the user's own. Labels are plain numbers."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], int(self.y[i])


class Stream(IterableDataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self):
        return iter(zip(self.x, self.y, strict=True))


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


SAME_DATA: dict[str, Callable[[], Any]] = {
    "list": lambda: [X, Y],
    "numpy": lambda: (X.numpy(), read_only(Y.numpy())),
    "list-loader": lambda: DataLoader(list(zip(X, Y, strict=True)), batch_size=7, shuffle=True),
    "tensor-sampler": lambda: DataLoader(Pairs(X, Y), batch_size=7, sampler=torch.randperm(25)),
    "batched-dataset": lambda: DataLoader(
        list(zip(X.split(10), Y.split(10), strict=True)), batch_size=None
    ),
    "tensor-dataset": lambda: TensorDataset(X, Y),
    "dataset": lambda: Pairs(X, Y),
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=7),
    "shuffled-loader": lambda: DataLoader(Pairs(X, Y), batch_size=7, shuffle=True),
    "dropping-loader": lambda: DataLoader(Pairs(X, Y), batch_size=7, shuffle=True, drop_last=True),
    "stream": lambda: Stream(X, Y),
    "stream-loader": lambda: DataLoader(Stream(X, Y), batch_size=3),
}


@pytest.mark.parametrize("kind", SAME_DATA)
def test_the_same_samples_give_the_same_result_in_any_form(kind):
    assert_same(learn_on(SAME_DATA[kind](), sample=0.6), learn_on((X, Y), sample=0.6), **FINE)


RESTRICTED: dict[str, Callable[[], DataLoader]] = {
    "sampler": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=4, sampler=SubsetRandomSampler(range(5, 15))
    ),
    "batch-sampler": lambda: DataLoader(
        TensorDataset(X, Y), batch_sampler=BatchSampler(SubsetRandomSampler(range(5, 15)), 4, False)
    ),
    "dropping": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=4, sampler=SubsetRandomSampler(range(5, 15)), drop_last=True
    ),
    "repeating": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=4, sampler=[*range(14, 4, -1), 5, 5, 9]
    ),
    "batches-by-hand": lambda: DataLoader(
        TensorDataset(X, Y), batch_sampler=[[14, 5, 6], [7, 8], [*range(8, 14)]]
    ),
}


@pytest.mark.parametrize("kind", RESTRICTED)
def test_a_loader_that_leaves_samples_out_is_obeyed(kind):
    """A sampler says which samples are the client's own. The others may be the test set."""
    assert_same(
        learn_on(RESTRICTED[kind](), sample=1.0),
        learn_on((X[5:15], Y[5:15]), sample=1.0),
        **FINE,
    )


def test_a_shuffled_loader_draws_nothing_from_the_users_generators():
    generator = torch.Generator().manual_seed(1)
    before = torch.get_rng_state(), generator.get_state()
    learn_on(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True))
    learn_on(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, generator=generator))
    for now, then in zip((torch.get_rng_state(), generator.get_state()), before, strict=True):
        assert torch.equal(now, then)


def test_the_loaders_own_way_to_make_a_batch_is_used():
    """Texts of many lengths, padded by the user's collate function to whatever is the longest."""

    def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        texts, targets = zip(*samples, strict=True)
        return nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.stack(targets)

    texts = [(TEXTS[i, : 2 + i % 5], WHICH[i]) for i in range(11)]
    local, received = twins(Attention)
    ALA(sample=1.0, max_epochs=2).initialize(local, received, DataLoader(texts, collate_fn=padded))
    expected, received = twins(Attention)
    ALA(sample=1.0, max_epochs=2).initialize(expected, received, padded(texts))
    assert_same(local, expected, **EXACT)


class Rows(Dataset):
    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


LEFT, RIGHT, WHICH = PAIR[0], PAIR[1], labels(11)
TUPLES = [((LEFT[i], RIGHT[i]), WHICH[i]) for i in range(11)]
DICTS = [({"left": LEFT[i], "right": RIGHT[i]}, WHICH[i]) for i in range(11)]


@pytest.mark.parametrize(
    "data",
    [
        Rows(TUPLES),
        Rows(DICTS),
        DataLoader(Rows(TUPLES), batch_size=3, shuffle=True),
        DataLoader(TUPLES, batch_size=3, shuffle=True),
    ],
    ids=["tuples", "dicts", "loader", "loader-of-a-list"],
)
def test_samples_may_have_several_inputs(data):
    def learned(data: Any) -> dict[str, Tensor]:
        local, received = twins(TwoInputs)
        ALA(batch_size=4, max_epochs=2).initialize(local, received, data)
        return entries(local)

    assert_same(learned(data), learned((PAIR, WHICH)), **FINE)


NOT_PAIRS: dict[str, Any] = {
    "inputs": X,
    "no-target": (X,),
    "three": (X, Y, Y),
    "lengths": (X, Y[:-1]),
    "name": "digits",
    "none": None,
    "none-target": (X, None),
    "no-inputs": ((), Y),
    "no-named-inputs": ({}, Y),
    "one-number": (X, Y[0]),
    "numbers": (torch.tensor(1.0), torch.tensor(0)),
    "lists": (X.tolist(), Y.tolist()),
    "objects": (X.numpy().astype(object), Y),
    "unlabelled": TensorDataset(X),
    "unlabelled-loader": DataLoader(TensorDataset(X)),
    "dicts-without-target": DataLoader([{"input": X[i], "class": Y[i]} for i in range(25)]),
    "dicts-with-two-targets": DataLoader(
        [{"img": X[i], "fine_label": Y[i], "coarse_label": Y[i]} for i in range(25)]
    ),
    "dicts-with-two-inputs": DataLoader([{"a": X[i], "b": X[i], "label": Y[i]} for i in range(25)]),
    "dicts-of-texts": DataLoader([{"img": "a path", "label": y} for y in Y]),
    "triples": DataLoader(TensorDataset(X, Y, Y)),
    "ragged-stream": DataLoader([(X[:3, :2], Y[:3]), (X[3:], Y[3:])], batch_size=None),
    "ragged": DataLoader([(X[i, : i % 4], Y[i]) for i in range(25)]),
    "texts": DataLoader([(X[i], "a class") for i in range(25)]),
    "nones": DataLoader([(X[i], None) for i in range(25)]),
    "single-samples": DataLoader(TensorDataset(X, Y), batch_size=None),
}


@pytest.mark.parametrize("data", NOT_PAIRS.values(), ids=NOT_PAIRS)
def test_data_that_is_not_pairs_is_refused_and_changes_nothing(data):
    local, received = twins(mlp)
    before = entries(local)
    with pytest.raises(UserError):
        ALA().initialize(local, received, data)
    assert_same(local, before, **EXACT)


class Endless(IterableDataset):
    """Yields its samples again and again; it may say how many there are."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit

    def __iter__(self):
        for i in itertools.count():
            if i >= self.limit:
                return
            yield X[i % 25], Y[i % 25]


class EndlessWithLength(Endless):
    def __len__(self) -> int:
        return 25


class EndlessSampler(Sampler):
    def __init__(self) -> None: ...

    def __iter__(self):
        return itertools.cycle(range(25))


class EndlessSamplerWithLength(EndlessSampler):
    def __len__(self) -> int:
        return 25


def endless_batches():
    while True:
        yield [0, 1]


@pytest.mark.parametrize(
    "data",
    [
        Endless(),
        DataLoader(Endless(), batch_size=64),
        DataLoader(Pairs(X, Y), batch_size=5, sampler=EndlessSampler()),
        DataLoader(Pairs(X, Y), batch_sampler=endless_batches()),
        DataLoader(Endless(10**9), batch_size=7),
    ],
    ids=["stream", "loader", "sampler", "batch-sampler", "long"],
)
def test_data_that_does_not_end_is_refused(data, monkeypatch):
    monkeypatch.setattr("fedala.data.collect.STREAM_LIMIT", 1000)
    local, received = twins(mlp)
    before = entries(local)
    with pytest.raises(UserError, match=r"has not ended after 1000 samples.*__len__"):
        ALA().initialize(local, received, data)
    assert_same(local, before, **EXACT)


@pytest.mark.parametrize(
    "data",
    [
        EndlessWithLength(),
        DataLoader(EndlessWithLength(), batch_size=7),
        DataLoader(EndlessWithLength(), batch_size=5),
        DataLoader(Pairs(X, Y), batch_size=5, sampler=EndlessSamplerWithLength()),
        Endless(25),
    ],
    ids=["stream", "loader", "whole-batches", "sampler", "ends"],
)
@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_a_stream_is_followed_up_to_its_length(data, monkeypatch):
    monkeypatch.setattr("fedala.data.collect.STREAM_LIMIT", 25)
    assert_same(learn_on(data), learn_on((X, Y)), **FINE)


class WithoutLength(Dataset):
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i], Y[i]


def test_a_dataset_without_a_length_is_refused():
    with pytest.raises(UserError, match="WithoutLength a __len__"):
        ALA().initialize(*twins(mlp), WithoutLength())
