"""Two apps do not take each other's files, and no file holds a secret."""

import ssl
import tomllib

import pytest
import torch
from typer.testing import CliRunner

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import CUSTOM, RUN, InProcessGrid  # noqa: E402
from torch import nn  # noqa: E402

from fedala import UserError  # noqa: E402
from fedala.cli.app import app  # noqa: E402
from fedala.flower import CustomApp, client_app  # noqa: E402
from fedala.flower.client_store import ClientStore  # noqa: E402
from fedala.flower.demo import share_cores  # noqa: E402
from fedala.flower.experiment import read_run_config, set_threads  # noqa: E402
from fedala.flower.local import make_certificates  # noqa: E402
from fedala.flower.new import choose_deployment  # noqa: E402
from fedala.flower.server import serve  # noqa: E402
from fedala.io import tensor_files  # noqa: E402
from fedala.io.files import DamagedFile  # noqa: E402
from fedala.runs.config import Config  # noqa: E402


def federate(folder, out, custom=CUSTOM, **options):
    """Run a federation of two clients that keep their states in one folder."""
    run_config = {
        "clients": 2, "out": str(folder / out), "start_timeout": 0.1, **RUN, "rounds": 1, **options,
    }  # fmt: skip
    grid = InProcessGrid(client_app(custom), 2, folder / "state", run_config)
    return serve(grid, run_config, custom)


def read_states(folder):
    return {path: path.read_bytes() for path in (folder / "state").rglob("round-*")}


def make_other_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("options", "name", "what"),
    [
        ({"method": "ditto"}, "StatesOfAnotherMethod", "the states of fedala, and this run is of"),
        (
            {"custom": CustomApp(make_other_model, CUSTOM.data, CUSTOM.shape, CUSTOM.classes)},
            "StatesOfAnotherModel",
            "the states of another model",
        ),
    ],
    ids=["method", "model"],
)
def test_a_second_app_cannot_take_over_the_states_of_the_first(
    options, name, what, tmp_path, caplog
):
    """The node's log names the folder; the server learns the kind of the problem."""
    federate(tmp_path, "first", method="fedala")
    before = read_states(tmp_path)
    assert len(before) == 2
    with pytest.raises(UserError, match="0 clients are online"):
        federate(tmp_path, "second", **options)
    assert read_states(tmp_path) == before
    refusals = [line for line in caplog.messages if "Node 100 is refused" in line]
    assert f"{name}; the node's own log says why" in refusals[0]
    assert what in caplog.text
    federate(tmp_path, "second", experiment="second", **options)
    assert before.items() <= read_states(tmp_path).items()


def test_states_of_early_versions_name_no_model(tmp_path):
    store = ClientStore(tmp_path / "state", "fedala", "client-00000")
    store.save(1, {"local": {"w": torch.zeros(1)}}, method="fedala")
    federate(tmp_path, "runs", method="fedala")
    assert tensor_files.read_about(store.state_path(1))["method"] == "fedala"
    assert len(tensor_files.read_about(store.state_path(1))["model"]) == 16


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{}"])
def test_a_damaged_header_is_refused(content, tmp_path):
    path = tmp_path / "state.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"state\.safetensors"):
        tensor_files.read_about(path)


def new_app(folder, *arguments):
    done = CliRunner().invoke(app, ["flower", "new", str(folder), *arguments])
    assert done.exit_code == 0, done.output
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    table = project["tool"]["flwr"]["app"]["config"]
    del table["set"]
    return project["project"]["name"], read_run_config(table)


def test_a_new_app_has_an_experiment_of_its_own_and_waits_for_its_clients(tmp_path):
    name, (config, deployment) = new_app(tmp_path / "My App", "--clients", "3")
    assert deployment.experiment == name == "my-app"
    assert (config.clients, deployment.min_nodes, deployment.max_clients) == (3, 3, 0)
    quarter = choose_deployment(tmp_path / "b", Config(clients=20, join_ratio=0.25))
    assert (quarter.experiment, quarter.min_nodes) == ("b", 5)


@pytest.mark.parametrize("base", [None, "base"])
def test_a_relative_out_is_said_in_full(base, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "flwr")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDALA_RUNS", raising=False)
    if base:
        monkeypatch.setenv("FEDALA_RUNS", str(tmp_path / base))
    here = tmp_path / (base or "")
    run_config = {"clients": 2, "out": "runs", **RUN, "rounds": 1}
    grid = InProcessGrid(client_app(CUSTOM), 2, tmp_path / "state", run_config)
    assert serve(grid, run_config, CUSTOM).folder == here / "runs" / "fedala"
    assert f"out = runs is a folder in {here}, because" in caplog.text
    assert f"Writing the run to {here / 'runs' / 'fedala'}" in caplog.text


def test_no_file_of_a_run_holds_the_token_of_the_server_app(tmp_path, monkeypatch):
    """Flower starts a server app with `--token …`."""
    token = "Xy7secretTokenOfTheServerApp"
    monkeypatch.setattr("sys.argv", ["/opt/bin/flwr-serverapp", "--token", token, "--insecure"])
    monkeypatch.setenv("FLWR_TOKEN", token)
    folder = federate(tmp_path, "runs").folder
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if token.encode() in path.read_bytes()]
    assert '"command": "/opt/bin/flwr-serverapp"' in (folder / "summary.json").read_text()


def test_the_certificates_pass_strict_verification(tmp_path):
    """Python 3.13 verifies like this by default."""
    make_certificates(tmp_path)
    client = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    for name in ("localhost", "127.0.0.1"):
        a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
        one = client.wrap_bio(a, b, server_hostname=name)
        other = server.wrap_bio(b, a, server_side=True)
        for _ in range(4):
            for side in (one, other):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        assert one.getpeercert()["subject"] == ((("commonName", "localhost"),),)


def test_a_node_uses_the_threads_of_its_config(monkeypatch):
    used = []
    monkeypatch.setattr("torch.set_num_threads", used.append)
    set_threads({})
    set_threads({"threads": 3})
    assert used == [3]
    for wrong in (0, "2", True, 1.5):
        with pytest.raises(UserError, match="threads in the node config must be a whole number"):
            set_threads({"threads": wrong})


@pytest.mark.parametrize(("cores", "nodes", "threads"), [(8, 2, 4), (2, 3, 1), (7, 2, 3)])
def test_nodes_on_one_machine_share_its_cores(cores, nodes, threads, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert share_cores(nodes) == threads
