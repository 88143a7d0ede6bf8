"""Build a model that holds saved weights."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from fedala.data.preprocessing import Preprocessing
from fedala.errors import UserError, first_line, printable
from fedala.io.untrusted import check_memory, read_file, require_file
from fedala.models import MODELS, build_model
from fedala.options import name_option
from fedala.runs.config import Config
from fedala.runs.model_trial import MakeModel, make_skeleton


@dataclass(frozen=True)
class Shapes:
    """What `build_model` asks of a dataset, without the dataset."""

    name: str
    x: Tensor
    """One sample without content."""
    classes: int
    vocabulary: int | None

    @classmethod
    def of(cls, name: str, preprocessing: Preprocessing) -> "Shapes":
        dtype: torch.dtype = getattr(torch, preprocessing.dtype)
        x = torch.empty(1, *preprocessing.shape, dtype=dtype, device="meta")
        return cls(name, x, preprocessing.classes, preprocessing.vocabulary)


@dataclass(frozen=True)
class ModelBuilder:
    """Builds the models of a run."""

    make: MakeModel
    is_own: bool
    dtype: torch.dtype
    where: str
    """The run folder, for messages."""
    extend: Callable[[nn.Module, Collection[str]], nn.Module] = lambda model, names: model
    """Adds what the method of the run has added, if the names of the saved tensors show it."""

    @classmethod
    def of(
        cls, config: Config, preprocessing: Preprocessing, own: MakeModel | None, where: str
    ) -> "ModelBuilder":
        """Return the builder for the model that a config names, or for the user's own."""
        name = str(config.model)
        if own is None and name not in MODELS:
            raise UserError(
                f"{where} was made with a model of its own, a Python function: give it again, as "
                f"in {name_option('model', 'net.py:make')}."
            )
        if own is not None and name in MODELS:
            raise UserError(
                f"{where} was made with the model {name}, which is built from its name: "
                "leave out model."
            )
        shapes = Shapes.of(config.dataset, preprocessing)
        dtype: torch.dtype = getattr(torch, preprocessing.precision)
        return cls(own or (lambda: build_model(name, shapes)), own is not None, dtype, where)

    def build_skeleton(self, names: Collection[str]) -> nn.Module:
        """Build the model that has saved tensors of these names, for its structure alone."""
        return make_skeleton(lambda: self.extend(self.make(), names), is_own=self.is_own)

    def build(self, saved: Mapping[str, Tensor]) -> nn.Module:
        """Build a model with saved weights, in evaluation mode."""
        model = self.build_skeleton(saved)
        if not self.is_own:
            model = model.to_empty(device="cpu")
        model = model.to("cpu", self.dtype)
        held = _list_tensors(model)
        with torch.no_grad():
            for name, value in saved.items():
                held[name].copy_(value)
        return model.eval()

    def check(self, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
        """Refuse weights that are not those of this model. Transient buffers are not saved."""
        held, needed = _list_tensors(model), list_saved_names(model)
        what = "the model that was given" if self.is_own else "the model"
        for name in sorted(saved.keys() ^ needed):
            verb = "has no" if name in saved else "also has"
            raise UserError(
                f"The saved weights are not those of {what}: it {verb} {printable(name, 100)}. "
                f"The model of {self.where} must be built as it was for the run."
            )
        for name, value in sorted(saved.items()):
            if value.shape != held[name].shape:
                raise UserError(
                    f"The saved weights are not those of {what}: its {printable(name, 100)} has "
                    f"the shape {tuple(held[name].shape)}, and the saved one "
                    f"{tuple(value.shape)}."
                )


def _list_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def list_saved_names(model: nn.Module) -> set[str]:
    """Return the names of the tensors that a run saves."""
    return set(_list_tensors(model).keys() & model.state_dict().keys())


def read_weights(path: Path) -> tuple[dict[str, Tensor], str]:
    """Read the weights in a .safetensors file, and whose they are."""
    try:
        size = require_file(path).stat().st_size
        check_memory(2 * size, str(path))
        data = read_file(path, size)
        weights: dict[str, Tensor] = load_tensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = header.get("__metadata__") or {}
    except (UserError, MemoryError):
        raise
    except OSError:
        raise UserError(f"{path} cannot be read: there must be such a file.") from None
    except Exception as error:  # a damaged file can raise almost any kind of error
        raise UserError(f"{path} is not a .safetensors file ({first_line(error)}).") from None
    return weights, printable(about.get("client") or path.stem, 100)
