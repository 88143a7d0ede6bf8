"""Flower's privacy mods around a client's training: which of them work here, and how.

Such a mod clips the update: what the client uploads, minus the model that it received. Flower calls
it for every message, but it fails if the message or its reply has no arrays, as in introductions
and evaluations. Its clipping fails on arrays of whole numbers, and does not touch numbers that have
no dimensions. So a mod gets train messages only, and of those the tensors of real numbers, each
with at least one dimension.
"""

from collections.abc import Sequence
from functools import wraps
from logging import getLogger

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.constant import ErrorCode

from fedala.errors import UserError
from fedala.flower.arrays import EXTRA
from fedala.lanes import Params, Task
from fedala.methods import Method

log = getLogger("flwr")

#: Where Flower keeps the mods for messages of its legacy API, and secure aggregation.
LEGACY_MODS = "flwr.client.mod."


class _FinalReply(Exception):
    """Carries a reply past the mods around the training, because it does not have an upload."""

    def __init__(self, reply: Message) -> None:
        self.reply = reply


def prepare_mods(mods: Sequence[Mod]) -> list[Mod]:
    """Return the mods of a client app, with privacy mods limited to uploads."""
    for mod in mods:
        _check_mod(mod)
    return [limit_to_uploads(mod) if is_privacy_mod(mod) else mod for mod in mods]


def is_privacy_mod(mod: Mod) -> bool:
    """Tell whether this is one of Flower's mods that change the update."""
    return mod is fixedclipping_mod or isinstance(mod, LocalDpMod)


def _check_mod(mod: Mod) -> None:
    """Refuse a mod that cannot work with this package's server."""
    module = getattr(mod, "__module__", "")
    name = getattr(mod, "__name__", type(mod).__name__)
    if module.startswith(f"{LEGACY_MODS}secure_aggregation"):
        raise UserError(
            f"{name} does not work with fedala's server: secure aggregation needs Flower's "
            "SecAggPlusWorkflow, which is a server of its own. Leave it out, or protect updates "
            "with LocalDpMod of flwr.clientapp.mod."
        )
    if module.startswith(LEGACY_MODS):
        raise UserError(
            f"{name} of flwr.client.mod is for Flower's legacy messages: import it from "
            "flwr.clientapp.mod."
        )
    if mod is adaptiveclipping_mod:
        raise UserError(
            "adaptiveclipping_mod does not work with fedala's server, which does not adapt the "
            "bound to what clients report: use fixedclipping_mod and the option clipping_norm, or "
            "LocalDpMod."
        )


def find_misfit(
    mods: Sequence[Mod], method: Method, task: Task, initial: Params, clipping_norm: float
) -> str | None:
    """Return why the mods do not fit the run, as a sentence without its full stop."""
    clips = any(mod is fixedclipping_mod or not mod.__module__.startswith("flwr.") for mod in mods)
    if clipping_norm and not clips:
        return (
            "clipping_norm is set, but the app does not have the mod that clips: use "
            "client_app(mods=[fixedclipping_mod]), or set clipping_norm to 0"
        )
    if fixedclipping_mod in mods and not clipping_norm:
        return "fixedclipping_mod needs a bound: set clipping_norm in the run config"
    if any(map(is_privacy_mod, mods)):
        return find_unclippable(method, task, initial)
    return None


def find_unclippable(method: Method, task: Task, initial: Params) -> str | None:
    """Return why the updates of a method cannot be clipped, without a full stop."""
    if method.sends_model_stack:
        return (
            f"{method.title} sends several models at once, so there is not one that an update "
            "could be measured from: it cannot be clipped"
        )
    if method.extra_template(task, initial):
        return (
            f"{method.title} uploads tensors besides the model, which clipping and noise would "
            "not protect"
        )
    return None


def refuse_message(message: Message, reason: str) -> Message:
    """Return a reply that tells the server why the mods do not fit."""
    log.error("%s.", reason)
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, reason), reply_to=message)


def limit_to_training(mod: Mod) -> Mod:
    """Return one of Flower's mods that change the update so that it leaves other messages alone.

    In an evaluation there is no update, and Flower's mods fail.
    """
    if not (is_privacy_mod(mod) or mod is adaptiveclipping_mod):
        return mod

    @wraps(mod)
    def limited(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        is_training = message.metadata.message_type.partition(".")[0] == MessageType.TRAIN
        return mod(message, context, call_next) if is_training else call_next(message, context)

    return limited


def limit_to_uploads(mod: Mod) -> Mod:
    """Make a mod that calls `mod` for train messages whose reply has an upload."""

    def limited(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return call_next(message, context)
        content = message.content
        sent = _pick_protected(content["arrays"])  # type: ignore[arg-type]
        upload = ArrayRecord()

        def train(_: Message, context: Context) -> Message:
            nonlocal upload
            message.content = content
            reply = call_next(message, context)
            if reply.has_error() or not reply.content["arrays"]:
                raise _FinalReply(reply)  # it failed or diverged
            upload = reply.content["arrays"]  # type: ignore[assignment]
            protected = _pick_protected(upload)
            if protected.keys() != sent.keys():
                name = min(protected.keys() ^ sent.keys())
                reason = f"{name} is not both sent and uploaded, so its update cannot be clipped"
                raise _FinalReply(refuse_message(message, reason))
            reply.content["arrays"] = ArrayRecord({name: protected[name] for name in sent})
            return reply

        try:
            message.content = RecordDict({**content, "arrays": sent})
            reply = mod(message, context, train)
        except _FinalReply as final:
            return final.reply
        finally:
            message.content = content
        if reply.has_content():
            changed = reply.content["arrays"]
            reply.content["arrays"] = _put_back(changed, upload)  # type: ignore[arg-type]
        return reply

    return limited


def _pick_protected(record: ArrayRecord) -> ArrayRecord:
    """Return the real numbers of a model, with at least one dimension each."""
    return ArrayRecord({
        name: array if array.shape else Array(array.numpy().reshape(1))
        for name, array in record.items()
        if np.dtype(array.dtype).kind not in "iub" and not name.startswith(EXTRA)
    })  # fmt: skip


def _put_back(changed: ArrayRecord, upload: ArrayRecord) -> ArrayRecord:
    """Return the upload with the changed arrays, in their own shapes."""
    arrays = dict(upload)
    for name, array in changed.items():
        arrays[name] = array if upload[name].shape else Array(array.numpy().reshape(()))
    return ArrayRecord(arrays)
