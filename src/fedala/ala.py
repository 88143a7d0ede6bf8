"""Adaptive Local Aggregation (ALA), the heart of FedALA (Zhang et al., AAAI 2023).

Before a client trains, ALA blends the received model g with the client's own old model w, element by element, on the
upper p layers (equation 4 of the paper), with weights W that it learns on the client's own data (equation 5):

    ŵ = w + (g − w) ⊙ W                        W in [0, 1], starts at ones, kept for the client's whole life
    W ← clip₀₁( W − η · ∂L/∂ŵ ⊙ (g − w) )      after every mini-batch

Numbers that are not finite (NaN, infinity) never get into W. If weight learning comes to such a
number, W stays as it was, and the blend is made with that W. A client that has not learned any W
takes the received model. So does a client whose own model is not finite.

`ALA` is the drop-in for anybody's training loop. `initialize` is the same for a cohort of lanes, which is what it is
made of.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from fedala.cuda import has_kernels
from fedala.errors import UserError, printable
from fedala.lanes.cohort import Cohort
from fedala.lanes.layers import Cut, Layered, upper
from fedala.lanes.messages import Message
from fedala.lanes.randomness import draw
from fedala.lanes.samples import Samples, iterate_steps, to_device
from fedala.lanes.task import Loss, Task, list_few, model_state
from fedala.lanes.trees import Params, broadcast_lanes, leaves, take, tree_map
from fedala.options import build, option

#: Into how many parts of [0, 1] a histogram of W sorts its elements.
BINS = 10

#: The initial stage looks at the spread of this many of the last epoch losses.
WINDOW = 10

#: The most samples that ALA takes from data of unknown length: an `IterableDataset` without `__len__`.
STREAM_LIMIT = 100_000

#: What can go wrong in a lane's round, by the number in `Outcome.faults`; 0: nothing.
FAULTS = (
    None,
    "the local model is not finite, so the received model replaced it and W was not learned",
    "the loss or the gradient of weight learning was not finite, so W is as it was before this round",
)
RECEIVED_FAULT = (
    "the received model is not finite, so the local model stayed as it was and W was not learned"
)


@dataclass(frozen=True)
class Settings:
    """ALA's hyperparameters, with the paper's defaults."""

    layers: int = option(
        1, "p: how many layers ALA governs, counted from the output; 0 switches it off", least=0
    )
    eta: float = option(1.0, "η: learning rate of the aggregation weights W", above=0)
    sample: float = option(
        0.8, "s: share of the client's training samples that W is learned on", above=0, most=1
    )
    threshold: float = option(
        0.01, "the initial stage ends when the last ten epoch losses spread less than this", least=0
    )
    max_epochs: int = option(100, "the most epochs of the initial stage", least=1)
    min_epochs: int = option(1, "the least epochs of weight learning in every round", least=1)
    start_round: int = option(
        1, "the round from which ALA is on; before it, the received model overwrites", least=1
    )
    freeze: bool = option(False, "learn W in the initial stage only, and keep it")


@dataclass(frozen=True)
class ClientSettings(Settings):
    """What a client on its own needs besides."""

    batch_size: int = option(10, "samples per step of weight learning", least=1)
    seed: int = option(0, "what the draws of the samples follow from", least=0, most=2**63 - 1)


@dataclass(frozen=True)
class Report:
    """What one client's ALA did in one round."""

    epochs: int
    losses: tuple[float, ...]
    """Mean loss of each epoch of weight learning."""
    initial: bool
    """Whether this was the client's initial stage."""
    converged: bool
    """Whether the initial stage ended by its criterion."""
    capped: bool
    """Whether the initial stage ended by `max_epochs`."""
    weight_mean: float
    """Mean of W: 1 takes everything from the received model, 0 keeps everything of the local one."""
    fault: str | None = None
    """What was not finite, and what was done about it. None if all was well; else W is as before."""

    @property
    def skipped(self) -> bool:
        """Nothing was learned.

        The models are equal on the governed layers, or there is no data, or W is frozen, or `fault`.
        """
        return self.epochs == 0


def fresh(received: Params, governed: Sequence[str]) -> dict[str, Any]:
    """The state of clients that have never learned: W of ones, one per lane of `received`."""
    for name in governed:
        if not received[name].is_floating_point():
            raise UserError(
                f"ALA blends real floating-point parameters, and {printable(name, 100)} is {received[name].dtype}: "
                "choose other layers."
            )
    lanes = len(next(iter(received.values())))
    device = next(iter(received.values())).device
    return {
        "weights": {name: torch.ones_like(received[name]) for name in governed},
        "trained": torch.zeros(lanes, dtype=torch.bool, device=device),
    }


class Outcome(NamedTuple):
    """What a cohort's ALA did, per lane; on the device, so that nobody waits for it."""

    epochs: Tensor
    losses: Tensor
    """[lane, epoch], NaN beyond a lane's last."""
    initial: Tensor
    weight_mean: Tensor
    faults: Tensor
    """Places in `FAULTS`."""

    def reports(self, settings: Settings) -> list[Report]:
        reports = []
        columns = (tensor.tolist() for tensor in self)
        for epochs, losses, initial, mean, fault in zip(*columns, strict=True):
            settled = initial and _has_settled(losses[:epochs], settings)
            capped = initial and not settled
            reports.append(
                Report(
                    epochs, tuple(losses[:epochs]), initial, settled, capped, mean, FAULTS[fault]
                )
            )
        return reports


def initialize(
    cohort: Cohort,
    settings: Settings,
    state: dict[str, Any],
    local: Params,
    received: Params,
    *,
    governed: Sequence[str],
    start: Params | None = None,
) -> tuple[Params, dict[str, Any], Outcome]:
    """Every lane's initialised model, ALA's new state, and what happened.

    `start` is what the layers that ALA does not govern are initialised to: the received model, unless a method says otherwise.
    """
    start = received if start is None else start
    trained = state["trained"]
    none = torch.zeros(len(cohort), dtype=torch.int64, device=trained.device)
    if cohort.round < settings.start_round or not governed:
        nothing = none.new_zeros(len(none), 0)
        return (
            dict(start),
            state,
            Outcome(none, nothing, none.bool(), torch.ones_like(none).float(), none),
        )

    update = {
        name: received[name] - local[name] for name in governed
    }  # the paper's "update", g − w
    differs = torch.stack([(update[name] != 0).flatten(1).any(1) for name in governed]).any(0)
    blending = differs & to_device(differs.device, [size > 0 for size in cohort.sizes()])
    finite = _finite_lanes(update)
    learning = blending & finite & ~trained if settings.freeze else blending & finite
    weights: Params = {name: value.clone() for name, value in state["weights"].items()}
    losses, epochs, sound = _learn(
        cohort, settings, learning, trained, weights, local, update, start
    )
    # From here on, a lane whose learning failed counts as one that did not learn. All of this stays
    # on the device: nobody waits for it.
    sound &= _finite_lanes(weights)
    failed = learning & ~sound
    learned = learning & sound
    for name, before in state["weights"].items():
        weights[name] = torch.where(broadcast_lanes(sound, before), weights[name], before)
    blendable = blending & finite & (trained | learned)

    def blend(name: str) -> Tensor:
        blended = local[name] + update[name] * weights[name]
        return torch.where(broadcast_lanes(blendable, blended), blended, received[name])

    initialized = {name: blend(name) if name in update else value for name, value in start.items()}
    faults = (blending & ~finite).long() + 2 * failed.long()
    epochs = torch.where(failed, 0, epochs)
    outcome = Outcome(epochs, losses, learned & ~trained, _weight_means(weights), faults)
    return initialized, {"weights": weights, "trained": trained | learned}, outcome


def _finite_lanes(params: Params) -> Tensor:
    """Tell for each lane whether all its numbers are finite."""
    return torch.stack([value.isfinite().flatten(1).all(1) for value in params.values()]).all(0)


def _learn(
    cohort: Cohort,
    settings: Settings,
    learning: Tensor,
    trained: Tensor,
    weights: Params,
    local: Params,
    update: Params,
    start: Params,
) -> tuple[Tensor, Tensor, Tensor]:
    """Learn W in place in the lanes that are `learning`.

    Returns each lane's epoch losses, its number of epochs, and whether all its losses are finite.
    """
    task = cohort.task
    samples = cohort.draw_early("ala sample", lambda cohort: _samples(cohort, settings.sample))
    with task.use_mode(training=False):
        # Everything below the governed layers is constant while W is learned: its features are computed once.
        deepest = max(i for i, layer in enumerate(task.layers) if set(layer) & set(update)) + 1
        probe = None
        if not isinstance(task.model, Layered) and samples.lengths[0] > 1:
            first = {name: value[0] for name, value in start.items()}
            probe = first, task.inputs(torch.as_tensor(samples.rows[0][:2], device=task.device))
        cut = task.cut(deepest, start, sum(samples.lengths), probe)
        rest = {
            name: start[name]
            for layer in task.layers[: cut.p]
            for name in layer
            if name not in update
        }
        old = {name: local[name] for name in update}
        if task.device.type == "cuda" and not rest and _is_plain_head(task, cut, tuple(update)):
            done = _learn_head(
                cohort, settings, learning, trained, weights, old, update, start, cut, samples
            )
            if done is not None:
                return *done, are_finite(*done)

        losses: list[list[float]] = [[] for _ in cohort.clients]
        past_initial = trained.tolist()
        active = [lane for lane, learns in enumerate(learning.tolist()) if learns]
        if len(active) < len(cohort):
            samples = Samples(
                (r if i in active else r[:0] for i, r in enumerate(samples.rows)), task.device
            )
        table, places = cohort.features(cut, start, samples)
        while active:
            w, d, others, learned = (take(tree, active) for tree in (old, update, rest, weights))
            where, which = places[active], samples.matrix[active]
            lengths = [samples.lengths[lane] for lane in active]
            batches = torch.tensor([-(-n // task.batch_size) for n in lengths], device=task.device)
            goes_on = active
            while (
                goes_on == active
            ):  # until some lane is done: then the others are put together anew
                total = torch.zeros(len(active), device=task.device, dtype=task.dtype)
                for lanes, columns in iterate_steps(lengths, task.batch_size, drop_last=False):
                    update_, weights_ = take(d, lanes), take(learned, lanes)
                    hat = {
                        n: (w[n][lanes] + update_[n] * weights_[n]).requires_grad_() for n in update
                    }
                    x, y = (
                        cohort.select_rows(table, where[lanes, columns]),
                        task.targets(which[lanes, columns]),
                    )
                    loss = task.losses({**take(others, lanes), **hat}, x, y, cut)
                    if not loss.requires_grad:
                        raise UserError(
                            "The loss does not depend on the parameters that ALA governs "
                            f"({list_few(list(update))}): choose other layers, and do not detach the loss."
                        )
                    gradients = torch.autograd.grad(
                        loss.sum(), list(hat.values()), materialize_grads=True
                    )
                    for name, gradient in zip(update, gradients, strict=True):
                        weights_[name].sub_(gradient * update_[name], alpha=settings.eta).clamp_(
                            0, 1
                        )
                    total[lanes] += loss.detach()
                for lane, loss_ in zip(active, (total / batches).tolist(), strict=True):
                    losses[lane].append(loss_)
                goes_on = [
                    lane for lane in active if _goes_on(losses[lane], past_initial[lane], settings)
                ]
            for name in update:
                weights[name][active] = learned[name]
            active = goes_on
    epochs = [len(own) for own in losses]
    padded = [own + [float("nan")] * (max(epochs) - len(own)) for own in losses]
    sound = to_device(trained.device, [bool(np.isfinite(own).all()) for own in losses])
    return (
        torch.tensor(padded, dtype=torch.float64),
        torch.tensor(epochs, device=trained.device),
        sound,
    )


def _is_plain_head(task: Task, cut: Cut, governed: tuple[str, ...]) -> bool:
    """Whether ALA governs just the last linear layer under cross-entropy, as in the paper: there is a kernel for that."""
    name = governed[0].removesuffix(".weight")
    if (
        not cut.cuts
        or cut.p != 1
        or governed != (f"{name}.weight", f"{name}.bias")
        or task.dtype != torch.float32
    ):
        return False
    labels = isinstance(task.y, Tensor) and task.y.dtype == torch.int64 and task.y.dim() == 1
    plain = task.loss is F.cross_entropy and type(task.model.get_submodule(name)) is nn.Linear
    return has_kernels() and labels and plain


def _learn_head(
    cohort: Cohort,
    settings: Settings,
    learning: Tensor,
    trained: Tensor,
    weights: Params,
    old: Params,
    update: Params,
    start: Params,
    cut: Cut,
    samples: Samples,
) -> tuple[Tensor, Tensor] | None:
    """The same on the GPU, all batches and epochs of all lanes in one kernel; None where the kernel has no room for it."""
    from triton.runtime.errors import OutOfResources

    from fedala.cuda.weights import Head, learn

    task = cohort.task
    table, places = cohort.features(cut, start, samples)
    if table is None:  # nobody has a sample
        return torch.empty(len(cohort), 0, device=trained.device), torch.zeros_like(
            trained, dtype=torch.int64
        )
    if table.dim() != 2:
        return None
    lengths = samples.counts
    least = torch.full_like(lengths, settings.min_epochs)
    try:
        return learn(
            table.float(),
            places,
            task.targets(samples.matrix),
            torch.where(learning, lengths, 0),
            least,
            torch.where(trained, least, max(settings.max_epochs, settings.min_epochs)),
            Head(*old.values()),
            Head(*update.values()),
            Head(*weights.values()),
            batch_size=task.batch_size,
            eta=settings.eta,
            threshold=settings.threshold,
            most=max(settings.max_epochs, settings.min_epochs),
            window=WINDOW,
        )
    except OutOfResources:  # many classes or large batches on a small GPU
        return None


def are_finite(losses: Tensor, epochs: Tensor) -> Tensor:
    """Tell for each lane whether the losses [lane, epoch] of its first `epochs` are finite."""
    past = torch.arange(losses.shape[1], device=losses.device) >= epochs.unsqueeze(1)
    return (losses.isfinite() | past).all(1)


def _goes_on(losses: Sequence[float], trained: bool, settings: Settings) -> bool:
    """Tell whether a client learns for another epoch.

    Its first ALA lasts until the loss has settled, every later one for one epoch. A loss that is
    not finite spoils the round, so there is no other epoch.
    """
    if not np.isfinite(losses[-1]):
        return False
    enough = trained or _has_settled(losses, settings) or len(losses) >= settings.max_epochs
    return not enough or len(losses) < settings.min_epochs


def _has_settled(losses: Sequence[float], settings: Settings) -> bool:
    """The criterion of the initial stage: the population std of the last ten of at least eleven epoch losses."""
    return len(losses) > WINDOW and float(np.std(losses[-WINDOW:])) < settings.threshold


def _samples(cohort: Cohort, share: float) -> Samples:
    """s% of each lane's training samples, drawn anew each round and visited in the client's own order."""

    def sample(lane: int) -> np.ndarray:
        rows: np.ndarray = cohort.task.parts["train"][cohort.clients[lane]]
        chosen: np.ndarray = rows[_positions(cohort.draw(lane, "ala sample"), len(rows), share)]
        return chosen

    return cohort.load_samples(sample(lane) for lane in range(len(cohort)))


def _positions(draw: np.random.Generator, size: int, share: float) -> np.ndarray:
    """Which samples stand in a share of `size` of them: at least one, in order."""
    chosen = np.zeros(size, dtype=bool)
    chosen[draw.permutation(size)[: max(1, int(share * size + 1e-9))]] = True
    return np.flatnonzero(chosen)


def _weight_means(weights: Params) -> Tensor:
    """Each lane's mean of W over all its elements."""
    flat = [value.flatten(1) for value in weights.values()]
    total = sum(value.shape[1] for value in flat)
    return torch.stack([value.sum(1) for value in flat]).sum(0) / total


def spread(weights: Params) -> Tensor:
    """[lane, parameter, 1 + BINS]: the mean of W, and which share of its elements lies in each tenth of [0, 1]."""

    def one(value: Tensor) -> Tensor:
        flat = value.flatten(1)
        # Counting by comparison: most elements lie in one bin, where atomic additions on a GPU would queue up.
        above = torch.stack([(flat >= k / BINS).sum(1) for k in range(BINS)], 1)
        counts = above - F.pad(above[:, 1:], (0, 1))
        return (
            torch.cat([flat.sum(1, keepdim=True, dtype=torch.float64), counts], 1) / flat.shape[1]
        )

    return torch.stack([one(value) for value in weights.values()], 1)


class ALA:
    """Adaptive Local Aggregation for one client, in any training loop, for any `nn.Module`.

    Make one per client and keep it for the client's life. Each round, before local training:

        report = ala.initialize(local_model, received_model, (x, y), loss=F.cross_entropy)

    turns `local_model`, in place, from what the client trained last into the blend that it should train next.
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
        """`layers` counts from the output, or is a list of patterns that parameter names must start with."""
        patterns = (
            [layers]
            if isinstance(layers, str)
            else list(layers)
            if isinstance(layers, Iterable)
            else None
        )
        values = {"eta": eta, "sample": sample, "threshold": threshold, "max_epochs": max_epochs}
        values |= {"min_epochs": min_epochs, "start_round": start_round, "freeze": freeze}
        values |= {"batch_size": batch_size, "seed": seed}
        self.settings = build(
            ClientSettings, values if patterns is not None else {"layers": layers, **values}
        )
        self.layers: int | Sequence[str] = self.settings.layers if patterns is None else patterns
        #: How many rounds this client has taken part in.
        self.round = 0
        self._state: dict[str, Any] | None = None

    def governs(self, model: nn.Module) -> tuple[str, ...]:
        """Names of the parameters that ALA blends; everything else is overwritten by the received model."""
        return upper(model, self.layers)

    @property
    def weights(self) -> Params:
        """W by parameter name, in the model's order; empty before the first round."""
        return (
            {}
            if self._state is None
            else {name: value[0] for name, value in self._state["weights"].items()}
        )

    @torch.inference_mode(
        False
    )  # whatever the caller has switched off, W is learned from gradients
    def initialize(
        self,
        local_model: nn.Module,
        received_model: nn.Module,
        data: Any,
        loss: Loss = F.cross_entropy,
    ) -> Report:
        """Blends `received_model` into `local_model`, in place, and says what happened.

        `data` is the client's training data: a pair (inputs, targets) of tensors or NumPy arrays — inputs may also be a
        tuple or a dict of them, passed to the model as arguments or keywords —, a `Dataset` of such pairs, or a
        `DataLoader`, of which the samples that its sampler yields are used, in the dataset's order. Inputs reach the model
        as they are; only floating-point ones are brought to its precision.
        Data of unknown length may have at most `STREAM_LIMIT` samples; more are refused.
        `loss(output, target)` is the mean loss of a batch, a tensor of one number.

        Numbers that are not finite do no lasting harm; `report.fault` says what was wrong:

        - In the received model: `local_model` stays as it is, and so does W.
        - In the governed layers of the local model: the received model replaces it, and W stays.
        - In the data, the loss or the gradients of weight learning: W stays as it was before the
          round, and the blend is made with it. If no W has been learned yet, the received model
          replaces the local one.
        - In both models: a `UserError`, because neither can be trained on.

        The round counts in all cases but the last. A buffer may hold infinities that both models
        share: an attention mask does.
        """
        local, received = (_state_to_blend(model) for model in (local_model, received_model))
        governed = self.governs(local_model)
        _check_twins(local, received)
        device = next(iter(local.values())).device
        received = {name: value.to(device, copy=True) for name, value in received.items()}
        state = self._state_for(received, governed)
        if (bad := first_not_finite(received_model, local_model)) is not None:
            if (own := first_not_finite(local_model, received_model)) is not None:
                raise UserError(
                    f"Neither model can be used: {printable(bad, 100)} of the received one and {printable(own, 100)} of "
                    "the local one are not finite. Start again from a finite model."
                )
            self.round += 1
            return self._fault_report(RECEIVED_FAULT)
        draw_ = draw(self.settings.seed, "ala sample", round=self.round + 1)
        x, y = _collect(data, lambda size: _positions(draw_, size, self.settings.sample))
        rows = np.arange(len(next(leaf for _, leaf in leaves(x))))
        dtype = next((v.dtype for v in local.values() if v.is_floating_point()), torch.float32)
        task = Task(
            local_model,
            x,
            y,
            [rows],
            loss=loss if loss is F.cross_entropy else _checked(loss),
            batch_size=self.settings.batch_size,
            device=device,
            precision="float64" if dtype == torch.float64 else "float32",
            scale=False,
        )
        task.dtype = dtype
        task.uses_channels_last = False  # one pass over the samples would not repay the trial
        cohort = Cohort(
            task,
            [0],
            [self.settings.seed],
            round=self.round + 1,
            received=Message(received),
            source=[0],
        )
        whole = replace(self.settings, sample=1.0)  # what was collected is the sample
        initialized, state, outcome = initialize(
            cohort, whole, state, local, received, governed=governed
        )
        with torch.no_grad():
            for name, value in local.items():
                value.copy_(initialized[name])
        self._state, self.round = state, self.round + 1
        [report] = outcome.reports(self.settings)
        return report

    def _fault_report(self, fault: str) -> Report:
        """Report a round in which nothing was done."""
        mean = (
            float(_weight_means(self._state["weights"]))
            if self._state and self._state["weights"]
            else 1.0
        )
        return Report(0, (), False, False, False, mean, fault)

    def _state_for(self, received: Params, governed: Sequence[str]) -> dict[str, Any]:
        """What this client has learned so far, as `received` is: in the model's order, on its device."""
        state = fresh(received, governed)
        if self._state is None:
            return state
        mine = self._state["weights"]
        if {n: w.shape for n, w in mine.items()} != {
            n: w.shape for n, w in state["weights"].items()
        }:
            raise UserError(
                "This ALA holds the weights of another model; make one ALA per client and model."
            )
        return {
            "weights": {name: mine[name].to(ones) for name, ones in state["weights"].items()},
            "trained": self._state["trained"].to(state["trained"].device),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Everything this client's ALA is, as flat tensors (safetensors holds them as they are)."""
        tensors = {"round": torch.tensor(self.round)}
        if self._state is not None:
            tensors |= {f"weights.{name}": value for name, value in self.weights.items()}
            tensors["trained"] = self._state["trained"][0]
        return {name: value.detach().clone() for name, value in tensors.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` gave. If it is not sound, refuse it and change nothing."""
        round, state = _checked_state(tensors)
        self.round, self._state = round, state


def _checked_state(tensors: Mapping[str, Tensor]) -> tuple[int, dict[str, Any] | None]:
    """Read the round and what was learned out of a state dict, or refuse it."""
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
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise UserError(
                f"{wrong}the weights of {printable(name, 100)} must be a tensor of floating-point numbers."
            )
        if not ((value >= 0) & (value <= 1)).all():  # NaN is neither
            raise UserError(
                f"{wrong}the weights of {printable(name, 100)} must be between 0 and 1."
            )
    copies = {name: value.detach().clone().unsqueeze(0) for name, value in weights.items()}
    return round, {"weights": copies, "trained": trained.detach().clone().reshape(1)}


def first_not_finite(model: nn.Module, twin: nn.Module) -> str | None:
    """Name the first parameter or buffer of `model` that is not finite, if there is one.

    A buffer may hold infinities where its twin in the other model has the same ones.
    """
    for name, parameter in model.named_parameters():
        if not parameter.detach().isfinite().all():
            return name
    others = dict(twin.named_buffers())
    for name, buffer in model.named_buffers():
        if not (buffer.isfinite() | (buffer == others[name].to(buffer.device))).all():
            return name
    return None


def _state_to_blend(model: nn.Module) -> Params:
    """Give a model's state as one lane, provided that there is one: real numbers on one device."""
    if not isinstance(model, nn.Module):
        raise UserError(f"ALA blends two models of type nn.Module, not {type(model).__name__}.")
    state = model_state(model)
    if not any(True for _ in model.parameters()):
        raise UserError("The model has no parameters: there is nothing to blend.")
    devices = {str(value.device) for value in state.values()}
    if "meta" in devices:
        raise UserError(
            "The model is on the device meta, so it has no numbers: move it with to_empty and load a state."
        )
    if len(devices) > 1:
        raise UserError(
            f"The model is spread over {', '.join(sorted(devices))}: ALA needs it on one device."
        )
    return state


def _checked(loss: Loss) -> Loss:
    """Wrap a loss so that it is refused unless it gives one number."""

    def one_number(output: Any, target: Any) -> Tensor:
        value: Any = loss(output, target)
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
            return value.reshape(())
        what = type(value).__name__
        if isinstance(value, Tensor):
            what = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
        raise UserError(
            f"The loss must return the mean loss of the batch as a tensor of one number, not {what}."
        )

    return one_number


def _check_twins(local: Params, received: Params) -> None:
    kinds = [
        {name: (value.shape, value.dtype) for name, value in state.items()}
        for state in (local, received)
    ]
    for name in {**local, **received}:
        if kinds[0].get(name) != kinds[1].get(name):
            raise UserError(
                f"The local and the received model must be alike, and differ in {name}."
            )


def _collect(data: Any, choose: Callable[[int], np.ndarray]) -> tuple[Any, Any]:
    """Inputs and targets of the chosen samples, as trees of tensors whose first dimension is the sample."""
    if isinstance(data, Dataset):
        if not isinstance(data, IterableDataset) and _length(data) is None:
            raise UserError(f"The dataset has no length: give {type(data).__name__} a __len__.")
        data = DataLoader(data, batch_size=256)
    if isinstance(data, DataLoader):
        if data.batch_sampler is not None and not isinstance(data.dataset, IterableDataset):
            x, y = tree_map(torch.as_tensor, _pick(data, choose))
            return x, y
        data = _concatenate(_batches(data))
    pair = _pair(data)
    rows = choose(len(next(leaf for _, leaf in leaves(pair))))
    x, y = tree_map(lambda leaf: torch.as_tensor(leaf[rows]), pair)
    return x, y


def _length(data: Any) -> int | None:
    """Give the length that a dataset says it has, or None."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _endless() -> UserError:
    return UserError(
        f"The data has not ended after {STREAM_LIMIT} samples and names no length: give the dataset (or its sampler) a "
        "__len__, or hand over a finite part of it."
    )


def _up_to_the_end(sampler: Any) -> list[Any]:
    """List what a sampler yields, up to the length that it names.

    If it names no length and does not end, refuse it.
    """
    length = _length(sampler)
    yielded = list(islice(sampler, STREAM_LIMIT + 1 if length is None else length))
    if length is None and len(yielded) > STREAM_LIMIT:
        raise _endless()
    return yielded


def _batches(loader: DataLoader[Any]) -> list[tuple[Any, Any]]:
    """Take the batches of a loader without a sampler, up to the length that its dataset names.

    A stream may never end. One that names no length is refused beyond `STREAM_LIMIT` samples.
    """
    length = _length(loader.dataset) if isinstance(loader.dataset, IterableDataset) else None
    pairs: list[tuple[Any, Any]] = []
    taken = 0
    for batch in loader:
        if length is not None and taken >= length:
            break
        pair = _pair(batch)
        pairs.append(pair)
        taken += len(next(leaf for _, leaf in leaves(pair)))
        if length is None and taken > STREAM_LIMIT:
            raise _endless()
    if length is not None and taken > length:
        pairs[-1] = tree_map(lambda leaf: leaf[: len(leaf) - (taken - length)], pairs[-1])
    return pairs


def _pick(loader: DataLoader[Any], choose: Callable[[int], np.ndarray]) -> tuple[Any, Any]:
    """The chosen ones of the samples that a loader yields in an epoch, each once and in the dataset's own order."""
    batches: Any = loader.batch_sampler
    yielded = (
        batches.sampler
        if type(batches) is BatchSampler
        else list(chain.from_iterable(_up_to_the_end(batches)))
    )
    if (
        type(yielded) is RandomSampler
        and not yielded.replacement
        and yielded.num_samples == len(yielded.data_source)
    ):
        yielded = range(
            yielded.num_samples
        )  # a shuffle: all of them, and its generator is the user's
    own = np.unique(np.array(_up_to_the_end(yielded)))
    samples = [loader.dataset[key] for key in own[choose(len(own))].tolist()]
    try:
        return _pair(loader.collate_fn(samples)) if samples else (torch.empty(0), torch.empty(0))
    except (RuntimeError, TypeError, KeyError) as error:
        raise UserError(f"The samples cannot be put together as one batch: {error}.") from error


def _concatenate(pairs: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    if not pairs:
        return torch.empty(0), torch.empty(0)
    try:
        x, y = tree_map(lambda *parts: torch.cat([torch.as_tensor(part) for part in parts]), *pairs)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"The batches cannot be put together: {error}.") from error
    return x, y


def _pair(data: Any) -> tuple[Any, Any]:
    """`data`, provided that it is inputs and targets, with a row for each sample."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise UserError(
            "The data must be a pair (inputs, targets), a Dataset of such pairs, or a DataLoader."
        )
    for name, tree in zip(("inputs", "targets"), data, strict=True):
        tables = [leaf for _, leaf in leaves(tree)]
        if not tables or not all(_is_table(leaf) for leaf in tables):
            raise UserError(
                f"The {name} must be tensors or NumPy arrays, with a row for each sample."
            )
    lengths = {len(leaf) for _, leaf in leaves(tuple(data))}
    if len(lengths) != 1:
        raise UserError(
            f"Inputs and targets must have the same number of samples, not {sorted(lengths)}."
        )
    return data[0], data[1]


def _is_table(leaf: Any) -> bool:
    numeric = isinstance(leaf, Tensor) or (
        isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"
    )
    return numeric and leaf.ndim > 0
