"""Apps that send a part of their model run in Flower's simulation engine as in this process."""

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import InProcessGrid  # noqa: E402
from flower.test_deployment import simulate  # noqa: E402, F401
from flwr.app import Context, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

SHAPES = Path(__file__).parent / "shapes"


class RememberingGrid(InProcessGrid):
    """Nodes whose contexts last for the run, as in Flower."""

    def __init__(self, app, nodes, folder):
        super().__init__(app, nodes, folder)
        self.contexts = {
            node: Context(1, node, dict(config), RecordDict(), {})
            for node, config in self.node_configs.items()
        }

    def _handle(self, message):
        return self.app(message, self.contexts[message.metadata.dst_node_id])


@pytest.fixture(scope="module")
def shapes():
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("shapes_app", SHAPES / "app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differ(a, b):
    return any(not torch.allclose(a[name], b[name], rtol=0, atol=1e-4) for name in a)


@pytest.mark.deployment
@pytest.mark.parametrize("shape", ["body", "adapter"])
def test_the_simulation_engine_runs_it_as_this_process_does(
    shapes,
    simulate,  # noqa: F811
    tmp_path,
    shape,
):
    app, out = tmp_path / "app", tmp_path / "result.safetensors"
    shutil.copytree(SHAPES, app, ignore=shutil.ignore_patterns("__pycache__"))
    project = (app / "pyproject.toml").read_text()
    (app / "pyproject.toml").write_text(project.replace("app:body", f"app:{shape}"))
    log = simulate(app, {"shape": f"'{shape}'", "out": f"'{out}'"})
    assert out.exists(), log
    there = load_file(out)

    client = getattr(shapes, shape)
    here = shapes.run(RememberingGrid(client, 2, tmp_path / "states"), shape, 3)
    assert set(there) == set(here)
    for name, value in here.items():
        torch.testing.assert_close(there[name], value, rtol=0, atol=1e-5)

    plain = ClientApp()
    plain.train()(getattr(shapes, f"train_{shape}"))
    assert differ(here, shapes.run(RememberingGrid(plain, 2, tmp_path / "plain"), shape, 3))
