"""Write a model for use without this package: weights, a torch program, or ONNX.

A program takes raw samples, so that whoever runs it need not know how to scale them: bytes of
images, unscaled features, or token ids of texts. It returns the model's outputs: scores of classes,
logits of labels, or numbers. Any number of samples can be given at a time.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as pack_tensors
from torch import Tensor, nn

from fedala.data.preprocessing import Preprocessing
from fedala.errors import UserError, first_line, import_optional
from fedala.io.files import write_output
from fedala.lanes.normalization import Normalization, normalize_bytes, normalize_floats
from fedala.runs.outputs import check_output

#: Where a program's description is: an extra file of a .pt2, or a property of an .onnx file.
ABOUT = "fedala.json"
_TOLERANCE = 1e-4  # of the outputs' norm


class RawProgram(nn.Module):
    """A model that takes raw samples."""

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model = model
        self.dtype: torch.dtype = getattr(torch, preprocessing.precision)
        self.kind = preprocessing.kind
        self.has_bytes = preprocessing.dtype == "uint8"
        self.is_scaled = preprocessing.normalization is not None
        figures = preprocessing.normalization or Normalization()
        shape = len(preprocessing.shape)
        self.mean, self.std = figures.figures(torch.device("cpu"), self.dtype, shape)

    def forward(self, samples: Tensor) -> Any:
        if self.has_bytes:
            samples = normalize_bytes(samples, self.dtype, self.mean, self.std)
        elif self.is_scaled:
            samples = normalize_floats(samples, self.dtype, self.mean, self.std)
        elif self.kind != "texts":
            samples = samples.to(self.dtype)
        return self.model(samples)


def export_model(
    path: Path, model: nn.Module, preprocessing: Preprocessing, about: Mapping[str, Any]
) -> Path:
    """Write a model in the format of the path's ending; `about` says whose it is."""
    write = choose_format(path)
    data = write(model, preprocessing, preprocessing.metadata(about))
    write_output(path, data)
    return path


Pack = Callable[[nn.Module, Preprocessing, dict[str, str]], bytes]


def choose_format(path: Path, reads: Iterable[Any] = (), *, force: bool = True) -> Pack:
    """Return what packs a model in the format of the path's ending, after `check_output`."""
    formats: dict[str, Pack] = {
        ".safetensors": _pack_weights,
        ".pt2": _pack_program,
        ".onnx": _pack_onnx,
    }
    check_output(path, formats, reads, force=force)
    if path.suffix.lower() == ".onnx":
        for module in ("onnx", "onnxscript"):
            import_optional(module, "onnx and onnxscript", "onnx", "Exporting to ONNX")
    return formats[path.suffix.lower()]


def _pack_weights(
    model: nn.Module, preprocessing: Preprocessing, metadata: dict[str, str]
) -> bytes:
    """Pack the state dict, for `safetensors.torch.load_file`."""
    # A tensor with two names is stored under both: the format has no views.
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    data: bytes = pack_tensors(tensors, {"format": "pt", **metadata})
    return data


def _pack_program(
    model: nn.Module, preprocessing: Preprocessing, metadata: dict[str, str]
) -> bytes:
    program = RawProgram(model, preprocessing).eval()
    samples = make_samples(preprocessing, 3)
    with _explain_failure("torch.export"), torch.no_grad():
        exported = torch.export.export(program, (samples[:2],), dynamic_shapes=(_batch(),))
        _compare(exported.module(), program, samples)
        file = BytesIO()
        torch.export.save(exported, file, extra_files={ABOUT: json.dumps(metadata)})
    return file.getvalue()


def _pack_onnx(model: nn.Module, preprocessing: Preprocessing, metadata: dict[str, str]) -> bytes:
    import onnx

    program = RawProgram(model, preprocessing).eval()
    with _explain_failure("torch.onnx"), torch.no_grad():
        exported = torch.onnx.export(
            program,
            (make_samples(preprocessing, 2),),
            dynamo=True,
            dynamic_shapes=(_batch(),),
            input_names=["samples"],
            output_names=["outputs"],
            verbose=False,
        )
        assert exported is not None
        proto = exported.model_proto
        onnx.helper.set_model_props(proto, metadata)
        data: bytes = proto.SerializeToString()
    return data


def _batch() -> dict[int, Any]:
    """Return the shape of a program's input: its first dimension is any number of samples."""
    return {0: torch.export.Dim("batch")}


def make_samples(preprocessing: Preprocessing, count: int) -> Tensor:
    """Return made-up raw samples, always the same."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, *preprocessing.shape)
    if preprocessing.dtype == "float32":
        return torch.randn(shape, generator=generator)
    dtype: torch.dtype = getattr(torch, preprocessing.dtype)
    end = preprocessing.vocabulary if preprocessing.kind == "texts" else 256
    return torch.randint(0, end or 1, shape, generator=generator).to(dtype)


def _compare(exported: Callable[[Tensor], Any], program: nn.Module, samples: Tensor) -> None:
    """Raise a RuntimeError if a program's outputs are not those of the model."""
    for count in (1, len(samples)):
        found, wanted = exported(samples[:count]), program(samples[:count])
        if not torch.dist(found, wanted) <= _TOLERANCE * wanted.norm():
            raise RuntimeError("its outputs are not those of the model")


@contextmanager
def _explain_failure(exporter: str) -> Iterator[None]:
    """Turn whatever an exporter raises into a sentence, and keep its other messages quiet."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # an exporter meets all that a user's model may do
        raise UserError(
            f"{exporter} cannot turn this model into a program ({first_line(error)}): "
            "export its weights as .safetensors instead."
        ) from error
    finally:
        logger.setLevel(level)
