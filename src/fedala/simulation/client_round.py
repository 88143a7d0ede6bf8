"""A client's part of a round, on one machine or on its own: initialise, test, train, upload."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedala.errors import UserError
from fedala.lanes import Cohort, Message, Params, State
from fedala.lanes.trees import leaves, matches, take
from fedala.methods import Method
from fedala.simulation.client_states import Lane
from fedala.simulation.divergence import find_finite_lanes


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
    """For every part of the data that is tested, [lane, (correct, loss, samples)]."""
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
        _check_upload(method, cohort, initialized, result.upload)
        result.is_finite = find_finite_lanes(cohort, result.upload, result.state)
        if request.evaluate_after_training:
            model = method.model_when_absent(result.upload, result.state)
            result.scores_after_training = score_model(cohort, model, parts)
    return result


def score_model(cohort: Cohort, model: Params, parts: Sequence[str]) -> list[Tensor]:
    """Test each lane's model: for every part of the data, [lane, (correct, loss, samples)]."""
    return [
        torch.stack([figures.double() for figures in cohort.evaluate(model, part)], 1)
        for part in parts
    ]


def check_message(method: Method, message: Message, clients: int) -> None:
    """Refuse a message that is neither one lane for all clients nor one for each."""
    widths = {len(leaf) if leaf.dim() else 0 for _, leaf in leaves(message)}
    if len(widths) > 1 or not widths <= {1, clients}:
        raise UserError(
            f"{method.title} sends tensors of {sorted(widths)} lanes to {clients} clients. "
            "All tensors of a message must have one lane for all clients, or one for each."
        )


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
