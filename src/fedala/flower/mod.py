"""ALA for any Flower app: a client mod that initialises the received model before training."""

from collections.abc import Callable, Mapping
from logging import getLogger
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from fedala.ala import ALA, RECEIVED_FAULT, find_not_finite
from fedala.data.batches import Split
from fedala.errors import UserError, printable
from fedala.flower.client_store import check_experiment_name
from fedala.flower.mod_state import ModState, check_state_dir
from fedala.flower.model_arrays import (
    EMPTY_TENSOR_KEY,
    Names,
    copy_with_arrays,
    decode,
    find_shared,
    make_array,
    match_names,
)
from fedala.flower.upload_mods import limit_to_training
from fedala.lanes.losses import LossFunction

log = getLogger("flwr")

#: The models that a client has to do with, in error messages.
RECEIVED = "the model that the server sent"
TRAINED = "the model that training returned"
STORED = "the client's stored model"

Setup = Callable[[Context], tuple[nn.Module, Any] | tuple[nn.Module, Any, LossFunction]]
"""Returns the app's model, the client's training data, and a loss if ALA needs to be told."""

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
        split: Split | None = None,
        names: Names | None = None,
    ) -> None:
        if evaluate not in (False, True, "stored"):
            raise UserError(f'evaluate must be True, False or "stored", not {evaluate!r}.')
        if experiment is not None:
            check_experiment_name(experiment)
        self.setup, self.settings, self.evaluate = setup, settings, evaluate
        self.experiment, self.state_dir = experiment, check_state_dir(state_dir)
        if split is not None and not callable(split):
            raise UserError(f"split must be a function, not {split!r}.")
        if not (names is None or callable(names) or isinstance(names, Mapping)):
            raise UserError(f"names must be a function or a dict, not {names!r}.")
        self.split, self.names = split, names
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
            trained = decode(record)
            names = match_names(local, trained, TRAINED, self.names)
            filled = copy_with_arrays(local, trained, names, TRAINED)
            name = find_not_finite(filled, local)
            if name is None:
                state.save(ala, {key: trained[key] for key in names}, names)
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
        model, data, loss = _read_setup(self.setup(context))
        sent = decode(received)
        names = match_names(model, sent, RECEIVED, self.names)
        global_model = copy_with_arrays(model, sent, names, RECEIVED)
        if stored is None:  # a client's first time: it has no model of its own to blend
            local = copy_with_arrays(model, sent, names, RECEIVED)
        else:
            stored_names = match_names(model, stored, STORED, self.names)
            local = copy_with_arrays(model, stored, stored_names, STORED)
        shared = find_shared(model, names.values())
        report = ala.initialize(local, global_model, data, loss, split=self.split, shared=shared)
        log.info(
            "ALA: %d epochs of weight learning, mean of W %.3f", report.epochs, report.weight_mean
        )
        if report.fault:
            log.warning("ALA: %s.", report.fault)
        parameters = dict(local.named_parameters())
        # By identity, because tied weights have several names.
        governed = {id(parameters[name]) for name in ala.weights}
        blended = local.state_dict(keep_vars=True)
        arrays = dict(received)
        for key, name in names.items():
            if id(blended[name]) in governed or report.fault == RECEIVED_FAULT:
                arrays[key] = make_array(blended[name], like=received[key])
        return local, ArrayRecord(arrays), report.fault


def ala_mod(
    setup: Setup,
    *,
    experiment: str | None = None,
    state_dir: str | Path | None = None,
    evaluate: Evaluate = False,
    split: Split | None = None,
    names: Names | None = None,
    **settings: Any,
) -> Mod:
    """Make ALA a mod of a `ClientApp`: `ClientApp(mods=order_mods(ala_mod(setup)))`.

    `setup(context)` returns the app's model, the client's training data, and a loss unless it is
    cross-entropy or the model computes it. `settings` are those of `fedala.ALA`, and so is `split`,
    for batches of another form than pairs and dicts. Before every training, the mod blends the
    received model with the client's last local model, with weights W learned on the client's data.
    The model that the app's training returns is the next local model.

    If the app sends only a part of the model, ALA blends the upper layers of that part. All else is
    as in the model that `setup` returns, so the client's own parts must be in it. `names` says
    what an array's name is in the model, if that is another: a function, or a dict of those that
    differ. None means that ALA leaves the array alone, for instance a head that the app replaces
    with the client's own. Arrays without names, those of a sub-module and those of a PEFT adapter
    are recognised without it (`fedala.flower.model_arrays.match_names`).

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
    return ALAMod(
        setup,
        settings,
        experiment=experiment,
        state_dir=state_dir,
        evaluate=evaluate,
        split=split,
        names=names,
    )


def order_mods(*mods: Mod) -> list[Mod]:
    """Put ALA last, next to the app, so that the bounds of other mods hold.

    A mod that clips the update (`fixedclipping_mod`, `LocalDpMod`) measures it from the model that
    it passes on. Around ALA, that is the model that the server sent. Inside ALA, it would be the
    initialised one, and the upload would not be bounded. Such mods get train messages only: in an
    evaluation, they fail.
    """
    ala_mods = [mod for mod in mods if isinstance(mod, ALAMod)]
    if len(ala_mods) > 1:
        raise UserError(
            "A client app takes one ALA mod: a second would blend a model that is already blended."
        )
    return [*(limit_to_training(mod) for mod in mods if mod not in ala_mods), *ala_mods]


def _read_setup(returned: Any) -> tuple[nn.Module, Any, LossFunction | None]:
    """Return the model, the data, and the loss or None, out of what `setup` returned."""
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
        what = f"{len(returned)} things" if isinstance(returned, tuple | list) else repr(returned)
        raise UserError(
            "setup must return a model and the client's training data, and may return a loss; "
            f"it returns {printable(what, 200)}."
        )
    model, data, *loss = returned
    if not isinstance(model, nn.Module):
        raise UserError(
            f"setup must return an nn.Module first, and it returns {type(model).__name__}."
        )
    return model, data, loss[0] if loss else None


def _get_only_arrays(content: RecordDict) -> tuple[str, ArrayRecord]:
    if len(content.array_records) != 1:
        raise UserError(
            "ALA needs messages and replies with one ArrayRecord, the model, "
            f"but there are {len(content.array_records)}."
        )
    [(key, record)] = content.array_records.items()
    return key, record


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
