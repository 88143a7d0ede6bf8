"""A client's part of a round, on one machine or on its own: initialise, test, train, upload."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedala.lanes import Cohort, Message, Params, State, Task
from fedala.lanes.evaluation import PredictionLog, Predictions
from fedala.lanes.trees import count_lanes
from fedala.methods import Method
from fedala.methods.given import forbid_changes
from fedala.methods.returned import (
    check_client_state,
    check_initialized,
    check_tensors,
    check_tested,
    check_trained,
    check_upload,
)
from fedala.simulation.client_states import Lane
from fedala.simulation.divergence import find_finite_lanes
from fedala.simulation.evaluated_models import ModelStack

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
    evaluate_received: bool = False
    """Whether the received model is tested, too."""
    evaluate_trained: bool = False
    """Whether the trained personal model is tested, too."""
    predicts: Collection[str] = ()
    """The kinds of models whose class probabilities are collected, sample by sample."""


@dataclass(repr=False)
class CohortResult:
    """What a cohort did in a round."""

    lanes: Sequence[Lane]
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """By name, [lane]."""
    scores: list[Tensor] = field(default_factory=list)
    """For every part of the data that is tested, [lane, (summed score, summed loss, samples)]."""
    scores_after_training: list[Tensor] = field(default_factory=list)
    further_scores: dict[str, Tensor] = field(default_factory=dict)
    """Of further kinds of models, on the test samples: [lane, (correct, loss, samples)]."""
    predictions: dict[str, list[Predictions | None]] = field(default_factory=dict)
    """By kind of model: what it says of each lane's test samples."""
    upload: Message = field(default_factory=Message)
    is_finite: Tensor | None = None
    """[lane]: whether training ended with finite numbers; None if nothing was trained."""
    evaluated: Params = field(default_factory=dict)
    evaluated_elsewhere: ModelStack | None = None
    """The evaluated models, if another process has them."""
    weights: Params = field(default_factory=dict)
    """ALA's W."""
    state_before: State = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<CohortResult of {len(self.lanes)} lanes>"

    state: State = field(default_factory=dict)

    @property
    def diverged(self) -> list[int]:
        """Return the positions of the lanes whose training failed."""
        if self.is_finite is None:
            return []
        return [position for position, good in enumerate(self.is_finite.tolist()) if not good]


def init_client_state(method: Method, task: Task, initial: Params) -> State:
    """Return a client's state before its first round, with the optimiser's slots if they stay."""
    method.check_task(task, initial)
    with forbid_changes(method, "init_client", initial=initial):
        made = method.init_client(task, initial)
    lanes = count_lanes(initial)
    state = check_tensors(method, "init_client", made, wanted="a state, a dict", lanes=lanes)
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
    received = cohort.received
    cohort.tests_absent = request.evaluate_after_training
    before = state
    own = take_slots(cohort, before)
    with forbid_changes(method, "initialize", received=received, state=own):
        found = method.initialize(cohort, received, own)
    initialized, state = check_initialized(method, cohort, found)
    result = CohortResult(lanes, cohort.metrics)
    if request.record_weights:
        result.weights = method.ala_weights(state)
    if request.evaluate:
        given = {"initialized": initialized, "received": received, "state": state}
        with forbid_changes(method, "model_to_evaluate", **given):
            tested = method.model_to_evaluate(cohort, initialized, received, state)
        tested = check_tested(method, initialized, tested)
        result.evaluated = tested
        result.scores = _test(result, cohort, request, "initialized", tested, parts)
        if request.evaluate_received:
            _test_received(result, cohort, request, tested)
    if request.train:
        # Initialising may add to a client's first state; what was there before stays as it was.
        result.state_before = {**state, **before}
        result.upload, result.state = _train(method, cohort, initialized, own, state)
        if cohort.kept_slots is not None:
            result.state = {**result.state, SLOTS: cohort.kept_slots}
        result.is_finite = find_finite_lanes(cohort, result.upload, result.state)
        if request.evaluate_after_training:
            model = method.model_when_absent(result.upload, result.state)
            model = check_tensors(method, "model_when_absent", model, lanes=len(cohort))
            result.scores_after_training = score_model(cohort, model, parts)
        if request.evaluate_trained:
            model = method.trained_model(cohort, received, result.upload, result.state)
            model = check_tensors(method, "trained_model", model, lanes=len(cohort))
            if initialized.keys() <= model.keys():
                [scores] = _test(result, cohort, request, "trained", model, ["test"])
                result.further_scores["trained"] = scores
    return result


def _train(
    method: Method, cohort: Cohort, initialized: Params, before: State, state: State
) -> tuple[Message, State]:
    """Train, and check what that returns; `before` is the state before `initialize`."""
    received = cohort.received
    given = {"initialized": initialized, "received": received, "state": state}
    with forbid_changes(method, "train", **given):
        trained = method.train(cohort, initialized, received, state)
    upload, after = check_trained(method, trained)
    # If all clients take part in every round, nobody's state is still that of `init_client`.
    template = {**state, **before} if method.requires_all_clients else before
    check_client_state(method, template, after, len(cohort))
    check_upload(method, cohort, initialized, upload)
    return upload, after


def take_slots(cohort: Cohort, state: State) -> State:
    """Move the optimiser's slots from the clients' state to their cohort, if the run keeps them."""
    if SLOTS in state:
        cohort.kept_slots = dict(state[SLOTS])
    return {name: value for name, value in state.items() if name != SLOTS}


def _test(
    result: CohortResult,
    cohort: Cohort,
    request: RoundRequest,
    kind: str,
    model: Params,
    parts: Sequence[str],
) -> list[Tensor]:
    """Test a kind of model, and collect what it predicts if that is asked for."""
    log = PredictionLog() if kind in request.predicts else None
    scores = score_model(cohort, model, parts, log)
    if log:
        result.predictions[kind] = log.collect(len(cohort))
    return scores


def _test_received(
    result: CohortResult, cohort: Cohort, request: RoundRequest, tested: Params
) -> None:
    """Test the received model, unless it is the very model that has just been tested."""
    model = cohort.received.model
    if all(value is tested.get(name) for name, value in model.items()):
        result.further_scores["received"] = result.scores[0]
        if "received" in request.predicts:
            result.predictions["received"] = result.predictions["initialized"]
        return
    [scores] = _test(result, cohort, request, "received", model, ["test"])
    result.further_scores["received"] = scores


def score_model(
    cohort: Cohort, model: Params, parts: Sequence[str], log: PredictionLog | None = None
) -> list[Tensor]:
    """Test each lane's model; return, for every part, [lane, (score, loss, samples)], summed.

    `log` gets what the models say of the samples of the first part, which are the test samples.
    """
    return [
        torch.stack(
            [
                figures.double()
                for figures in cohort.evaluate(model, part, log=log if part == parts[0] else None)
            ],
            1,
        )
        for part in parts
    ]
