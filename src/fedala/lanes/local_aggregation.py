"""Adaptive Local Aggregation (ALA) for a cohort of lanes: who learns, who blends, what is reported.

W never takes up a number that is not finite (NaN, infinity). If weight learning comes to such a
number, W stays as it was, and the blend is made with that W. A client that has not learned any W
takes the received model. So does a client whose own model is not finite.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedala.errors import UserError, printable
from fedala.lanes.cohort import Cohort
from fedala.lanes.layers import Cut, Layered
from fedala.lanes.samples import Samples, to_device
from fedala.lanes.task import Task
from fedala.lanes.trees import Params, are_finite, broadcast_lanes, flatten_lanes
from fedala.lanes.weight_learning import Learner, Problem, Settings, learn_in_batches

#: `summarize_weights` sorts the elements of W into this many equal parts of [0, 1].
BINS = 10

#: What can go wrong in a lane's round. `Outcome.faults` holds positions in this tuple.
FAULTS = (
    None,
    "the local model is not finite, so the received model replaced it and W was not learned",
    "the loss or the gradient of weight learning was not finite, so W is as it was before this "
    "round",
)


class Outcome(NamedTuple):
    """What ALA did in each lane. It stays on the device, so that the host does not wait for it."""

    epochs: Tensor
    losses: Tensor
    """[lane, epoch], NaN after a lane's last epoch."""
    initial: Tensor
    """Whether this was the lane's initial stage."""
    weight_mean: Tensor
    faults: Tensor
    """Positions in `FAULTS`."""


def init_state(received: Params, governed: Sequence[str]) -> dict[str, Any]:
    """Return the state of clients that have never learned: W of ones in each lane of `received`."""
    for name in governed:
        if not received[name].is_floating_point():
            raise UserError(
                f"ALA blends real floating-point parameters, and {printable(name, 100)} is "
                f"{received[name].dtype}: choose other layers."
            )
    some = next(iter(received.values()))
    return {
        "weights": {name: torch.ones_like(received[name]) for name in governed},
        "trained": torch.zeros(len(some), dtype=torch.bool, device=some.device),
    }


def initialize(
    cohort: Cohort,
    settings: Settings,
    state: dict[str, Any],
    local: Params,
    received: Params,
    *,
    governed: Sequence[str],
    start: Params | None = None,
    learner: Learner | None = None,
) -> tuple[Params, dict[str, Any], Outcome]:
    """Return every lane's initialised model, ALA's new state, and what happened.

    The layers that ALA does not govern come from `start`, by default the received model. Without
    a `learner`, the fastest one for the device learns W.
    """
    start = received if start is None else start
    trained = state["trained"]
    if cohort.round < settings.start_round or not governed:
        return dict(start), state, _make_empty_outcome(trained)

    update = {name: received[name] - local[name] for name in governed}
    blending = _are_different(update) & to_device(trained.device, [n > 0 for n in cohort.sizes()])
    finite = are_finite(update.values())
    learning = blending & finite & ~trained if settings.freeze else blending & finite
    weights = {name: value.clone() for name, value in state["weights"].items()}
    samples = cohort.draw_early("ala sample", lambda cohort: _draw_samples(cohort, settings.sample))
    with cohort.task.use_mode(training=False):
        cut = _cut_below(cohort.task, governed, start, samples)
        old = {name: local[name] for name in governed}
        problem = Problem(
            cohort, settings, learning, trained, weights, old, update, start, samples, cut
        )
        learner = learner or cohort.task.backend.find_weight_learner(problem)
        curves = (learner or learn_in_batches)(problem)

    # A lane that came to a number that is not finite counts as one that did not learn.
    sound = curves.is_finite & are_finite(weights.values())
    failed, learned = learning & ~sound, learning & sound
    for name, before in state["weights"].items():
        weights[name] = _choose_lanes(learned, weights[name], before)
    can_blend = blending & finite & (trained | learned)
    initialized = dict(start)
    for name in governed:
        blend = local[name] + update[name] * weights[name]
        initialized[name] = _choose_lanes(can_blend, blend, received[name])
    outcome = Outcome(
        torch.where(failed, 0, curves.epochs),
        curves.losses,
        learned & ~trained,
        average_weights(weights),
        (blending & ~finite).long() + 2 * failed.long(),
    )
    return initialized, {"weights": weights, "trained": trained | learned}, outcome


def _make_empty_outcome(trained: Tensor) -> Outcome:
    """Return the outcome of a round in which ALA is off."""
    none = torch.zeros_like(trained, dtype=torch.int64)
    losses = none.new_zeros(len(none), 0)
    return Outcome(none, losses, none.bool(), torch.ones_like(none).float(), none)


def _choose_lanes(condition: Tensor, these: Tensor, others: Tensor) -> Tensor:
    """Return the lanes of `these` if their condition holds, else those of `others`."""
    return torch.where(broadcast_lanes(condition, these), these, others)


def _cut_below(task: Task, governed: Sequence[str], start: Params, samples: Samples) -> Cut:
    """Cut the model below the deepest governed layer.

    What lies under the cut is constant while W is learned, so its features are computed once.
    """
    deepest = max(i for i, layer in enumerate(task.layers) if set(layer) & set(governed)) + 1
    probe = None
    if not isinstance(task.model, Layered) and samples.lengths[0] > 1:
        first = {name: value[0] for name, value in start.items()}
        probe = first, task.inputs(torch.as_tensor(samples.rows[0][:2], device=task.device))
    return task.cut(deepest, start, sum(samples.lengths), probe)


def _draw_samples(cohort: Cohort, share: float) -> Samples:
    """Draw a share of each lane's training samples. Each round has its own draw."""

    def draw_lane(lane: int) -> np.ndarray:
        rows: np.ndarray = cohort.task.parts["train"][cohort.clients[lane]]
        positions = draw_positions(cohort.draw(lane, "ala sample"), len(rows), share)
        chosen: np.ndarray = rows[positions]
        return chosen

    return cohort.load_samples(draw_lane(lane) for lane in range(len(cohort)))


def draw_positions(draw: np.random.Generator, size: int, share: float) -> np.ndarray:
    """Draw a share of the positions 0 to `size` − 1: at least one, in ascending order."""
    chosen = np.zeros(size, dtype=bool)
    # 0.29 · 100 is a little less than 29 in floating point, and means 29.
    chosen[draw.permutation(size)[: max(1, int(share * size + 1e-9))]] = True
    return np.flatnonzero(chosen)


def _are_different(update: Params) -> Tensor:
    """Tell for each lane whether any number of the update is not zero."""
    return torch.stack([flatten_lanes(value != 0).any(1) for value in update.values()]).any(0)


def average_weights(weights: Params) -> Tensor:
    """Return each lane's mean of W over all its elements."""
    flat = [flatten_lanes(value) for value in weights.values()]
    total = sum(value.shape[1] for value in flat)
    return torch.stack([value.sum(1) for value in flat]).sum(0) / total


def summarize_weights(weights: Params) -> Tensor:
    """Return the mean of W, and the share of its elements in each tenth of [0, 1].

    The result [lane, parameter, 1 + BINS] stays on the device.
    """
    return torch.stack([_summarize(flatten_lanes(value)) for value in weights.values()], 1)


def _summarize(flat: Tensor) -> Tensor:
    # Comparisons count. Most elements lie in one bin, and atomic additions to it would queue up.
    above = torch.stack([(flat >= k / BINS).sum(1) for k in range(BINS)], 1)
    counts = above - F.pad(above[:, 1:], (0, 1))
    total = flat.sum(1, keepdim=True, dtype=torch.float64)
    return torch.cat([total, counts], 1) / flat.shape[1]
