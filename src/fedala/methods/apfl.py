"""APFL: Deng, Kamani, Mahdavi. Adaptive Personalized Federated Learning. 2020
(arXiv:2003.13461)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedala.lanes import (
    Cohort,
    Combination,
    Message,
    Params,
    State,
    Task,
    UpdateRule,
    align,
    interpolate,
    scale_gradients,
)
from fedala.lanes.row_gradients import Read
from fedala.lanes.trees import count_lanes, flatten_lanes
from fedala.methods.own_model import OwnModel
from fedala.options import option


@dataclass(frozen=True)
class APFL(OwnModel):
    """The personal model is a mix v̄ = α·v + (1 − α)·w of a local model v and FedAvg's w."""

    name = "apfl"
    title = "APFL"
    summary = "a mix of the global and a local model, in a proportion that each client learns"
    kind = "own model"

    alpha: float = option(0.5, "α: share of the local model v at first", least=0, most=1)
    adapt: str = option(
        "round",
        "when a client adapts its α: with the first step of a round, with every step, or never",
        choices=("round", "step", "never"),
    )

    def init_client(self, task: Task, initial: Params) -> State:
        alpha = torch.full((count_lanes(initial),), self.alpha, dtype=task.dtype)
        return {"local": initial, "personal": initial, "alpha": alpha.to(task.device)}

    def model_to_evaluate(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> Params:
        return mix(received.model, initialized, state["alpha"])

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        begin = {
            "w": received.model,
            "v": initialized,
            "alpha": state["alpha"],
            "adapts": cohort.constant(float(self.adapt != "never")),
        }
        step = MixedStep(cohort.task.rule, adapts_always=self.adapt == "step")
        learned = {"local": received.model, "personal": initialized}
        trained = cohort.optimize(step, begin, learned=learned)
        w, v, alpha = (trained[name] for name in ("w", "v", "alpha"))
        return Message(w), {"local": v, "personal": mix(w, v, alpha), "alpha": alpha}

    def trainings(self, task: Task) -> Mapping[str, Collection[str]]:
        return {"local": task.trainable, "personal": task.trainable}


@dataclass(frozen=True)
class MixedStep:
    """w ← w − η∇f(w), v ← v − η·α∇f(v̄) and α ← α − η⟨v − w, ∇f(v̄)⟩, all at once.

    The optimiser steps w and v. The steps of α are plain, and end in [0, 1].
    """

    rule: UpdateRule
    adapts_always: bool

    def __call__(self, task: Task, state: State, fixed: State, x: Any, y: Any) -> Tensor:
        w, v, alpha, numbers = state["w"], state["v"], state["alpha"], fixed["optimizer"]
        # The running statistics of v are those of the mix: v itself never sees a sample.
        losses, at_mixed, by_alpha = Mix(w, v, alpha).gradients(task, v, x, y)
        _, at_w = task.gradients(w, x, y)
        self.rule.update(task, w, at_w, state["slots"]["local"], numbers)
        by_v = scale_gradients(at_mixed, alpha)
        self.rule.update(task, v, by_v, state["slots"]["personal"], numbers)
        slope = by_alpha.squeeze(1)
        alpha.sub_(numbers["lr"].to(alpha.dtype) * state["adapts"] * slope).clamp_(0, 1)
        if not self.adapts_always:
            state["adapts"].zero_()
        return losses


@dataclass(frozen=True)
class Mix(Combination):
    """v̄ = α·v + (1 − α)·w."""

    w: Params
    v: Params
    alpha: Tensor

    def compose(self, name: str) -> Tensor:
        return self.read(name, lambda value: value)[0]

    def read(self, name: str, read: Read) -> tuple[Tensor, Tensor]:
        w, v = read(self.w[name]), read(self.v[name])
        return torch.lerp(w, v, align(self.alpha, v)), (v - w).unsqueeze(0)

    def find_slopes(self, name: str, gradient: Tensor) -> Tensor:
        return flatten_lanes((self.v[name] - self.w[name]) * gradient).sum(1, keepdim=True)


def mix(w: Params, v: Params, alpha: Tensor) -> Params:
    """Return α·v + (1 − α)·w of all that is in v. Counters are those of v."""
    return {**v, **interpolate(w, v, alpha)}
