"""Exported models give the outputs of those that they were made of, from raw samples."""

import io
import json
import warnings

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from trained.worlds import NAMES, PIXELS, images, linear, run

from fedala import UserError, load
from fedala.data.preprocessing import Preprocessing
from fedala.lanes.normalization import Normalization
from fedala.models import cnn, cnn1d, fasttext, lstm, mlp, resnet18
from fedala.trained.export import ABOUT, export_model, make_samples

COLOUR = Normalization((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
FIVE = Normalization((1.0, 2.0, 3.0, 4.0, 5.0), (1.0, 0.5, 2.0, 1.0, 3.0))
#: Each model that can be exported, and what it is fed.
MODELS = {
    "cnn": (lambda: cnn((1, 16, 16), 4), ("images", (1, 16, 16), "uint8"), None),
    "resnet18": (lambda: resnet18((3, 32, 32), 4), ("images", (3, 32, 32), "uint8"), COLOUR),
    "fasttext": (lambda: fasttext(50, 4), ("texts", (9,), "int32"), None),
    "mlp": (lambda: mlp(5, 4), ("features", (5,), "float32"), FIVE),
    "cnn1d": (lambda: cnn1d((3, 12), 4), ("features", (3, 12), "float32"), None),
    "lstm": (lambda: lstm(3, 4), ("features", (6, 3), "float32"), None),
    "own": (linear(4), ("features", (5,), "float32"), FIVE),
}


def prepare(name):
    make, (kind, shape, dtype), normalization = MODELS[name]
    options = {"precision": "float64"} if name == "own" else {}
    about = Preprocessing(
        kind, shape, dtype, "classes", 4, normalization, NAMES, (),
        50 if kind == "texts" else None, **options
    )  # fmt: skip
    torch.manual_seed(0)
    model = make().to(getattr(torch, about.precision)).eval()
    return model, about


def outputs(model, about, samples):
    with torch.no_grad():
        return model(about.prepare(samples.numpy())).numpy()


@pytest.mark.parametrize("name", MODELS)
def test_a_torch_program_gives_the_models_outputs(name, tmp_path):
    model, about = prepare(name)
    path = export_model(tmp_path / "model.pt2", model, about, {"client": 7})
    extra = {ABOUT: ""}
    program = torch.export.load(path, extra_files=extra).module()
    for count in (1, 2, 7):
        samples = make_samples(about, count)
        found = program(samples).detach().numpy()
        assert np.abs(found - outputs(model, about, samples)).max() < 1e-6
    metadata = json.loads(extra[ABOUT])
    assert json.loads(metadata["class_names"]) == list(NAMES)
    assert Preprocessing.from_json(metadata["preprocessing"]) == about


@pytest.mark.parametrize("name", ["fasttext", "own"])
def test_an_onnx_program_gives_the_models_outputs(name, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    model, about = prepare(name)
    path = export_model(tmp_path / "model.onnx", model, about, {"client": 7})
    proto = onnx.load_model(path)
    evaluator = ReferenceEvaluator(proto)
    for count in (1, 5):
        samples = make_samples(about, count)
        [found] = evaluator.run(["outputs"], {"samples": samples.numpy()})
        assert np.abs(found - outputs(model, about, samples)).max() < 1e-6
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    assert Preprocessing.from_json(metadata["preprocessing"]) == about
    assert metadata["client"] == "7"


def test_weights_have_what_one_needs_to_use_them(tmp_path):
    run(tmp_path / "run")
    trained = load(tmp_path / "run")
    path = trained.export(tmp_path / "model.safetensors", client=2)
    model = trained.personal(2)
    model.load_state_dict(load_file(path))
    for name, value in trained.personal(2).state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["class_names"]) == list(NAMES)
    assert (metadata["client"], metadata["method"], metadata["model"]) == ("2", "fedrep", "cnn")
    prepared = Preprocessing.from_json(metadata["preprocessing"]).prepare(PIXELS)
    assert torch.equal(prepared, trained.preprocessing.prepare(images().x))
    with pytest.raises(UserError, match="no whole global model"):
        trained.export(tmp_path / "global.safetensors", is_global=True)
    with pytest.raises(UserError, match="Each of the 3 clients has its own model"):
        trained.export(tmp_path / "global.safetensors")


class Picky(nn.Module):
    """A model whose program would depend on its samples."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 4)

    def forward(self, x):
        return self.out(x) if x.sum().item() > 0 else -self.out(x)


def test_a_model_that_cannot_be_a_program_is_refused_in_a_sentence(tmp_path):
    _, about = prepare("own")
    with pytest.raises(UserError, match=r"cannot turn this model.*\.safetensors"):
        export_model(tmp_path / "model.pt2", Picky(), about, {})
    assert list(tmp_path.iterdir()) == []


def test_paths_are_checked_before_anything_is_made(tmp_path, monkeypatch):
    model, about = prepare("own")
    (tmp_path / "folder.onnx").mkdir()
    for path, sentence in (
        (tmp_path / "model.pt", r"\.safetensors, \.pt2 or \.onnx"),
        (tmp_path / "nowhere" / "model.pt2", "folder must exist"),
        (tmp_path / "folder.onnx", "must be a file"),
    ):
        with pytest.raises(UserError, match=sentence):
            export_model(path, model, about, {})
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"fedala\[onnx\]"):
        export_model(tmp_path / "model.onnx", model, about, {})


def test_an_export_warns_of_nothing_and_is_written_whole(tmp_path, capfd):
    model, about = prepare("own")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_model(tmp_path / "model.pt2", model, about, {})
    assert capfd.readouterr().err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    assert torch.export.load(io.BytesIO((tmp_path / "model.pt2").read_bytes()))
