"""ALA for anybody's Flower app: a client mod that swaps the received model for the initialised one before training."""

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
from fedala.flower.client_store import Kept, directory, name_of
from fedala.lanes.task import Loss

log = getLogger("flwr")

#: How Flower's legacy API names the one array of a message without arrays.
EMPTY_TENSOR_KEY = "_empty"

Setup = Callable[[Context], tuple[nn.Module, Any] | tuple[nn.Module, Any, Loss]]
"""Gives the app's model, the client's training data, and its loss, if that is not cross-entropy."""


class ALAMod:
    """A client mod; `ala_mod` makes one."""

    def __init__(self, setup: Setup, experiment: str | None, settings: Mapping[str, Any]) -> None:
        self.setup, self.experiment, self.settings = setup, experiment, settings
        ALA(**settings)  # refuses what is wrong with them before any message comes

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        content = message.content
        key, received = _only_arrays(content)
        kept = Kept(
            directory(context.node_config),
            self.experiment or f"run-{context.run_id}",
            name_of(context),
        )
        ala = ALA(**self.settings)
        local, initialized, fault = self._initialize(ala, context, received, kept)
        try:
            # Mods around this one go on seeing what the server sent: a clipping mod measures the update from there.
            message.content = RecordDict({**content, key: initialized})
            reply = call_next(message, context)
        finally:
            message.content = content
        if reply.has_content():
            _, record = _only_arrays(reply.content)
            fault = self._keep(kept, ala, record, local) or fault
            _add_metric(reply, fault)
        return reply

    def _keep(self, kept: Kept, ala: ALA, record: ArrayRecord, twin: nn.Module) -> str | None:
        """Keep what training left, with W, for the next round. Return why, if it cannot be kept."""
        fault = None
        if set(record) <= {EMPTY_TENSOR_KEY}:
            fault = "the app's training returned no model"
        else:
            trained = _decode(record)
            bad = find_not_finite(_into(twin, trained, "what training returned"), twin)
            if bad is None:
                kept.save(ala.round, {"local": trained, "ala": ala.state_dict()})
            else:
                fault = f"{bad} of the model that training returned is not finite"
        if fault:
            log.warning(
                "ALA: %s; the client keeps the state that it had before this round.",
                printable(fault, 300),
            )
        return fault

    def _initialize(
        self, ala: ALA, context: Context, received: ArrayRecord, kept: Kept
    ) -> tuple[nn.Module, ArrayRecord, str | None]:
        """Blend the received model and the client's own by ALA.

        Returns the blend, the arrays to train from, and what was not finite, if anything. The
        arrays are the blend's in the layers that ALA governs, and the received ones elsewhere. If
        the received model is not finite, they are all the client's own.
        """
        model, data, loss = (*self.setup(context), F.cross_entropy)[:3]
        theirs = _into(model, _decode(received))
        ours = theirs  # a client's first time: there is nothing of its own to blend
        if rounds := kept.rounds():
            state = kept.load(rounds[-1])
            if state is not None:
                ours = _into(model, state["local"], "what the client kept")
                try:
                    ala.load_state_dict(state["ala"])
                except UserError as error:
                    log.error(
                        "%s This client has LOST its weights W and learns them from the start.",
                        error,
                    )
                    ala.round = rounds[-1]
            else:
                ala.round = rounds[-1]
        local = copy.deepcopy(ours) if ours is theirs else ours
        report = ala.initialize(local, theirs, data, loss)
        log.info(
            "ALA: %d epochs of weight learning, mean of W %.3f", report.epochs, report.weight_mean
        )
        if report.fault:
            log.warning("ALA: %s.", report.fault)
        parameters = dict(local.named_parameters())
        governed = {
            parameters[name] for name in ala.governs(local)
        }  # by identity: tied weights have several names
        blended, names = local.state_dict(keep_vars=True), _names(model, received)
        arrays = {}
        for key, array in received.items():
            own = blended[names[key]]
            is_own = own in governed or report.fault == RECEIVED_FAULT
            arrays[key] = _array(own, like=array) if is_own else array
        return local, ArrayRecord(arrays), report.fault


def ala_mod(setup: Setup, *, experiment: str | None = None, **settings: Any) -> Mod:
    """ALA as a mod of a `ClientApp`: `ClientApp(mods=mods(ala_mod(setup)))`.

    `setup(context)` gives the app's model and the client's training data, and a loss if it is not cross-entropy;
    `settings` are those of `fedala.ALA`. Before every training, the received model is blended with the one that the client
    trained last, with weights learned on its own data; what the app's training then replies with is its next local model.

    The local model and the weights are kept in files on the node (`state-dir` in its node config), so that they survive a
    restart. They belong to the Flower run; an `experiment` of your naming carries them on into other runs.

    Numbers that are not finite (NaN, infinity) are never kept. `fedala.ALA.initialize` says what
    becomes of such a round, and a trained model that is not finite does not replace the client's
    last one. The log says so, and so does the metric `ala-fault`, which every reply has: 1 in such
    a round, else 0. With the legacy API it stands in `FitRes.metrics`.
    """
    return ALAMod(setup, experiment, settings)


def mods(*mods: Mod) -> list[Mod]:
    """The mods in the order that keeps the bounds of the others: ALA last, next to the app.

    A mod that clips the update (`fixedclipping_mod`, `LocalDpMod`) measures it from what it hands in. Around ALA, that is
    the model that the server sent; inside it, it would be the initialised one, and what is uploaded would not be bounded.
    """
    own = [mod for mod in mods if isinstance(mod, ALAMod)]
    if len(own) > 1:
        raise UserError(
            "A client app takes one ALA mod: the second would blend what the first has blended."
        )
    return [*(mod for mod in mods if mod not in own), *own]


def _only_arrays(content: RecordDict) -> tuple[str, ArrayRecord]:
    if len(content.array_records) != 1:
        raise UserError(
            f"ALA needs messages and replies with one ArrayRecord, the model; there are {len(content.array_records)}."
        )
    [(key, record)] = content.array_records.items()
    return key, record


def _names(
    model: nn.Module, keys: Sequence[str] | Mapping[str, Any], source: str = "what the server sent"
) -> dict[str, str]:
    """Which parameter or buffer each array is: by its name, or, of a list of arrays, by its place in the state dict."""
    known = list(model.state_dict())
    if set(keys) <= set(known):
        return {key: key for key in keys}
    if list(keys) == [str(i) for i in range(len(known))]:
        return dict(zip(keys, known, strict=True))
    strange = next(key for key in keys if key not in known)
    raise UserError(f"The model that setup gives does not have {strange}, which is in {source}.")


def _decode(record: ArrayRecord) -> dict[str, Tensor]:
    """Read arrays as tensors. Their bytes tell type and shape; the legacy API tells neither."""
    if EMPTY_TENSOR_KEY in record:
        raise UserError("The message carries no arrays: ALA needs the model in it.")
    try:
        return dict(record.to_torch_state_dict())
    except (ValueError, TypeError, EOFError, OSError, RuntimeError) as error:
        raise UserError(f"The arrays of the model cannot be read: {error}.") from error


def _add_metric(reply: Message, fault: str | None) -> None:
    """Say in the reply's metrics whether something was not finite.

    Every reply says it, because Flower skips a round whose replies have different metrics.
    """
    content = reply.content
    legacy = {
        key: record for key, record in content.config_records.items() if key == "fitres.metrics"
    }
    metrics: dict[str, Any] = legacy or dict(content.metric_records)
    if len(metrics) == 1:
        [(key, record)] = metrics.items()
        reply.content = RecordDict(
            {**content, key: type(record)({**record, "ala-fault": int(fault is not None)})}
        )


def _into(
    model: nn.Module, arrays: Mapping[str, Tensor], source: str = "what the server sent"
) -> nn.Module:
    """A copy of the model with these arrays in it. What averaging has made of a counter becomes a whole number again."""
    filled = copy.deepcopy(model)
    state = filled.state_dict()
    with torch.no_grad():
        for key, name in _names(model, arrays, source).items():
            if state[name].shape != arrays[key].shape:
                raise UserError(
                    f"{name} has the shape {tuple(state[name].shape)} in the model that setup gives, "
                    f"and {tuple(arrays[key].shape)} in {source}."
                )
            state[name].copy_(arrays[key])
    return filled


def _array(value: Tensor, like: Array) -> Array:
    """A parameter as an array of the type that came: what averaging or a half-precision app has made of it stays so."""
    dtype = torch.from_numpy(
        like.numpy()
    ).dtype  # the legacy API's arrays have no dtype of their own
    return Array(value.detach().cpu().to(dtype).numpy())
