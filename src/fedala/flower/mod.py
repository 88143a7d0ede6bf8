"""ALA for any Flower app: a client mod that initialises the received model before training."""

import copy
from collections.abc import Callable, Mapping, Sequence
from logging import getLogger
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from fedala.ala import ALA, RECEIVED_FAULT, find_not_finite
from fedala.errors import UserError, printable
from fedala.flower.client_store import check_experiment_name
from fedala.flower.mod_state import ModState, check_state_dir
from fedala.lanes.losses import LossFunction

log = getLogger("flwr")

#: The name of the one array in a message without arrays, in Flower's legacy API.
EMPTY_TENSOR_KEY = "_empty"

#: The received model, in error messages.
RECEIVED = "the model that the server sent"

Setup = Callable[[Context], tuple[nn.Module, Any] | tuple[nn.Module, Any, LossFunction]]
"""Returns the app's model, the client's training data, and its loss unless it is cross-entropy."""

Evaluate = bool | Literal["stored"]
"""Whether the app evaluates the initialised model; and with W as it is stored, or as learned."""


class ALAMod:
    """A client mod. `ala_mod` makes one."""

    def __init__(
        self,
        setup: Setup,
        settings: Mapping[str, Any],
        *,
        experiment: str | None = None,
        state_dir: str | Path | None = None,
        evaluate: Evaluate = False,
    ) -> None:
        if evaluate not in (False, True, "stored"):
            raise UserError(f'evaluate must be True, False or "stored", not {evaluate!r}.')
        if experiment is not None:
            check_experiment_name(experiment)
        self.setup, self.settings, self.evaluate = setup, settings, evaluate
        self.experiment, self.state_dir = experiment, check_state_dir(state_dir)
        ALA(**settings)  # refuses wrong settings before any message comes

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind = message.metadata.message_type.partition(".")[0]
        if kind == MessageType.TRAIN:
            return self._train(message, context, call_next)
        if kind == MessageType.EVALUATE and self.evaluate:
            return self._evaluate(message, context, call_next)
        return call_next(message, context)

    def _train(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Let the app train from the initialised model, and keep what it returns."""
        _, received = _get_only_arrays(message.content)
        state = ModState(context, self.experiment, self.state_dir)
        ala = ALA(**self.settings)
        stored = state.load(ala)
        local, initialized, fault = self._initialize(ala, context, received, stored)
        reply = _call_with_arrays(call_next, message, context, initialized)
        if reply.has_content():
            _, record = _get_only_arrays(reply.content)
            fault = self._save(state, ala, record, local) or fault
            _add_metrics(reply, state, fault)
        return reply

    def _evaluate(
        self, message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        """Let the app evaluate the model that its next training would start from.

        Nothing is written, so training does not depend on it.
        """
        _, received = _get_only_arrays(message.content)
        state = ModState(context, self.experiment, self.state_dir, read_only=True)
        ala, fault = ALA(**self.settings), None
        stored = state.load(ala)
        if self.evaluate == "stored":
            ala, stored = _freeze(ala, self.settings), stored if _has_learned(ala) else None
        if stored is not None:
            with torch.random.fork_rng(devices=[]):  # the app draws the same numbers as without ALA
                _, received, fault = self._initialize(ala, context, received, stored)
        reply = _call_with_arrays(call_next, message, context, received)
        if reply.has_content():
            _add_metrics(reply, state, fault)
        return reply

    def _save(self, state: ModState, ala: ALA, record: ArrayRecord, local: nn.Module) -> str | None:
        """Save the trained model and W for the next round. Return the reason if that fails."""
        fault = None
        if set(record) <= {EMPTY_TENSOR_KEY}:
            fault = "the app's training returned no model"
        else:
            trained = _decode(record)
            filled = _copy_with_arrays(local, trained, "the model that training returned")
            name = find_not_finite(filled, local)
            if name is None:
                state.save(ala, trained, _match_names(local, trained))
            else:
                fault = f"{name} of the model that training returned is not finite"
        if fault:
            log.warning(
                "ALA: %s. The client keeps its state from before this round.",
                printable(fault, 300),
            )
        return fault

    def _initialize(
        self,
        ala: ALA,
        context: Context,
        received: ArrayRecord,
        stored: Mapping[str, Tensor] | None,
    ) -> tuple[nn.Module, ArrayRecord, str | None]:
        """Blend the received model and the client's own, whose arrays are `stored`, by ALA.

        Return the blend, the arrays to train from, and a fault if something was not finite. The
        arrays are the blend's in the layers that ALA governs, and the received ones in the others.
        If the received model is not finite, all arrays are the client's own.
        """
        model, data, loss = (*self.setup(context), F.cross_entropy)[:3]
        global_model = _copy_with_arrays(model, _decode(received))
        if stored is None:  # a client's first time: it has no model of its own to blend
            local = copy.deepcopy(global_model)
        else:
            local = _copy_with_arrays(model, stored, "the client's stored model")
        report = ala.initialize(local, global_model, data, loss)
        log.info(
            "ALA: %d epochs of weight learning, mean of W %.3f", report.epochs, report.weight_mean
        )
        if report.fault:
            log.warning("ALA: %s.", report.fault)
        parameters = dict(local.named_parameters())
        # By identity, because tied weights have several names.
        names_blended = () if report.fault == RECEIVED_FAULT else ala.governs(local)
        governed = {parameters[name] for name in names_blended}
        blended, names = local.state_dict(keep_vars=True), _match_names(model, received)
        arrays = {}
        for key, array in received.items():
            value = blended[names[key]]
            is_blended = value in governed or report.fault == RECEIVED_FAULT
            arrays[key] = _make_array(value, like=array) if is_blended else array
        return local, ArrayRecord(arrays), report.fault


def ala_mod(
    setup: Setup,
    *,
    experiment: str | None = None,
    state_dir: str | Path | None = None,
    evaluate: Evaluate = False,
    **settings: Any,
) -> Mod:
    """Make ALA a mod of a `ClientApp`: `ClientApp(mods=order_mods(ala_mod(setup)))`.

    `setup(context)` returns the app's model, the client's training data, and a loss unless it is
    cross-entropy. `settings` are those of `fedala.ALA`. Before every training, the mod blends the
    received model with the client's last local model, with weights W learned on the client's data.
    The model that the app's training returns is the next local model.

    With `evaluate=True`, the app's evaluate function gets the initialised model, too: the one that
    training would start from if it came now. W is learned further on a copy, with the draws of the
    next training, so an evaluation takes as long as an initialisation. With `evaluate="stored"`, W
    stays as the last training left it, which saves that time. The state does not change. A client
    without a local model evaluates the received one.

    The local model and W are in files on the node, so they survive a restart: in `state-dir` of its
    node config, or else in `state_dir`. They belong to the Flower run, unless you name an
    `experiment`: then later runs of that name use them, too.

    Numbers that are not finite (NaN, infinity) are never saved. `fedala.ALA.initialize` says what
    happens in such a round. A trained model that is not finite does not replace the client's last
    one.

    Every reply has three metrics, and the log has the details: `ala-fault` is 1 if a number was not
    finite, `ala-lost` is 1 if files of earlier rounds are missing or damaged, `ala-new` is 1 if the
    client had no local model. Else they are 0. In the legacy API they are in `FitRes.metrics` and
    `EvaluateRes.metrics`.
    """
    return ALAMod(setup, settings, experiment=experiment, state_dir=state_dir, evaluate=evaluate)


def order_mods(*mods: Mod) -> list[Mod]:
    """Put ALA last, next to the app, so that the bounds of other mods hold.

    A mod that clips the update (`fixedclipping_mod`, `LocalDpMod`) measures it from the model that
    it passes on. Around ALA, that is the model that the server sent. Inside ALA, it would be the
    initialised one, and the upload would not be bounded.
    """
    ala_mods = [mod for mod in mods if isinstance(mod, ALAMod)]
    if len(ala_mods) > 1:
        raise UserError(
            "A client app takes one ALA mod: a second would blend a model that is already blended."
        )
    return [*(mod for mod in mods if mod not in ala_mods), *ala_mods]


def _get_only_arrays(content: RecordDict) -> tuple[str, ArrayRecord]:
    if len(content.array_records) != 1:
        raise UserError(
            "ALA needs messages and replies with one ArrayRecord, the model, "
            f"but there are {len(content.array_records)}."
        )
    [(key, record)] = content.array_records.items()
    return key, record


def _match_names(
    model: nn.Module, keys: Sequence[str] | Mapping[str, Any], source: str = RECEIVED
) -> dict[str, str]:
    """Return the parameter or buffer of each array: by name, or by index if arrays have none."""
    names = list(model.state_dict())
    if set(keys) <= set(names):
        return {key: key for key in keys}
    if list(keys) == [str(i) for i in range(len(names))]:
        return dict(zip(keys, names, strict=True))
    unknown = next(key for key in keys if key not in names)
    raise UserError(f"The model that setup returns does not have {unknown}, which is in {source}.")


def _decode(record: ArrayRecord) -> dict[str, Tensor]:
    """Read arrays as tensors. Their bytes tell type and shape, which the legacy API does not."""
    if EMPTY_TENSOR_KEY in record:
        raise UserError("The message carries no arrays, but ALA needs the model in it.")
    try:
        return dict(record.to_torch_state_dict())
    except (ValueError, TypeError, EOFError, OSError, RuntimeError) as error:
        raise UserError(f"The arrays of the model cannot be read: {error}.") from error


def _call_with_arrays(
    call_next: ClientAppCallable, message: Message, context: Context, arrays: ArrayRecord
) -> Message:
    """Call the app with other arrays in its message.

    Mods around this one must still see the model that the server sent: a clipping mod measures the
    update from it.
    """
    content = message.content
    key, _ = _get_only_arrays(content)
    try:
        message.content = RecordDict({**content, key: arrays})
        return call_next(message, context)
    finally:
        message.content = content


def _has_learned(ala: ALA) -> bool:
    return bool(ala.state_dict().get("trained", False))


def _freeze(ala: ALA, settings: Mapping[str, Any]) -> ALA:
    """Return an ALA that blends with the same W. If that is a learned one, it stays."""
    frozen = ALA(**{**settings, "freeze": True})
    frozen.load_state_dict(ala.state_dict())
    return frozen


def _add_metrics(reply: Message, state: ModState, fault: str | None) -> None:
    """Add metrics that say what happened to this client.

    Every reply has them, because Flower skips a round whose replies have different metrics.
    """
    content = reply.content
    legacy = {
        key: record
        for key, record in content.config_records.items()
        if key in ("fitres.metrics", "evaluateres.metrics")
    }
    metrics: dict[str, Any] = legacy or dict(content.metric_records)
    if len(metrics) == 1:
        [(key, record)] = metrics.items()
        added = {
            "ala-fault": int(fault is not None),
            "ala-lost": int(state.is_lost),
            "ala-new": int(state.is_new),
        }
        reply.content = RecordDict({**content, key: type(record)({**record, **added})})


def _copy_with_arrays(
    model: nn.Module, arrays: Mapping[str, Tensor], source: str = RECEIVED
) -> nn.Module:
    """Copy the model with these arrays in it. A counter that was averaged is rounded down."""
    filled = copy.deepcopy(model)
    state = filled.state_dict()
    with torch.no_grad():
        for key, name in _match_names(model, arrays, source).items():
            if state[name].shape != arrays[key].shape:
                raise UserError(
                    f"{name} has the shape {tuple(state[name].shape)} in the model that setup "
                    f"returns, but {tuple(arrays[key].shape)} in {source}."
                )
            state[name].copy_(arrays[key])
    return filled


def _make_array(value: Tensor, like: Array) -> Array:
    """Make an array of the type of `like`: averages and half-precision apps keep their type."""
    dtype = torch.from_numpy(like.numpy()).dtype  # arrays of the legacy API do not declare theirs
    return Array(value.detach().cpu().to(dtype).numpy())
