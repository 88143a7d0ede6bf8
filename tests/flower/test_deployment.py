"""Real Flower: a SuperLink and SuperNodes in their own processes, with TLS and authentication.

They run tests/flower/deployed/app.py. The first test always runs; the others take minutes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.hostile import OVER_TLS  # noqa: E402
from flower.inprocess import CUSTOM, RUN, InProcessGrid, build_federation  # noqa: E402
from flower.test_processes import find_marked  # noqa: E402
from small import Net, assert_close  # noqa: E402

import fedala  # noqa: E402
from fedala.flower import client_app, load_personal  # noqa: E402
from fedala.flower.demo import follow_run  # noqa: E402
from fedala.flower.local import LocalFederation, make_certificates, make_key  # noqa: E402
from fedala.flower.processes import find_family  # noqa: E402
from fedala.flower.server import serve  # noqa: E402
from fedala.flower.stored_states import list_states  # noqa: E402
from fedala.io import tensor_files  # noqa: E402
from fedala.runs.folder import RunFolder  # noqa: E402

HERE = Path(__file__).parent
APP = HERE / "deployed"


@pytest.fixture
def federation(tmp_path):
    paths = [HERE.parents[1] / "src", HERE.parent]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    with LocalFederation(tmp_path / "federation", environment=environment) as federation:
        yield federation
    assert not [
        pid for name in federation.processes for pid in find_family(f"{federation.folder}/{name}")
    ]


def submit(federation, tmp_path, **options):
    return federation.submit(
        APP, **{"out": str(tmp_path / "runs"), "clients": 2, "min_nodes": 2, **RUN, **options}
    )


def finish(federation, run, tmp_path, seconds=600):
    folder = RunFolder(tmp_path / "runs" / "fedala")
    return read_history(follow_run(federation, run, folder, seconds=seconds))


def read_history(folder):
    """Return the rows of the folder's only method."""
    [rows] = folder.history().values()
    return rows


def run_simulation(clients=2, **options):
    return fedala.run(dataset=build_federation(clients), model=Net, lanes="1", **{**RUN, **options})


def assert_same_rows(there, here):
    assert [row.round for row in there] == [row.round for row in here]
    for a, b in zip(there, here, strict=True):
        for key in ("accuracy", "loss", "accuracy_joined", "sent", "uploaded"):
            value, wanted = getattr(a, key), getattr(b, key)
            assert value == pytest.approx(wanted, rel=1e-5), f"{key} of round {b.round}"


def assert_same_models(federation, tmp_path, result):
    folder = RunFolder(tmp_path / "runs" / "fedala")
    method, seed = next(iter(result.methods)), RUN["seed"]
    for (_, client), model in result.models.items():
        if client is None:
            assert_close(folder.model(method, seed), model, 1e-5)
        else:
            path = (
                federation.folder
                / f"node-{client}"
                / "fedala"
                / f"client-{client:05d}"
                / "model.safetensors"
            )
            assert_close(load_file(path), model, 1e-5)


def test_a_federation_with_tls_equals_the_simulation_and_refuses_strangers(federation, tmp_path):
    """Two registered nodes run FedALA. A third has another key, a fourth another authority.

    In the last evaluation, ALA starts from what each client saved in the round, in another process.
    """
    (tmp_path / "other").mkdir()
    make_certificates(tmp_path / "other")
    for client in range(2):
        federation.start_node(client)
    federation.start_node(7, key=make_key(tmp_path / "unregistered"))
    federation.start_node(8, key=make_key(tmp_path / "ignorant"), ca=tmp_path / "other" / "ca.crt")
    run = submit(federation, tmp_path, method="fedala", rounds=1)
    history = finish(federation, run, tmp_path, 240)
    result = run_simulation(method="fedala", rounds=1)
    assert_same_rows(history, result.history)
    assert_same_models(federation, tmp_path, result)
    superlink = federation.read_log("superlink")
    assert superlink.count("[Fleet.ActivateNode] Activated") == 2
    for stranger in (7, 8):
        assert "Receiving: train message" not in federation.read_log(f"node-{stranger}")
    assert "Receiving: train message" in federation.read_log("node-0")


@pytest.mark.deployment
@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedrep", "fedfomo"])
def test_a_deployment_equals_the_simulation(method, federation, tmp_path):
    for client in range(2):
        federation.start_node(client)
    history = finish(federation, submit(federation, tmp_path, method=method), tmp_path)
    result = run_simulation(method=method)
    assert_same_rows(history, result.history)
    assert_same_models(federation, tmp_path, result)


def load_state(folder, client, round):
    tree, _ = tensor_files.load(
        folder / "fedala" / f"client-{client:05d}" / f"round-{round:06d}.safetensors"
    )
    return tree


def assert_same_states(a, b):
    for name in a["ala"]["weights"]:
        torch.testing.assert_close(
            a["ala"]["weights"][name], b["ala"]["weights"][name], rtol=0, atol=1e-5
        )
    assert_close(a["local"], b["local"], 1e-5)


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition is still false"
        time.sleep(0.2)


def run_in_this_process(tmp_path, absent=(), **options):
    """Run the same federation here. `absent` clients, (round, client), get no message."""
    waits = {"clients": 2, "min_nodes": 2, "round_timeout": 0.01}
    run_config = {**waits, "out": str(tmp_path / "here" / "runs"), **RUN, **options}
    grid = InProcessGrid(client_app(CUSTOM), 2, tmp_path / "here" / "state", run_config)
    grid.delivers = lambda sent: (
        (int(sent.metadata.group_id or 0), sent.metadata.dst_node_id - 100) not in absent
    )
    return serve(grid, run_config, CUSTOM)


@pytest.mark.deployment
def test_a_killed_node_keeps_its_state(federation, tmp_path):
    """`kill -9` in round 2. The restart waits until the SuperLink has given the node up."""
    for client in range(2):
        federation.start_node(client)
    run = submit(federation, tmp_path, method="fedala", rounds=4)
    wait_for(lambda: federation.read_log("node-1").count("Receiving: train message") == 2)
    federation.kill("node-1")
    time.sleep(75)
    federation.start_node(1)
    history = finish(federation, run, tmp_path)
    log = federation.read_run_log(run)
    assert re.search(r"Round 2: client 1 \(node \d+\) failed", log)
    result = run_in_this_process(tmp_path, absent={(2, 1)}, method="fedala", rounds=4)
    assert_same_rows(history, result.history)
    for client in range(2):
        there = load_state(federation.folder / f"node-{client}", client, 4)
        assert_same_states(there, load_state(tmp_path / "here" / "state", client, 4))


@pytest.mark.deployment
def test_a_killed_server_continues_at_the_next_round(federation, tmp_path):
    for client in range(2):
        federation.start_node(client)
    submit(federation, tmp_path, method="fedala", rounds=4)
    wait_for(lambda: list((tmp_path / "runs" / "fedala" / "checkpoint").rglob("0000002.json")))
    federation.kill("superlink")
    federation.start_superlink()
    run = submit(federation, tmp_path, method="fedala", rounds=4)
    rows = finish(federation, run, tmp_path)
    result = run_simulation(method="fedala", rounds=4)
    assert_same_rows(rows, result.history)
    assert_same_models(federation, tmp_path, result)
    assert set(re.findall(rf"RUN {run}, ROUND (\d)", federation.read_log("node-0"))) == {
        "3",
        "4",
        "5",
    }


@pytest.mark.deployment
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nan", "is not finite"),
        ("shape", "but should be float32"),
        ("huge", "away from the model that was sent"),
    ],
)
def test_a_poisoned_update_is_dropped_and_named(how, message, federation, tmp_path):
    federation.start_node(0)
    federation.start_node(1, poison=how)
    run = submit(federation, tmp_path, method="fedala", rounds=1, max_norm=100.0)
    finish(federation, run, tmp_path)
    log = federation.read_run_log(run)
    [line] = [line for line in log.splitlines() if "is dropped" in line]
    assert "Round 1: the update of client 1 (node" in line
    assert message in line


@pytest.mark.deployment
def test_bad_replies_over_tls_cost_only_their_own_update(federation, tmp_path):
    """Every round has another kind. A good round follows, and a resumed run adds one more."""
    federation.start_node(0)
    federation.start_node(1, hostile=True)
    rounds = len(OVER_TLS) + 1
    run = submit(federation, tmp_path, method="fedala", rounds=rounds)
    history = finish(federation, run, tmp_path)
    colours = r"\x1b\[[0-9;]*m(WARNING|INFO|ERROR) ?\x1b\[0m"  # of Flower itself
    log = re.sub(colours, r"\1", federation.read_run_log(run))
    for round, (_, message) in enumerate(OVER_TLS, 1):
        [line] = [
            line
            for line in log.splitlines()
            if f"Round {round}: " in line and "client 1 (node " in line
        ]
        assert message in line
        assert line.isprintable()
        assert len(line) < 600
    absent = {(round, 1) for round in range(1, rounds)}
    assert_same_rows(
        history, run_in_this_process(tmp_path, absent, method="fedala", rounds=rounds).history
    )
    (tmp_path / "runs" / "fedala" / "summary.json").unlink()
    again = finish(
        federation, submit(federation, tmp_path, method="fedala", rounds=rounds + 1), tmp_path
    )
    assert len(again) == rounds + 2


@pytest.mark.deployment
def test_a_client_survives_a_damaged_state_file(federation, tmp_path):
    for client in range(2):
        federation.start_node(client)
    run = submit(federation, tmp_path, method="fedala", rounds=3)
    first = federation.folder / "node-1" / "fedala" / "client-00001" / "round-000001.safetensors"
    wait_for(first.exists)
    data = bytearray(first.read_bytes())
    data[-7] ^= 64
    first.write_bytes(data)
    assert len(finish(federation, run, tmp_path)) == 4
    assert "Round 2: client 1 had LOST its state and started over." in federation.read_run_log(run)
    assert "The damaged file is now" in federation.read_log("node-1")


@pytest.fixture
def simulate(tmp_path):
    """Return a function that runs an app by `flwr run`, with Ray instead of SuperNodes."""
    pytest.importorskip(
        "ray", reason="Ray is not installed: pip install 'fedala[flower-simulation]'"
    )
    from fedala.flower.local import OFFLINE_ENVIRONMENT, find_free_port, find_program

    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n\n[superlink.local]\noptions.num-supernodes = 2\n'
        "options.backend.client-resources.num-cpus = 1\n"
    )
    paths = os.pathsep.join(map(str, [HERE.parents[1] / "src", HERE.parent]))
    common = {**os.environ, **OFFLINE_ENVIRONMENT, "FLWR_HOME": str(home)}
    common |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    common |= {"XDG_STATE_HOME": str(tmp_path / "state"), "FEDALA_FEDERATION": f"{tmp_path}/engine"}
    # On the usual port, a SuperLink of somebody else may answer, with another copy of fedala.
    common["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"] = str(find_free_port())
    common["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    def run(app, run_config, **environment):
        values = {"out": f"'{tmp_path}/runs'", **run_config}
        overrides = " ".join(f"{key}={value}" for key, value in values.items())
        command = [
            find_program("flwr"),
            "run",
            str(app),
            "local",
            "--stream",
            "--run-config",
            overrides,
        ]
        whole = common | environment
        done = subprocess.run(command, env=whole, capture_output=True, text=True, timeout=300)
        return done.stdout + done.stderr

    try:
        yield run
    finally:
        for pid in find_family(f"{tmp_path}/engine"):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.deployment
def test_flowers_simulation_engine_equals_the_simulation(simulate, tmp_path):
    for method in ("fedavg", "fedala", "ditto", "fedrep", "fedfomo"):
        names = {"method": f"'{method}'", "experiment": f"'{method}'"}
        log = simulate(APP, {**RUN, "clients": 2, **names})
        folder = RunFolder(tmp_path / "runs" / method)
        assert (folder.path / "summary.json").exists(), log
        assert_same_rows(read_history(folder), run_simulation(method=method).history)


@pytest.mark.deployment
def test_flowers_own_history_shows_the_accuracy_of_personal_models(simulate, tmp_path):
    """And the simulation keeps states in the folder that the run config names."""
    out, folder = tmp_path / "history.json", tmp_path / "clients"
    log = simulate(HERE / "ala_digits", {"out": f"'{out}'", "state-dir": f"'{folder}'"})
    assert out.exists(), log
    history = json.loads(out.read_text())
    personal, everyone = (history[key]["4"]["accuracy"] for key in ("clients", "global"))
    assert personal > everyone + 0.2
    for phase in ("clients", "train"):
        assert {round["ala-lost"] for round in history[phase].values()} == {0}
    assert [history["train"][str(round)]["ala-new"] for round in range(1, 5)] == [1, 0, 0, 0]
    assert {state.client for state in list_states(folder)} == {"client-00000", "client-00001"}
    assert all(state.round == 4 and state.belongs_to_run for state in list_states(folder))
    assert set(load_personal(client=1, state_dir=folder)) >= {"0.weight", "2.bias"}


#: Flower's default, which installs the dependencies of an app, but without an index.
INSTALLING = {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "0", "UV_OFFLINE": "1"}


@pytest.fixture
def app_folder(tmp_path):
    """Write an app folder with `fedala flower new`."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [sys.executable, "-m", "fedala.cli.app", "flower", "new", str(tmp_path / "my-app")]
    subprocess.run([*command, "--clients", "2", "--rounds", "1"], env=environment, check=True)
    return tmp_path / "my-app"


@pytest.mark.deployment
def test_the_simulation_engine_runs_a_generated_app(simulate, app_folder, tmp_path):
    log = simulate(app_folder, {}, **INSTALLING)
    assert "App dependencies installed successfully" in log
    assert (tmp_path / "runs" / "my-app" / "summary.json").exists(), log


@pytest.mark.deployment
def test_a_superlink_runs_a_generated_app(app_folder, tmp_path):
    environment = {"PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1", **INSTALLING}
    with LocalFederation(tmp_path / "federation", environment=environment) as federation:
        for client in range(2):
            federation.start_node(client)
        run = federation.submit(app_folder)
        folder = RunFolder(federation.folder / "runs" / "my-app")
        history = read_history(follow_run(federation, run, folder, seconds=240))
        assert [row.round for row in history] == [0, 1]
        assert "App dependencies installed successfully" in federation.read_run_log(run)


#: A shell's background jobs ignore Ctrl-C, and those of nohup SIGHUP: this restores what is usual.
DEMO = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from fedala.__main__ import main
main()
"""


@pytest.mark.deployment
@pytest.mark.parametrize(
    ("signals", "moment", "delay"),
    [
        ("INT", "is submitted", 5),
        ("TERM", "is submitted", 5),
        ("HUP", "is submitted", 5),
        ("KILL", "is submitted", 5),
        ("INT INT", "is submitted", 0),
        ("TERM TERM", "is submitted", 5),
        ("TERM TERM", "SuperNode of client 0", 0.5),
        ("INT INT INT INT INT", "SuperNode of client 1", 0),
        ("HUP TERM", "SuperLink on", 0),
        ("TERM KILL", "SuperLink on", 0.5),
    ],
)
def test_an_interrupted_demo_leaves_nothing_behind(signals, moment, delay, tmp_path):
    """Neither a process nor a file, such as a private key. Signals come 0.2 s apart."""
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(HERE.parents[1] / "src"),
    }
    environment["FEDALA_TEST"] = str(tmp_path)
    command = [sys.executable, "-c", DEMO, "flower", "demo"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as demo:
        assert any(moment in line for line in demo.stderr)
        time.sleep(delay)
        assert list(tmp_path.glob("fedala-demo-*/**/server.key"))
        assert len(find_marked(tmp_path)) > 2
        for name in signals.split():
            demo.send_signal(signal.Signals[f"SIG{name}"])
            time.sleep(0.2)
        assert demo.wait(60) == (-signal.SIGKILL if "KILL" in signals else 130)
    wait_for(lambda: not find_marked(tmp_path), 10)
    wait_for(lambda: not list(tmp_path.iterdir()), 2)
