"""`ALA`: Adaptive Local Aggregation (Zhang et al., AAAI 2023) as a drop-in for any training loop.

`fedala.lanes.weight_learning` has the mathematics, `fedala.lanes.local_aggregation` the treatment
of numbers that are not finite. A client of its own is a cohort of one lane.
"""

import operator
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedala.data.batches import BatchSplitter, Split
from fedala.data.collect import collect_samples
from fedala.errors import UserError, printable
from fedala.lanes.blendable import check_module, check_twins, state_to_blend
from fedala.lanes.cohort import Cohort
from fedala.lanes.layer_order import learn_order
from fedala.lanes.layer_table import describe_layers
from fedala.lanes.layer_units import is_order_known
from fedala.lanes.layers import call, upper
from fedala.lanes.local_aggregation import (
    FAULTS,
    Outcome,
    average_weights,
    draw_positions,
    init_state,
    initialize,
)
from fedala.lanes.losses import CrossEntropy, LossFunction, check_labels
from fedala.lanes.messages import Message
from fedala.lanes.randomness import draw
from fedala.lanes.task import Task
from fedala.lanes.trees import Params, leaves
from fedala.lanes.weight_learning import Settings, has_settled
from fedala.options import build, option

RECEIVED_FAULT = (
    "the received model is not finite, so the local model stayed as it was and W was not learned"
)


@dataclass(frozen=True)
class ClientSettings(Settings):
    """The settings of a client that runs outside a simulation."""

    batch_size: int = option(10, "samples per step of weight learning", least=1)
    seed: int = option(0, "seed of the draws of samples", least=0, most=2**63 - 1)


@dataclass(frozen=True)
class Report:
    """What one client's ALA did in one round: what `ALA.initialize` returns."""

    epochs: int
    """Epochs of weight learning: several in the initial stage, one in every later round, 0 if it
    was skipped."""
    losses: tuple[float, ...] = field(repr=False)
    """Mean loss of each epoch of weight learning."""
    initial: bool
    """Whether this was the client's initial stage: its first weight learning."""
    converged: bool | None
    """Whether the initial stage ended by its criterion; None in every other round, which has none.
    """
    capped: bool
    """Whether the initial stage ended by `max_epochs`."""
    weight_mean: float
    """Mean of W: 1 takes everything from the received model, 0 from the local one."""
    fault: str | None = None
    """What was not finite, and what was done about it. If there is a fault, W has not changed."""

    @property
    def skipped(self) -> bool:
        """Tell whether nothing was learned.

        The models are equal on the governed layers, or there is no data, or W is frozen, or there
        is a `fault`.
        """
        return self.epochs == 0


def make_reports(outcome: Outcome, settings: Settings) -> list[Report]:
    """Return a report for each lane. This waits for the device."""
    reports = []
    columns = (tensor.tolist() for tensor in outcome)
    for epochs, losses, is_initial, mean, fault in zip(*columns, strict=True):
        own = tuple(losses[:epochs])
        converged = has_settled(own, settings) if is_initial else None
        capped = converged is False
        reports.append(Report(epochs, own, is_initial, converged, capped, mean, FAULTS[fault]))
    return reports


class ALA:
    """Adaptive Local Aggregation for one client, in any training loop, for any `nn.Module`.

    Make one per client and keep it for the client's life. Each round, before local training,

        report = ala.initialize(local_model, received_model, (x, y), loss=F.cross_entropy)

    changes `local_model`, in place, from the model that the client trained last into the blend
    that it should train next.
    """

    def __init__(
        self,
        layers: int | Sequence[str] = 1,
        eta: float = 1.0,
        sample: float = 0.8,
        batch_size: int = 10,
        threshold: float = 0.01,
        max_epochs: int = 100,
        seed: int = 0,
        *,
        min_epochs: int = 1,
        start_round: int = 1,
        freeze: bool = False,
    ) -> None:
        """Check the settings.

        `layers` counts from the output, or lists patterns that parameter names must start with.
        """
        values: dict[str, Any] = {"eta": eta, "sample": sample, "threshold": threshold}
        values |= {"max_epochs": max_epochs, "min_epochs": min_epochs, "freeze": freeze}
        values |= {"start_round": start_round, "batch_size": batch_size, "seed": seed}
        self.layers: int | Sequence[str]
        if isinstance(layers, Iterable):
            self.settings = build(ClientSettings, values)
            self.layers = [layers] if isinstance(layers, str) else list(layers)
        else:
            self.settings = build(ClientSettings, {"layers": layers, **values})
            self.layers = self.settings.layers
        #: How many rounds this client has taken part in.
        self.round = 0
        self._state: dict[str, Any] | None = None

    def governs(self, model: nn.Module, inputs: Any = None) -> tuple[str, ...]:
        """Name the parameters that ALA blends. The received model overwrites all others.

        Which layer is last shows when the model runs: on `inputs`, one or two samples, or in
        `initialize`. Before that, layers count in the order in which they are registered, and a
        warning says so.
        """
        check_module(model)
        if inputs is not None:
            learn_order(model, inputs)
        elif isinstance(self.layers, int) and not is_order_known(model):
            warnings.warn(
                "The model has not been run, so its layers count in the order in which they are "
                "registered: give governs one or two samples, as inputs=….",
                stacklevel=2,
            )
        return upper(model, self.layers)

    def describe(self, model: nn.Module, inputs: Any = None) -> str:
        """Return a table of the model's layers, counted from the output, and what ALA governs."""
        check_module(model)
        if inputs is not None:
            learn_order(model, inputs)
        return describe_layers(model, upper(model, self.layers))

    @property
    def weights(self) -> Params:
        """Return W by parameter name, in the model's order. It is empty before the first round."""
        learned: Params = {} if self._state is None else self._state["weights"]
        return {name: value[0] for name, value in learned.items()}

    @torch.inference_mode(False)  # W is learned from gradients, even if the caller has none
    def initialize(
        self,
        local_model: nn.Module,
        received_model: nn.Module,
        data: Any,
        loss: LossFunction | None = None,
        *,
        split: Split | None = None,
        shared: Collection[str] | None = None,
    ) -> Report:
        """Blend `received_model` into `local_model`, in place, and report what happened.

        `data` is the client's training data:

        - a pair (inputs, targets) of tensors or NumPy arrays. Inputs may also be a tuple or a dict
          of them, which the model gets as arguments or keywords.
        - a `Dataset` of such pairs.
        - a `DataLoader`. ALA takes the samples that its sampler yields, in the dataset's order.

        A dataset's samples, and a loader's batches, may also be dicts.
        `fedala.data.batches.BatchSplitter` says what is then the target and what the model gets.
        For any other form, `split(batch)` returns the pair.

        Inputs reach the model as they are, but floating-point inputs are brought to its precision,
        and token ids to int64.
        Data of unknown length may have at most `fedala.data.collect.STREAM_LIMIT` samples.
        `loss(output, target)` is the mean loss of a batch, a tensor of one number. Without it, that
        is the cross-entropy, or what a model computes itself that gets the targets of its batches.

        If the server sends only a part of the model, `shared` names its parameters. `layers` then
        counts the layers of that part. Both models must be equal in all else: the client's own.

        Numbers that are not finite do no lasting harm. `report.fault` says what was wrong:

        - In the received model: `local_model` stays as it is, and so does W.
        - In the governed layers of the local model: the received model replaces it, and W stays.
        - In the data, the loss or the gradients of weight learning: W stays as it was before the
          round, and the blend is made with it. If no W has been learned yet, the received model
          replaces the local one.
        - In both models: a `UserError`, because neither can be trained on.

        The round counts in all cases but the last. A buffer may hold infinities that both models
        share: an attention mask does.
        """
        local, received = (state_to_blend(model) for model in (local_model, received_model))
        check_twins(local, received)
        device = next(iter(local.values())).device
        received = {name: value.to(device, copy=True) for name, value in received.items()}
        if _has_received_fault(local_model, received_model):
            self.round += 1
            return self._report_fault(RECEIVED_FAULT)
        splitter = BatchSplitter(local_model, loss, split)
        cohort = self._make_cohort(local_model, local, received, data, splitter)
        governed = upper(cohort.task.ordered_model, self.layers, shared)
        if self._state is None:
            _check_labels(cohort.task)
        state = self._state_for(received, governed)
        initialized, state, outcome = initialize(
            cohort,
            replace(self.settings, sample=1.0),  # the cohort's samples are the drawn ones
            state,
            local,
            received,
            governed=governed,
        )
        with torch.no_grad():
            for name, value in local.items():
                value.copy_(initialized[name])
        self._state, self.round = state, self.round + 1
        [report] = make_reports(outcome, self.settings)
        return report

    def _make_cohort(
        self, model: nn.Module, local: Params, received: Params, data: Any, splitter: BatchSplitter
    ) -> Cohort:
        """Draw this round's samples, and return a cohort of this client alone."""
        settings, round = self.settings, self.round + 1
        sample_draw = draw(settings.seed, "ala sample", round=round)
        x, y = collect_samples(
            data, lambda size: draw_positions(sample_draw, size, settings.sample), splitter
        )
        rows = np.arange(len(next(leaf for _, leaf in leaves(x))))
        dtype = next((v.dtype for v in local.values() if v.is_floating_point()), torch.float32)
        task = Task(
            model,
            x,
            y,
            [rows],
            loss=splitter.loss,
            batch_size=settings.batch_size,
            device=next(iter(local.values())).device,
            precision="float64" if dtype == torch.float64 else "float32",
            scale=False,
        )
        task.dtype = dtype
        # One pass over the samples would not repay the trial of a layout, nor captured steps.
        task.uses_channels_last = task.backend.captures_steps = False
        return Cohort(
            task, [0], [settings.seed], round=round, received=Message(received), source=[0]
        )

    def _report_fault(self, fault: str) -> Report:
        """Return the report of a round in which nothing was done."""
        learned = self._state["weights"] if self._state else {}
        mean = float(average_weights(learned)) if learned else 1.0
        return Report(0, (), False, None, False, mean, fault)

    def _state_for(self, received: Params, governed: Sequence[str]) -> dict[str, Any]:
        """Return this client's state in the model's order, on the device of `received`."""
        state = init_state(received, governed)
        if self._state is None or not self._state["trained"].any():
            return state
        mine, ones = self._state["weights"], state["weights"]
        if {n: w.shape for n, w in mine.items()} != {n: w.shape for n, w in ones.items()}:
            raise UserError(
                "This ALA holds the weights of another model; make one ALA per client and model."
            )
        return {
            "weights": {name: mine[name].to(like) for name, like in ones.items()},
            "trained": self._state["trained"].to(state["trained"].device),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of everything this client's ALA has learned, as flat tensors."""
        tensors = {"round": torch.tensor(self.round)}
        if self._state is not None:
            tensors |= {f"weights.{name}": value for name, value in self.weights.items()}
            tensors["trained"] = self._state["trained"][0]
        return {name: value.detach().clone() for name, value in tensors.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `state_dict` returned, or refuse it and change nothing."""
        self.round, self._state = _read_state(tensors)


def _check_labels(task: Task) -> None:
    """Run the model on the first batch, and refuse labels that do not fit its scores."""
    if not isinstance(task.loss, CrossEntropy) or not isinstance(task.y, Tensor) or not len(task.y):
        return
    devices = [task.device] if task.device.type == "cuda" else []
    with task.use_mode(training=False), torch.no_grad(), torch.random.fork_rng(devices=devices):
        rows = torch.arange(min(task.batch_size, len(task.y)), device=task.device)
        x = task.inputs(rows)
        scores = task.loss.select(call(task.model, {}, x))
    if isinstance(scores, Tensor) and scores.dim() > 1:  # of anything else, the loss says it
        check_labels(scores, task.y)


def _read_state(tensors: Mapping[str, Tensor]) -> tuple[int, dict[str, Any] | None]:
    """Return the round and the lane's state out of a state dict, or refuse it."""
    wrong = "This is not the state of an ALA: "
    if not isinstance(tensors, Mapping):
        raise UserError(f"{wrong}it must be a dict of tensors, not {type(tensors).__name__}.")
    weights = {
        name.removeprefix("weights."): value
        for name, value in tensors.items()
        if name.startswith("weights.")
    }
    if "round" not in tensors or ("trained" not in tensors and weights):
        raise UserError(f"{wrong}it needs round, trained and weights.*.")
    try:
        round = operator.index(tensors["round"])
    except (TypeError, ValueError, RuntimeError):
        round = -1
    if isinstance(tensors["round"], bool) or not 0 <= round < 2**62:
        raise UserError(f"{wrong}round must be a whole number from 0 on, not {tensors['round']}.")
    if "trained" not in tensors:
        return round, None
    trained = tensors["trained"]
    if not isinstance(trained, Tensor) or trained.dtype != torch.bool or trained.numel() != 1:
        raise UserError(f"{wrong}trained must be a tensor of one bool.")
    for name, value in weights.items():
        subject = f"{wrong}the weights of {printable(name, 100)}"
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise UserError(f"{subject} must be a tensor of floating-point numbers.")
        if not ((value >= 0) & (value <= 1)).all():  # NaN is neither
            raise UserError(f"{subject} must be between 0 and 1.")
    copies = {name: value.detach().clone().unsqueeze(0) for name, value in weights.items()}
    return round, {"weights": copies, "trained": trained.detach().clone().reshape(1)}


def _has_received_fault(local: nn.Module, received: nn.Module) -> bool:
    """Tell whether the received model is not finite. Refuse two models that are not."""
    received_name = find_not_finite(received, local)
    if received_name is None:
        return False
    local_name = find_not_finite(local, received)
    if local_name is not None:
        raise UserError(
            f"Neither model can be used: {printable(received_name, 100)} of the received one and "
            f"{printable(local_name, 100)} of the local one are not finite. Start again from a "
            "finite model."
        )
    return True


def find_not_finite(model: nn.Module, twin: nn.Module) -> str | None:
    """Name the first parameter or buffer of `model` that is not finite, or return None.

    A buffer may hold infinities if its twin in the other model has the same ones.
    """
    for name, parameter in model.named_parameters():
        if not parameter.detach().isfinite().all():
            return name
    others = dict(twin.named_buffers())
    for name, buffer in model.named_buffers():
        if not (buffer.isfinite() | (buffer == others[name].to(buffer.device))).all():
            return name
    return None
