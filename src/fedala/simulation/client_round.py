"""A client's part of a round, on one machine or on its own: initialise, test, train, upload."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedala.errors import UserError
from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.lanes.trees import leaves, matches, take
from fedala.methods import Method
from fedala.simulation.client_states import Lane
from fedala.simulation.divergence import find_finite_lanes

#: The optimiser's slots in a client's state, by training. Methods do not see them.
SLOTS = "optimizer"


@dataclass(frozen=True)
class RoundRequest:
    """What a round asks of its participants."""

    round: int
    train: bool
    evaluate: bool
    """Whether the initialised model is tested."""
    evaluate_after_training: bool = False
    record_weights: bool = False
    """Whether ALA's W is reported."""


@dataclass
class CohortResult:
    """What a cohort did in a round."""

    lanes: Sequence[Lane]
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """By name, [lane]."""
    scores: list[Tensor] = field(default_factory=list)
    """For every part of the data that is tested, [lane, (summed score, summed loss, samples)]."""
    scores_after_training: list[Tensor] = field(default_factory=list)
    upload: Message = field(default_factory=Message)
    is_finite: Tensor | None = None
    """[lane]: whether training ended with finite numbers; None if nothing was trained."""
    evaluated: Params = field(default_factory=dict)
    weights: Params = field(default_factory=dict)
    """ALA's W."""
    state_before: State = field(default_factory=dict)
    state: State = field(default_factory=dict)

    @property
    def diverged(self) -> list[int]:
        """Return the positions of the lanes whose training failed."""
        if self.is_finite is None:
            return []
        return [position for position, good in enumerate(self.is_finite.tolist()) if not good]


def init_client_state(method: Method, task: Task, initial: Params) -> State:
    """Return a client's state before its first round, with the optimiser's slots if they stay."""
    state = method.init_client(task, initial)
    if not (task.keeps_optimizer and task.rule.keeps_slots):
        return state
    slots = {
        training: task.rule.init_slots({name: initial[name] for name in names})
        for training, names in method.trainings(task).items()
    }
    return {**state, SLOTS: slots}


def run_client_round(
    method: Method,
    cohort: Cohort,
    lanes: Sequence[Lane],
    state: State,
    request: RoundRequest,
    parts: Sequence[str],
) -> CohortResult:
    """Do a cohort's part of a round, starting from the clients' states."""
    before, received = state, cohort.received
    state = take_slots(cohort, state)
    initialized, state = method.initialize(cohort, received, state)
    result = CohortResult(lanes, cohort.metrics)
    if request.record_weights:
        result.weights = method.ala_weights(state)
    if request.evaluate:
        result.evaluated = method.model_to_evaluate(cohort, initialized, received, state)
        result.scores = score_model(cohort, result.evaluated, parts)
    if request.train:
        # Initialising may add to a client's first state; what was there before stays as it was.
        result.state_before = {**state, **before}
        result.upload, result.state = method.train(cohort, initialized, received, state)
        if cohort.kept_slots is not None:
            result.state = {**result.state, SLOTS: cohort.kept_slots}
        _check_upload(method, cohort, initialized, result.upload)
        result.is_finite = find_finite_lanes(cohort, result.upload, result.state)
        if request.evaluate_after_training:
            model = method.model_when_absent(result.upload, result.state)
            result.scores_after_training = score_model(cohort, model, parts)
    return result


def take_slots(cohort: Cohort, state: State) -> State:
    """Move the optimiser's slots from the clients' state to their cohort, if the run keeps them."""
    if SLOTS in state:
        cohort.kept_slots = dict(state[SLOTS])
    return {name: value for name, value in state.items() if name != SLOTS}


def score_model(cohort: Cohort, model: Params, parts: Sequence[str]) -> list[Tensor]:
    """Test each lane's model; return, for every part, [lane, (score, loss, samples)], summed."""
    return [
        torch.stack([figures.double() for figures in cohort.evaluate(model, part)], 1)
        for part in parts
    ]


def _check_upload(method: Method, cohort: Cohort, initialized: Params, upload: Message) -> None:
    """Refuse tensors without a lane for each client, and extra tensors that were not announced."""
    widths = {len(leaf) if leaf.dim() else 0 for _, leaf in leaves(upload)}
    if widths - {len(cohort)}:
        raise UserError(
            f"{method.title} uploads tensors of {sorted(widths)} lanes for {len(cohort)} clients. "
            "All tensors of an upload must have one lane for each client."
        )
    template = method.extra_template(cohort.task, take(initialized, slice(0, 1)))
    extra = take(upload.extra, slice(0, 1))
    if not (matches(extra, template) and matches(template, extra)):
        raise UserError(
            f"The extra tensors that {method.title} uploads are not those of its extra_template."
        )
