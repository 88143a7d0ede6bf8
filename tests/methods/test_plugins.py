"""Methods of installed packages, by their entry points."""

import importlib
import json
import sys
import warnings

import pytest
from typer.testing import CliRunner

from fedala import run
from fedala.cli.app import app
from fedala.errors import PluginWarning
from fedala.methods import catalogue, find_code, make, registry

METHOD = """
from dataclasses import dataclass
from fedala.methods import Method, register
from fedala.options import option

{decorator}
@dataclass(frozen=True)
class Mine(Method):
    name = "{name}"
    title = "Mine"
    summary = "FedAvg [by another name]"
    has_personal_models = False
    number: int = option(1, "a number", least=1)
"""


@pytest.fixture
def install(own_code, monkeypatch):
    """Return a function that installs a package with entry points, as pip would."""
    monkeypatch.syspath_prepend(own_code)

    def add(package, version, source, *points):
        about = own_code / f"{package}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
        (about / "entry_points.txt").write_text("\n".join(["[fedala.methods]", *points]) + "\n")
        (own_code / f"{package}.py").write_text(source)
        monkeypatch.setattr(registry, "_has_loaded_plugins", False)
        catalogue.cache_clear()

    yield add
    registry._packages.clear()


@pytest.mark.parametrize(
    ("decorator", "point"),
    [("", "x = plug_in"), ("@register", "x = plug_in"), ("", "mine = plug_in:Mine")],
)
def test_an_installed_package_adds_its_methods(install, tmp_path, decorator, point):
    source = METHOD.format(name="mine", decorator=decorator)
    install("plug_in", "1.2", source, point)
    assert "plug_in" not in sys.modules  # nothing is loaded before a method is looked for
    assert make("mine", {"mine.number": "3"}).number == 3
    assert make("mine+ala").base.title == "Mine"
    listed = CliRunner().invoke(app, ["methods"])
    assert listed.stderr == ""
    assert "FedAvg [by another name]" in listed.stdout
    small = {"clients": 2, "rounds": 1, "batch_size": 200, "device": "cpu"}
    if decorator:
        run(method="mine", **small, out=tmp_path / "run")
        versions = json.loads((tmp_path / "run" / "summary.json").read_text())["versions"]
        assert versions["plug_in"] == "1.2"
        assert versions["method mine"].startswith("sha256:")


@pytest.mark.parametrize(
    ("source", "point", "says"),
    [
        ("1 / 0\n", "x = plug_in", "ZeroDivisionError: division by zero"),
        ("raise SystemExit\n", "x = plug_in", "SystemExit"),
        ("x = 1\n", "x = plug_in", "neither a method nor a module with methods"),
        ("x = 1\n", "x = plug_in:x", "neither a method nor a module with methods"),
        ("x = 1\n", "x = plug_in:y", "AttributeError: module 'plug_in' has no attribute 'y'"),
        (METHOD.format(name="fedavg", decorator=""), "x = plug_in", "a method fedavg already"),
        (METHOD.format(name="Mine", decorator=""), "x = plug_in:Mine", "lower-case"),
    ],
)
def test_a_broken_package_is_left_out_with_a_sentence(install, source, point, says):
    before = set(catalogue())
    install("plug_in", "0.1", source, point)
    install("good_one", "2.0", METHOD.format(name="good", decorator=""), "good = good_one")
    with pytest.warns(PluginWarning, match=r"The methods of plug_in 0\.1 are left out") as found:
        assert set(catalogue()) == before | {"good"}
    assert says in str(found[0].message)


@pytest.mark.filterwarnings("default")
def test_the_command_line_says_so_in_one_line(install):
    install("plug_in", "0.1", "1 / 0\n", "x = plug_in")
    answer = CliRunner().invoke(app, ["methods"])
    assert answer.exit_code == 0
    assert answer.stderr == (
        "Warning: The methods of plug_in 0.1 are left out, because plug_in cannot be used: "
        "ZeroDivisionError: division by zero.\n"
    )


def test_a_run_that_began_with_a_file_continues_with_the_package(install, own_code, monkeypatch):
    """The module is imported first, which is no reason for a warning."""
    source = METHOD.format(name="mine", decorator="@register")
    small = {"clients": 2, "batch_size": 200, "device": "cpu", "model": "mlp"}
    (own_code / "files").mkdir()
    (own_code / "files" / "plug_in.py").write_text(source)
    run(method="mine", imports="files/plug_in.py", rounds=1, out="run", **small)
    del sys.modules["plug_in"], registry._classes()["mine"]
    install("plug_in", "1.2", source, "mine = plug_in:Mine")
    monkeypatch.setattr(sys, "path", [str(own_code), *sys.path])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module("plug_in")
    assert find_code("mine") == ("plug_in", ("plug_in", "1.2"))
    command = ["run", "--resume", "run", "--rounds", "2"]
    answer = CliRunner().invoke(app, [*command, "--import", "files/plug_in.py"])
    assert "leave --import files/plug_in.py out to use them" in answer.stderr
    assert CliRunner().invoke(app, command).exit_code == 0
    assert CliRunner().invoke(app, ["run", "--resume", "run", "--rounds", "3"]).exit_code == 0
