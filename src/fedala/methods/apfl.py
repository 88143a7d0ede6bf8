"""APFL: Deng, Kamani, Mahdavi. Adaptive Personalized Federated Learning. 2020
(arXiv:2003.13461)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedala.lanes import (
    Cohort,
    Message,
    Params,
    State,
    Task,
    UpdateRule,
    broadcast_lanes,
    densify,
    interpolate,
)
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
        mixed = {**v, **mix(w, {name: v[name] for name in task.trainable}, alpha)}
        losses, at_mixed = task.gradients(mixed, x, y)
        _, at_w = task.gradients(w, x, y)
        by_alpha, by_v = torch.zeros_like(alpha), dict[str, Any]()
        for name, value in densify(at_mixed).items():
            by_alpha += flatten_lanes((v[name] - w[name]) * value).sum(1)
            by_v[name] = broadcast_lanes(alpha, value) * value
        self.rule.update(task, w, at_w, state["slots"]["local"], numbers)
        self.rule.update(task, v, by_v, state["slots"]["personal"], numbers)
        alpha.sub_(numbers["lr"].to(alpha.dtype) * state["adapts"] * by_alpha).clamp_(0, 1)
        if not self.adapts_always:
            state["adapts"].zero_()
        return losses


def mix(w: Params, v: Params, alpha: Tensor) -> Params:
    """Return α·v + (1 − α)·w of all that is in v. Counters are those of v."""
    return {**v, **interpolate(w, v, alpha)}
