"""Privacy mods in real Flower processes, and how Flower ends a run that learned nothing."""

import shutil
import time

import pytest

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import CUSTOM, RUN, InProcessGrid  # noqa: E402
from flower.test_deployment import (  # noqa: E402
    APP,
    assert_same_rows,
    federation,  # noqa: F401
    finish,
    run_simulation,
    simulate,  # noqa: F401
    submit,
)
from flwr.clientapp.mod import fixedclipping_mod  # noqa: E402

from fedala.flower import client_app  # noqa: E402
from fedala.flower.server import serve  # noqa: E402

APP_TEXT = """
from flower.inprocess import CUSTOM
from {module} import {mod}

from fedala.flower import client_app, server_app

client = client_app(CUSTOM, mods=[{mod}])
server = server_app(CUSTOM)
"""


def write_app(folder, module, mod):
    shutil.copytree(APP, folder)
    (folder / "app.py").write_text(APP_TEXT.format(module=module, mod=mod), encoding="utf-8")
    return folder


def wait_for_end(federation, run, seconds=120):  # noqa: F811
    end = time.monotonic() + seconds
    while not (status := federation.read_status(run)).startswith("finished"):
        assert time.monotonic() < end, federation.read_run_log(run)
        time.sleep(1)
    return status


@pytest.mark.deployment
def test_privacy_mods_on_a_superlink(federation, tmp_path):  # noqa: F811
    """One run clips. One has secure aggregation. One gets only updates that it must drop."""
    for client in range(2):
        federation.start_node(client, poison="nan")
    bound = 0.5
    clips = {"method": "fedala", "rounds": 2, "clipping_norm": bound, "max_norm": bound * 1.0001}
    app = write_app(tmp_path / "clipping", "flwr.clientapp.mod", "fixedclipping_mod")
    options = {"clients": 2, "min_nodes": 2, "out": str(tmp_path / "runs")}
    run = federation.submit(app, **options, **{**RUN, **clips})
    history = finish(federation, run, tmp_path)
    assert wait_for_end(federation, run) == "finished:completed"
    assert "is dropped" not in federation.read_run_log(run)
    here = {**options, **RUN, **clips, "out": str(tmp_path / "here")}
    grid = InProcessGrid(client_app(CUSTOM, [fixedclipping_mod]), 2, tmp_path / "state", here)
    assert_same_rows(history, serve(grid, here, CUSTOM).history)
    unclipped = run_simulation(method="fedala", rounds=2).history
    assert abs(unclipped[-1].loss - history[-1].loss) > 0.01

    app = write_app(tmp_path / "secure", "flwr.client.mod", "secaggplus_mod")
    run = federation.submit(app, **options, **RUN, experiment="secure")
    assert wait_for_end(federation, run) == "finished:failed"
    assert "secaggplus_mod does not work with fedala's server" in federation.read_run_log(run)

    run = submit(federation, tmp_path, method="fedala", rounds=1, experiment="poisoned")
    assert wait_for_end(federation, run) == "finished:failed"
    log = federation.read_run_log(run)
    assert "No update has counted in 1 rounds" in log
    assert "the commonest reason is: out.bias is not finite" in log


@pytest.mark.deployment
def test_a_simulation_whose_nodes_are_all_refused_ends_at_once(simulate, tmp_path):  # noqa: F811
    """It does not wait `start_timeout` for nodes that cannot come."""
    app = write_app(tmp_path / "clipping", "flwr.clientapp.mod", "fixedclipping_mod")
    began = time.monotonic()
    log = simulate(app, {**RUN, "clients": 2})
    assert time.monotonic() - began < 200
    assert "0 clients are online, but 2 are required, and no further nodes can connect" in log, log
    assert "the commonest reason is: fixedclipping_mod needs a bound: set clipping_norm" in log
