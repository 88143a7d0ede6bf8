"""ALA for any Flower app: a client mod that initialises the received model before training."""

import copy
from collections.abc import Callable, Mapping
from logging import getLogger
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import nn

from fedala.ala import ALA, RECEIVED_FAULT, find_not_finite
from fedala.data.batches import Split
from fedala.errors import UserError, printable
from fedala.flower.mod_state import ModState
from fedala.flower.model_arrays import (
    EMPTY_TENSOR_KEY,
    Names,
    copy_with_arrays,
    decode,
    find_shared,
    make_array,
    match_names,
)
from fedala.lanes.losses import LossFunction

log = getLogger("flwr")

Setup = Callable[[Context], tuple[nn.Module, Any] | tuple[nn.Module, Any, LossFunction]]
"""Returns the app's model, the client's training data, and a loss if ALA needs to be told."""


class ALAMod:
    """A client mod. `ala_mod` makes one."""

    def __init__(
        self,
        setup: Setup,
        experiment: str | None,
        split: Split | None,
        names: Names | None,
        settings: Mapping[str, Any],
    ) -> None:
        self.setup, self.experiment, self.settings = setup, experiment, settings
        self.split, self.names = split, names
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
            trained = decode(record)
            source = "the model that training returned"
            filled = copy_with_arrays(local, trained, source, self.names)
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
        model, data, loss = (*self.setup(context), None)[:3]
        sent = decode(received)
        names = match_names(model, sent, names=self.names)
        global_model = copy_with_arrays(model, sent, names=self.names)
        stored = state.load(ala)
        if stored is None:  # a client's first time: it has no model of its own to blend
            local = copy.deepcopy(global_model)
        else:
            local = copy_with_arrays(model, stored, "the client's stored model", self.names)
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

    The local model and W are in files on the node (`state-dir` in its node config), so they survive
    a restart. They belong to the Flower run, unless you name an `experiment`: then later runs of
    that name use them, too.

    Numbers that are not finite (NaN, infinity) are never saved. `fedala.ALA.initialize` says what
    happens in such a round. A trained model that is not finite does not replace the client's last
    one. The log says so, and so does the metric `ala-fault`, which every reply has: 1 in such a
    round, else 0. In the legacy API it is in `FitRes.metrics`.
    """
    return ALAMod(setup, experiment, split, names, settings)


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
