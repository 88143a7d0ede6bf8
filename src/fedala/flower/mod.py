"""ALA for any Flower app: a client mod that initialises the received model before training."""

import copy
from collections.abc import Callable, Mapping, Sequence
from logging import getLogger
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from fedala.ala import ALA, RECEIVED_FAULT, find_not_finite
from fedala.errors import UserError, printable
from fedala.flower.mod_state import ModState
from fedala.lanes.losses import LossFunction

log = getLogger("flwr")

#: The name of the one array in a message without arrays, in Flower's legacy API.
EMPTY_TENSOR_KEY = "_empty"

#: The received model, in error messages.
RECEIVED = "the model that the server sent"

Setup = Callable[[Context], tuple[nn.Module, Any] | tuple[nn.Module, Any, LossFunction]]
"""Returns the app's model, the client's training data, and its loss unless it is cross-entropy."""


class ALAMod:
    """A client mod. `ala_mod` makes one."""

    def __init__(self, setup: Setup, experiment: str | None, settings: Mapping[str, Any]) -> None:
        self.setup, self.experiment, self.settings = setup, experiment, settings
        ALA(**settings)  # refuses wrong settings before any message comes

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        content = message.content
        key, received = _get_only_arrays(content)
        state = ModState(context, self.experiment)
        ala = ALA(**self.settings)
        local, initialized, fault = self._initialize(ala, context, received, state)
        try:
            # Mods around this one must still see the model that the server sent: a clipping mod
            # measures the update from it.
            message.content = RecordDict({**content, key: initialized})
            reply = call_next(message, context)
        finally:
            message.content = content
        if reply.has_content():
            _, record = _get_only_arrays(reply.content)
            fault = self._save(state, ala, record, local) or fault
            _add_fault_metric(reply, fault)
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
                state.save(ala, trained)
            else:
                fault = f"{name} of the model that training returned is not finite"
        if fault:
            log.warning(
                "ALA: %s. The client keeps its state from before this round.",
                printable(fault, 300),
            )
        return fault

    def _initialize(
        self, ala: ALA, context: Context, received: ArrayRecord, state: ModState
    ) -> tuple[nn.Module, ArrayRecord, str | None]:
        """Blend the received model and the client's own by ALA.

        Return the blend, the arrays to train from, and a fault if something was not finite. The
        arrays are the blend's in the layers that ALA governs, and the received ones in the others.
        If the received model is not finite, all arrays are the client's own.
        """
        model, data, loss = (*self.setup(context), F.cross_entropy)[:3]
        global_model = _copy_with_arrays(model, _decode(received))
        stored = state.load(ala)
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


def ala_mod(setup: Setup, *, experiment: str | None = None, **settings: Any) -> Mod:
    """Make ALA a mod of a `ClientApp`: `ClientApp(mods=order_mods(ala_mod(setup)))`.

    `setup(context)` returns the app's model, the client's training data, and a loss unless it is
    cross-entropy. `settings` are those of `fedala.ALA`. Before every training, the mod blends the
    received model with the client's last local model, with weights W learned on the client's data.
    The model that the app's training returns is the next local model.

    The local model and W are in files on the node (`state-dir` in its node config), so they survive
    a restart. They belong to the Flower run, unless you name an `experiment`: then later runs of
    that name use them, too.

    Numbers that are not finite (NaN, infinity) are never saved. `fedala.ALA.initialize` says what
    happens in such a round. A trained model that is not finite does not replace the client's last
    one. The log says so, and so does the metric `ala-fault`, which every reply has: 1 in such a
    round, else 0. In the legacy API it is in `FitRes.metrics`.
    """
    return ALAMod(setup, experiment, settings)


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


def _add_fault_metric(reply: Message, fault: str | None) -> None:
    """Add a metric that says whether something was not finite.

    Every reply has it, because Flower skips a round whose replies have different metrics.
    """
    content = reply.content
    legacy = {
        key: record for key, record in content.config_records.items() if key == "fitres.metrics"
    }
    metrics: dict[str, Any] = legacy or dict(content.metric_records)
    if len(metrics) == 1:
        [(key, record)] = metrics.items()
        extended = type(record)({**record, "ala-fault": int(fault is not None)})
        reply.content = RecordDict({**content, key: extended})


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
