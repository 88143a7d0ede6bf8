"""PartialFed: Sun, Huo, Yang, Bai. PartialFed: Cross-Domain Personalized Federated Learning via
Partial Initialization. NeurIPS 2021. Its adaptive variant, reconstructed from the publication."""

from dataclasses import dataclass
from typing import Any

import numpy as np
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
    descend,
)
from fedala.lanes.trees import count_lanes, flatten_lanes
from fedala.methods.own_model import OwnModel
from fedala.options import option


@dataclass(frozen=True)
class PartialFed(OwnModel):
    """Every client learns for each layer whether to load the received one or to keep its own."""

    name = "partialfed"
    title = "PartialFed"
    summary = "each client learns which layers to load and which to keep"
    kind = "blended"
    lane_numbers = frozenset({"tau", "decay", "floor"})
    refuses_slots = "each batch steps another choice of two copies of the layers"

    tau: float = option(5.0, "τ: temperature of the Gumbel-softmax in the first round", above=0)
    decay: float = option(0.965, "factor of τ after each round", above=0, most=1)
    floor: float = option(0.1, "the least τ", above=0)
    f_m: int = option(8, "f_m: of every f_m + f_s batches, those that step the weights", least=1)
    f_s: int = option(
        2, "f_s: of every f_m + f_s batches, those that step the logits of the choice", least=0
    )

    def init_client(self, task: Task, initial: Params) -> State:
        shape = count_lanes(initial), len(task.layers), 2
        return {
            "local": initial,
            "logits": torch.zeros(shape, dtype=task.dtype, device=task.device),
        }

    def model_to_evaluate(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> Params:
        return choose(cohort.task, is_loaded(state["logits"]), received.model, initialized)

    def train(
        self, cohort: Cohort, initialized: Params, received: Message, state: State
    ) -> tuple[Message, State]:
        task = cohort.task
        # The copy to load starts from the received model, the copy to keep from the client's own.
        begin = {"load": received.model, "keep": initialized, "logits": state["logits"]}
        begin["batch"] = torch.zeros(len(cohort), dtype=torch.int64, device=task.device)
        tau = cohort.constant(self.tau * self.decay ** (cohort.round - 1))
        fixed = {
            "lr": cohort.lr,
            "optimizer": cohort.optimizer_numbers(),
            "gumbel": self._draw_gumbel(cohort),
            "tau": tau.maximum(cohort.constant(self.floor)),
        }
        steps = [WeightStep(task.rule)] * self.f_m + [step_logits] * self.f_s
        # The cycle begins one step later in every round: otherwise clients of few batches would
        # never step their logits.
        first = (cohort.round - 1) % len(steps)
        trained = cohort.train(steps[first:] + steps[:first], begin, fixed)
        chosen = choose(task, is_loaded(trained["logits"]), trained["load"], trained["keep"])
        return Message(chosen), {"local": chosen, "logits": trained["logits"]}

    def _draw_gumbel(self, cohort: Cohort) -> Tensor:
        """Draw the noise of a round's choices, [lane, batch, layer, 2]."""
        task = cohort.task
        noise = np.zeros((len(cohort), cohort.most_local_steps, len(task.layers), 2))
        for lane, steps in enumerate(cohort.local_steps()):
            own = noise[lane, :steps]
            own[:] = cohort.draw(lane, "gumbel").gumbel(size=own.shape)
        return torch.from_numpy(noise).to(task.device, task.dtype)


@dataclass(frozen=True)
class WeightStep:
    """Steps the chosen copy of each layer, its running statistics too. The choice is hard."""

    rule: UpdateRule

    def __call__(self, task: Task, state: State, fixed: State, x: Any, y: Any) -> Tensor:
        load = is_loaded(add_noise(state, fixed))
        model = choose(task, load, state["load"], state["keep"])
        losses, gradients = task.gradients(model, x, y)
        self.rule.update(task, model, gradients, {}, fixed["optimizer"])
        for copy, changed in ((state["load"], load), (state["keep"], ~load)):
            for name, value in choose(task, changed, model, copy).items():
                copy[name].copy_(value)
        return losses


def step_logits(task: Task, state: State, fixed: State, x: Any, y: Any) -> Tensor:
    """Step the logits. The model is the soft mixture; its running statistics are dropped."""
    load, keep, logits = state["load"], state["keep"], state["logits"]
    tau = fixed["tau"][:, None]
    share, other = (add_noise(state, fixed) / tau[..., None]).softmax(-1).unbind(-1)
    model = {}
    for name, layer in layer_numbers(task, load).items():
        if load[name].is_floating_point():
            weight = broadcast_lanes(share[:, layer], load[name])
            model[name] = torch.lerp(keep[name], load[name], weight)
        else:
            model[name] = load[name].clone()
    losses, gradients = task.gradients(model, x, y)
    slope = torch.zeros_like(share)  # ∂L/∂share of each layer: ⟨∂L/∂w, load − keep⟩
    whole = densify(gradients)
    for name, layer in layer_numbers(task, whole).items():
        slope[:, layer] += flatten_lanes(whole[name] * (load[name] - keep[name])).sum(1)
    slope = slope * share * other / tau
    descend({"logits": logits}, {"logits": torch.stack([slope, -slope], -1)}, fixed["lr"])
    return losses


def add_noise(state: State, fixed: State) -> Tensor:
    """Return the logits with this batch's noise; the next call has the next batch's."""
    batch = state["batch"]
    noise = fixed["gumbel"][torch.arange(len(batch), device=batch.device), batch]
    batch.add_(1)
    noisy: Tensor = state["logits"] + noise
    return noisy


def is_loaded(logits: Tensor) -> Tensor:
    """[lane, layer]: whether the layer is loaded; if both logits are equal, it is."""
    return logits[..., 0] >= logits[..., 1]


def layer_numbers(task: Task, params: Params) -> dict[str, int]:
    """Return the number of the layer that each name belongs to, in the order of `params`."""
    numbers = {name: number for number, layer in enumerate(task.layers) for name in layer}
    return {name: numbers[name] for name in params}


def choose(task: Task, load: Tensor, loaded: Params, kept: Params) -> Params:
    """Choose one of two models, layer by layer and lane by lane."""
    return {
        name: torch.where(broadcast_lanes(load[:, layer], loaded[name]), loaded[name], kept[name])
        for name, layer in layer_numbers(task, loaded).items()
    }
