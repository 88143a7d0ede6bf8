"""Rounds of ALA on lanes that differ in size, model and stage, for tests of weight learning."""

from typing import Any

import torch
import torch.nn.functional as F
from small import Net, assert_close, ragged_task, start_of
from torch import nn

from fedala.lanes import row_gradients
from fedala.lanes.cohort import Cohort
from fedala.lanes.local_aggregation import Outcome, init_state, initialize
from fedala.lanes.messages import Message
from fedala.lanes.trees import Params, join, share
from fedala.lanes.weight_learning import Settings
from fedala.models import cnn, fasttext

#: Full batches of four, shorter last ones, two clients of one size, one batch, none.
SIZES = [22, 17, 13, 13, 8, 5, 3, 0]
LANES = len(SIZES)


def small_cnn():
    return cnn((1, 16, 16), 3)


#: What ALA governs: models, and the beginnings of names.
KINDS = {
    "the last layer": (small_cnn, ("fc2",)),
    "two layers": (small_cnn, ("fc",)),
    "a client's own head above": (small_cnn, ("fc1",)),
    "convolutions": (small_cnn, ("conv2", "fc")),
    "the whole model": (small_cnn, ("",)),
    "a model that cannot be cut": (Net, ("hidden",)),
}


class Learning:
    """Clients that initialise by ALA, round after round."""

    def __init__(
        self,
        model: object,
        governed: tuple[str, ...],
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float64,
        is_shared: bool = False,
        **settings: object,
    ) -> None:
        """All clients receive the same model if `is_shared`; what they have differs always."""
        self.task = ragged_task(SIZES, model=model(), device=device, dtype=dtype)
        if model is small_cnn:
            self.task.x = F.interpolate(self.task.x, (16, 16))
        self.start, self.is_shared = start_of(self.task, model), is_shared
        self.settings = Settings(**settings)
        self.local = join([self.start(lane) for lane in range(LANES)])
        self.governed = tuple(name for name in self.local if name.startswith(governed))
        self.state = init_state(self.local, self.governed)

    def make_cohort(self, round: int) -> Cohort:
        received = join([self.start(LANES * round + lane) for lane in range(LANES)])
        source = range(LANES)
        if self.is_shared:
            received, source = share(self.start(LANES * round), LANES), [0] * LANES
        clients, seeds, message = range(LANES), [0] * LANES, Message(received)
        return Cohort(self.task, clients, seeds, round=round, received=message, source=source)

    def do_round(self, round: int) -> tuple[Params, Outcome]:
        """Return the initialised models and what ALA did, and keep its state."""
        return self.initialize(self.make_cohort(round))

    def initialize(self, cohort: Cohort) -> tuple[Params, Outcome]:
        received, governed = cohort.received.model, self.governed
        models, self.state, outcome = initialize(
            cohort, self.settings, self.state, self.local, received, governed=governed
        )
        return models, outcome


WORD_ROWS = 40


class Tokens(nn.Module):
    """A model that is not ours: it looks words up one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(WORD_ROWS, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(self.embedding(x).tanh().mean(1))


class Positions(Tokens):
    """Its table is looked up twice, with two kinds of gradients that are added up."""

    def forward(self, x):
        return self.fc(self.embedding(x).mean(1) + self.embedding(x[:, :1]).mean(1))


class Tied(Tokens):
    """Its table is also a plain factor, so that its gradient is dense."""

    def forward(self, x):
        return self.fc(self.embedding(x).mean(1)) + self.embedding.weight.mean()


WORD_MODELS = {
    "means of words": lambda: fasttext(WORD_ROWS, 3, 3),
    "words one by one": Tokens,
    "two look-ups": Positions,
    "a table with another use": Tied,
}


class WordLearning(Learning):
    """Clients whose samples are texts of six words. Half of the words are in none of them."""

    def __init__(self, monkeypatch: Any, kind: str, by_rows: bool, **options: Any) -> None:
        """The table of words is a large one if its gradient is to be made of rows."""
        monkeypatch.setattr(row_gradients, "LEAST_ROWS", WORD_ROWS if by_rows else WORD_ROWS + 1)
        super().__init__(WORD_MODELS[kind], ("",), **options)
        generator = torch.Generator().manual_seed(1)
        texts = torch.randint(0, WORD_ROWS // 2, (len(self.task.x), 6), generator=generator)
        self.task.x = texts.to(self.task.device)
        assert bool(self.task.embeddings) == by_rows


def compare(one: Learning, other: Learning, tolerance: float, rounds=(2, 3, 4)) -> list[Outcome]:
    """Do some rounds of both, compare all results, and return what ALA did in the first."""
    outcomes = []
    for round in rounds:
        (models, found), (expected, reference) = one.do_round(round), other.do_round(round)
        assert_close(models, expected, tolerance)
        assert_close(one.state["weights"], other.state["weights"], tolerance)
        assert torch.equal(one.state["trained"], other.state["trained"])
        for name in ("epochs", "initial", "faults"):
            assert torch.equal(getattr(found, name), getattr(reference, name))
        torch.testing.assert_close(
            found.losses, reference.losses, rtol=0, atol=tolerance, equal_nan=True
        )
        outcomes.append(found)
    return outcomes
