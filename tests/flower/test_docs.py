"""The commands and programs of docs/deployment.md and docs/flower-apps.md work."""

import os
import re
import shutil
import ssl
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

flwr = pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedala[flower]'")

from flower.inprocess import InProcessGrid, make_samples  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.common.config import validate_config  # noqa: E402
from flwr.supercore import object_ref  # noqa: E402
from small import Net  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from fedala.cli.app import app  # noqa: E402
from fedala.flower.client_store import ClientStore  # noqa: E402
from fedala.flower.experiment import read_run_config  # noqa: E402
from fedala.flower.server import serve  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
APPS_PAGE = (ROOT / "docs" / "flower-apps.md").read_text(encoding="utf-8")


def find_blocks(language, page=PAGE):
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")),
    reason="needs openssl and ssh-keygen",
)
def test_the_certificates_are_good(tmp_path):
    certificates, keys, *_ = find_blocks("sh")
    for script in (certificates, keys):
        subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True, capture_output=True)
    server, client = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.create_default_context(cafile=tmp_path / "ca.crt"),
    )
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    server.load_cert_chain(tmp_path / "superlink.crt", tmp_path / "superlink.key")
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(a, b, server_hostname="superlink.example")
    other = server.wrap_bio(b, a, server_side=True)
    for _ in range(4):
        for side in (one, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert one.getpeercert()["subject"] == ((("commonName", "superlink.example"),),)
    assert (tmp_path / "node.key.pub").read_text().startswith("ecdsa-sha2-nistp384 ")


def test_the_units_restart_nodes_after_the_minute_of_refusal():
    superlink, node = find_blocks("ini")
    assert int(re.search(r"RestartSec=(\d+)", node)[1]) > 60
    assert "--enable-supernode-auth" in superlink
    assert "flower-supernode" in node


def test_the_units_name_files_that_were_installed():
    """The commands of the page make the user and the files that each unit names."""
    *_, machine, superlink_files, node_files = find_blocks("sh")
    for unit, own_files in zip(find_blocks("ini"), (superlink_files, node_files), strict=True):
        user = re.search(r"^User=(.+)$", unit, re.MULTILINE)[1]
        assert re.search(rf"^useradd .* {user}$", machine, re.MULTILINE)
        assert f"StateDirectory={user}\n" in unit  # which is /var/lib/<its name>
        installed = set(re.findall(r"install .* (\S+) /etc/fedala/$", machine + own_files, re.M))
        assert set(re.findall(r"/etc/fedala/([\w.]+)", unit)) == installed
        for folder in re.findall(r"='(/srv/[^']+)'", unit):
            assert re.search(rf"^install -d .* {folder}$", own_files, re.MULTILINE)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path):
    units = []
    for name, unit in zip(("superlink", "supernode"), find_blocks("ini"), strict=True):
        units.append(tmp_path / f"flower-{name}.service")
        # systemd looks for the program, and this user exists everywhere.
        programs = str(Path(sys.executable).parent)
        units[-1].write_text(unit.replace("/opt/fedala/bin", programs).replace("=fedala", "=root"))
    command = ["systemd-analyze", "verify", "--recursive-errors=no", *map(str, units)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def has_components(folder):
    """Tell whether Flower finds the app's names in its text, which it reads before it runs it."""
    return all(
        object_ref.validate(f"app:{name}", project_dir=folder)[0] for name in ("client", "server")
    )


def test_the_python_of_the_page_runs(tmp_path):
    """Run the app with custom data and model for a round, and load the one with privacy mods."""
    custom, private = find_blocks("python")
    (tmp_path / "app.py").write_text(custom, encoding="utf-8")
    assert has_components(tmp_path)
    scope = {
        "make_model": Net,
        "read": lambda data: (make_samples(data).x, make_samples(data).y),
    }
    exec(custom.replace("(3, 32, 32)", "(1, 6, 6)").replace("classes=10", "classes=3"), scope)
    run_config = {
        "clients": 2,
        "rounds": 1,
        "method": "fedala",
        "out": str(tmp_path / "runs"),
        "lr": 0.1,
    }
    grid = InProcessGrid(scope["client"], 2, tmp_path, run_config)
    for node, config in grid.node_configs.items():
        config["data"] = node - 100
    assert len(serve(grid, run_config, scope["custom"]).history) == 2

    (tmp_path / "app.py").write_text(private, encoding="utf-8")
    assert has_components(tmp_path)
    exec(private, scope := {})
    assert len(scope["client"]._mods) == 1


def test_the_python_of_the_page_on_other_apps_runs(tmp_path):
    """Train a round with the mod, and load the client's model. The rest is in the example."""
    mod, personal = find_blocks("python", APPS_PAGE)
    samples = make_samples(0)
    scope = {"ClientApp": ClientApp, "make_model": Net, "model": Net()}
    exec(mod, scope | {"load_data": lambda context: (samples.x, samples.y)}, scope)
    assert scope["app"]._mods
    ClientStore(tmp_path, "ward", "client-00003").save(
        1, {"local": Net().state_dict(), "ala": {"round": torch.tensor(1)}}
    )
    exec(personal.replace("/var/lib/fedala", str(tmp_path)), scope)


def assert_installs_without_an_index(folder, tmp_path):
    """Check that Flower accepts the app, and that a SuperLink's `uv sync` needs no index."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    valid, errors, _ = validate_config(project, project_dir=folder)
    assert valid, errors
    copy = shutil.copytree(folder, tmp_path / "installed")
    uv = [sys.executable, "-m", "uv", "sync", "--python", sys.executable]
    command = [*uv, "--no-install-project", "--offline", "--no-cache"]
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(tmp_path / "env")}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_example_app_installs_without_an_index(tmp_path):
    assert_installs_without_an_index(ROOT / "examples" / "flower_ala_mod", tmp_path)


def test_a_new_app_holds_every_option_and_runs(tmp_path):
    folder = tmp_path / "my-app"
    arguments = [
        "--method",
        "fedala",
        "--dataset",
        "digits",
        "--clients",
        "2",
        "--rounds",
        "1",
        "--set",
        "fedala.eta=0.5",
    ]
    done = CliRunner().invoke(app, ["flower", "new", str(folder), *arguments])
    assert done.exit_code == 0, done.output
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    table = project["tool"]["flwr"]["app"]["config"]
    flat = {
        **{k: v for k, v in table.items() if k != "set"},
        **{f"set.{k}": v for k, v in table["set"].items()},
    }
    config, deployment = read_run_config(flat)
    assert (config.methods, config.clients, config.rounds, config.set) == (
        ("fedala",),
        2,
        1,
        {"fedala.eta": "0.5"},
    )
    assert deployment.min_nodes == 2
    for name in re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE):
        assert name in table
    assert has_components(folder)
    scope = {}
    exec((folder / "app.py").read_text(encoding="utf-8"), scope)
    assert {"client", "server"} <= scope.keys()
    assert_installs_without_an_index(folder, tmp_path)
    again = CliRunner().invoke(app, ["flower", "new", str(folder)])
    assert again.exit_code == 2
    assert "not empty" in again.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new", "X", "--lanes", "3"], "--lanes has no meaning"),
        (["demo", "--method", "fedavg,fedala"], "one method at a time"),
        (["demo", "--method", "nonsense"], "no method"),
    ],
)
def test_mistakes_have_clear_messages(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["flower", *arguments])
    assert done.exit_code == 2
    assert message in done.output
    assert not list(tmp_path.iterdir())
