"""PartialFed: Sun, Huo, Yang, Bai. PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization.
NeurIPS 2021. Its adaptive variant, reconstructed from the publication: there is no public code."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedala.lanes.cohort import Cohort, Params, Task, broadcast_lanes, dense, descend
from fedala.methods.base import Method, State
from fedala.options import option


@dataclass(frozen=True)
class PartialFed(Method):
    """Every client learns, layer by layer, whether to load the received model or to keep its own."""

    name = "partialfed"
    title = "PartialFed"
    summary = "each client learns which layers to load and which to keep"

    tau: float = option(5.0, "τ: temperature of the Gumbel-softmax in the first round", above=0)
    decay: float = option(0.965, "what τ is multiplied with after each round", above=0, most=1)
    floor: float = option(0.1, "the least τ", above=0)
    f_m: int = option(8, "f_m: of every f_m + f_s batches, those that step the weights", least=1)
    f_s: int = option(
        2, "f_s: of every f_m + f_s batches, those that step the logits of the choice", least=0
    )

    def fresh(self, task: Task, start: Params) -> State:
        some = next(value for value in start.values() if value.is_floating_point())
        return {"local": start, "logits": some.new_zeros(len(some), len(task.layers), 2)}

    def initialize(self, cohort: Cohort, received: Params, state: State) -> tuple[Params, State]:
        """What the copy that is kept starts from; the other copy starts from the received model."""
        return state["local"], state

    def evaluated(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> Params:
        return choose(cohort.task, larger(state["logits"]), received, initialized)

    def train(
        self, cohort: Cohort, initialized: Params, received: Params, state: State
    ) -> tuple[Params, State]:
        task = cohort.task
        begin = {"load": received, "keep": initialized, "logits": state["logits"]}
        begin["batch"] = torch.zeros(len(cohort), dtype=torch.int64, device=task.device)
        tau = max(self.floor, self.tau * self.decay ** (cohort.round - 1))
        fixed = {
            "gumbel": self._gumbel(cohort),
            "tau": torch.full_like(state["logits"][:, 0, 0], tau),
        }
        turns = [self.step_weights] * self.f_m + [self.step_logits] * self.f_s
        # The turns begin one later in every round: otherwise clients of few batches would never step their logits.
        trained = cohort.train(turns, begin, fixed, turn=cohort.round - 1)
        chosen = choose(task, larger(trained["logits"]), trained["load"], trained["keep"])
        return chosen, {"local": chosen, "logits": trained["logits"]}

    def _gumbel(self, cohort: Cohort) -> Tensor:
        """[lane, batch, layer, 2]: the noise of a round's choices, drawn ahead."""
        task = cohort.task
        batches = [
            task.epochs * max(1, len(rows) // task.batch_size) for rows in task.parts["train"]
        ]
        noise = np.zeros((len(cohort), max(batches), len(task.layers), 2))
        for lane, client in enumerate(cohort.clients):
            noise[lane, : batches[client]] = cohort.draw(lane, "gumbel").gumbel(
                size=noise[lane, : batches[client]].shape
            )
        return torch.from_numpy(noise).to(task.device, task.dtype)

    def step_weights(
        self, task: Task, state: State, fixed: dict[str, Any], x: Any, y: Any
    ) -> Tensor:
        """A hard choice composes the model, and only the chosen copy of each layer steps, its running statistics included."""
        load = larger(noisy(state, fixed))
        model = choose(task, load, state["load"], state["keep"])
        losses, gradients = task.gradients(model, x, y)
        descend(model, gradients, task.lr)
        for copy, changed in ((state["load"], load), (state["keep"], ~load)):
            for name, value in choose(task, changed, model, copy).items():
                copy[name].copy_(value)
        return losses

    def step_logits(
        self, task: Task, state: State, fixed: dict[str, Any], x: Any, y: Any
    ) -> Tensor:
        """The soft mixture composes the model, and only the logits step; the mixture's running statistics are dropped."""
        load, keep, logits, tau = (
            state["load"],
            state["keep"],
            state["logits"],
            fixed["tau"][:, None],
        )
        share, other = (
            (noisy(state, fixed) / tau[..., None]).softmax(-1).to(logits.dtype).unbind(-1)
        )
        model = {}
        for name, layer in layer_of(task, load).items():
            floating = load[name].is_floating_point()
            weight = broadcast_lanes(share[:, layer], load[name])
            model[name] = (
                torch.lerp(keep[name], load[name], weight) if floating else load[name].clone()
            )
        losses, gradients = task.gradients(model, x, y)
        slope = torch.zeros_like(share)  # ∂L/∂share of each layer: ⟨∂L/∂w, load − keep⟩
        whole = dense(gradients)
        for name, layer in layer_of(task, whole).items():
            slope[:, layer] += (whole[name] * (load[name] - keep[name])).flatten(1).sum(1)
        slope = slope * share * other / tau
        logits.sub_(torch.stack([slope, -slope], -1), alpha=task.lr)
        return losses


def noisy(state: State, fixed: dict[str, Any]) -> Tensor:
    """The logits with this batch's noise; the next call has the next batch's."""
    batch = state["batch"]
    noise = fixed["gumbel"][torch.arange(len(batch), device=batch.device), batch]
    batch.add_(1)
    perturbed: Tensor = state["logits"] + noise
    return perturbed


def larger(logits: Tensor) -> Tensor:
    """[lane, layer]: whether the layer is loaded and not kept; where both are equal, it is loaded."""
    return logits[..., 0] >= logits[..., 1]


def layer_of(task: Task, params: Params) -> dict[str, int]:
    """The layer that each name belongs to, in the order of `params`."""
    place = {name: number for number, layer in enumerate(task.layers) for name in layer}
    return {name: place[name] for name in params}


def choose(task: Task, load: Tensor, loaded: Params, kept: Params) -> Params:
    """Layer by layer and lane by lane, one of two models."""
    return {
        name: torch.where(broadcast_lanes(load[:, layer], loaded[name]), loaded[name], kept[name])
        for name, layer in layer_of(task, loaded).items()
    }
