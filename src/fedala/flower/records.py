"""Models and figures as Flower carries them."""

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from fedala.cohort import Params
from fedala.errors import UserError


def to_record(params: Params) -> ArrayRecord:
    """One lane, without the lane: by name, what anybody's Flower app would send."""
    return ArrayRecord({name: value[0].contiguous() for name, value in params.items()})


def to_params(record: ArrayRecord, device: torch.device) -> Params:
    return {name: value.to(device).unsqueeze(0) for name, value in record.to_torch_state_dict().items()}


def check(upload: Params, expected: Params, sent: Params, max_norm: float) -> None:
    """Refuses an update that is not what the method uploads: other names, shapes or types, or no finite numbers.

    With a `max_norm`, also one that is further than that from the model that was sent.
    """
    if upload.keys() != expected.keys():
        strange = sorted(upload.keys() ^ expected.keys())[0]
        raise UserError(f"{strange} is {'missing' if strange in expected else 'not a part of the model'}")
    for name, value in upload.items():
        wanted = expected[name]
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise UserError(f"{name} is {_kind(value)}, and should be {_kind(wanted)}")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise UserError(f"{name} is not finite")
    if max_norm:
        moves = [(v - sent[n]).double().square().sum() for n, v in upload.items() if v.is_floating_point()]
        norm = float(torch.stack(moves).sum().sqrt()) if moves else 0.0
        if norm > max_norm:
            raise UserError(f"it is {norm:.3g} away from what was sent, and max_norm is {max_norm:g}")


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape[1:])}"
