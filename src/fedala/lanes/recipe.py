"""How a client trains: learning rate, optimiser and schedule, as torch.optim defines them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedala.errors import UserError

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "step", "cosine", "exponential")


@dataclass(frozen=True)
class Optimizer:
    """The options of SGD, Adam or AdamW. For Adam, `momentum` is β₁."""

    kind: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    beta2: float = 0.999
    epsilon: float = 1e-8
    clip: float = math.inf
    """The largest norm of a client's whole gradient."""

    def __post_init__(self) -> None:
        if self.kind not in OPTIMIZERS:
            raise UserError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, not {self.kind!r}.")
        if self.nesterov and (self.kind != "sgd" or not self.momentum):
            raise UserError("nesterov needs the optimizer sgd and a momentum greater than 0.")
        if self.kind != "sgd" and self.momentum >= 1:
            raise UserError(
                f"momentum must be less than 1 for {self.kind}, not {self.momentum:g}: it is β₁."
            )


@dataclass(frozen=True)
class Schedule:
    """The factor of the learning rate in each round: a linear warm-up, then a decay."""

    kind: str = "constant"
    warmup: int = 0
    """Rounds of the warm-up. Round t of W has the factor t/W."""
    decay: float = 1.0
    """The factor of each step of `step`, and of each round of `exponential`."""
    every: int = 1
    """Rounds between two steps of `step`."""

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise UserError(f"schedule must be one of {', '.join(SCHEDULES)}, not {self.kind!r}.")

    @property
    def depends_on_rounds(self) -> bool:
        """Whether a round's factor depends on the number of rounds."""
        return self.kind == "cosine"

    def factor(self, round: int, rounds: int) -> float:
        """Return the factor of a round, from 1, of so many; one more is the last evaluation."""
        if round <= self.warmup:
            return round / self.warmup
        past = round - 1 - self.warmup
        if self.kind == "cosine":
            # The last evaluation comes after the last round: methods that fine-tune for it would
            # do so at a rate of 0.
            length = max(1, rounds - self.warmup)
            return (1 + math.cos(math.pi * min(past, length - 1) / length)) / 2
        if self.kind == "step":
            return self.decay ** (past // self.every)
        return self.decay**past if self.kind == "exponential" else 1.0


@dataclass(frozen=True)
class Recipe:
    """How the clients of one run train."""

    lr: float = 0.005
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()

    def rate(self, round: int, rounds: int) -> float:
        """Return the learning rate of a round, from 1, of so many."""
        return self.lr * self.schedule.factor(round, rounds)


def is_constant(values: Sequence[object]) -> bool:
    """Tell whether all values are equal."""
    return all(value == values[0] for value in values)
