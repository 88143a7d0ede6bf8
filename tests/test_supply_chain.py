"""Nothing is unpickled or evaluated; dependencies are pinned and have free licences."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

#: Modules that turn bytes into objects, or text into code.
_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "jsonpickle",
}
#: Calls that do the same.
_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "pd.read_pickle",
    "pandas.read_pickle",
    "np.load",
    "numpy.load",
    "os.system",
}
#: Reads a file of this package, without pickles.
_ALLOWED = "np.load(_WRITERS, allow_pickle=False)"
#: What the processes of one run, which torchrun has started, say to each other.
_BETWEEN_RANKS = "src/fedala/ranks/group.py"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_or_evaluated(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            allowed = {"pickle"} if path == ROOT / _BETWEEN_RANKS else set()
            assert not {alias.name.split(".")[0] for alias in node.names} & _MODULES - allowed
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in _MODULES
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_allowed = ast.unparse(node) == _ALLOWED
            assert is_allowed or name not in _CALLS, f"line {node.lineno}: {name}"
            for keyword in node.keywords:
                if keyword.arg in ("allow_pickle", "shell", "trust_remote_code", "weights_only"):
                    assert ast.unparse(keyword.value) == "False", (
                        f"line {node.lineno}: {keyword.arg}"
                    )


def pins():
    lines = [
        line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()
    ]
    return [line for line in lines if line]


def test_every_constraint_is_one_version():
    for line in pins():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line), line
    names = [canonicalize_name(line.split("==")[0]) for line in pins()]
    assert len(set(names)) == len(names)


def needed(*extras):
    """Return the packages that fedala needs here with these extras, directly or indirectly."""
    found, waiting = {}, [("fedala", frozenset(extras))]
    seen = set(waiting)
    while waiting:
        name, wanted = waiting.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:  # an optional part that is not installed here
            continue
        found[canonicalize_name(name)] = package
        for text in package.requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(
                marker.evaluate({"extra": extra}) for extra in (wanted or {""})
            ):
                step = (canonicalize_name(requirement.name), frozenset(requirement.extras))
                if step not in seen:
                    seen.add(step)
                    waiting.append(step)
    del found["fedala"]
    return found


def test_every_installed_package_is_pinned():
    pinned = {canonicalize_name(line.split("==")[0]) for line in pins()}
    assert not set(needed("dev", "flower-simulation")) - pinned


def write_cpu_build(folder):
    """Write a wheel with the metadata of torch's CPU build, which registries lack for Linux.

    It needs what the CUDA build needs, except the libraries for GPUs.
    """
    version = next(line for line in pins() if line.startswith("torch==")).split("==")[1] + "+cpu"
    lines = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}"]
    for requirement in distribution("torch").requires or ():
        if not re.match(r"nvidia-|cuda-|triton", requirement):
            lines.append(f"Requires-Dist: {requirement}")
    about = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{about}/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def resolve(python, system, folder, *extras):
    """Resolve the installation for another Python and system; return the versions by name."""
    pytest.importorskip("uv", reason="uv is not installed: pip install 'fedala[flower]'")
    command = [sys.executable, "-m", "uv", "pip", "compile", str(ROOT / "pyproject.toml")]
    command += ["--python", sys.executable]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--python-version", python]
    platform = "aarch64-apple-darwin" if system == "macOS" else "x86_64-manylinux_2_28"
    command += ["--python-platform", platform]
    command += ["--only-binary", ":all:", "--no-header", "--no-annotate", "--quiet", *extras]
    if system == "Linux, CPU":
        write_cpu_build(folder)
        command += ["--find-links", str(folder)]
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    environment |= {"UV_HTTP_RETRIES": "1", "UV_HTTP_CONNECT_TIMEOUT": "5"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode and re.search(r"error sending request|network was disabled", done.stderr):
        report = pytest.fail if os.environ.get("FEDALA_REGISTRY") else pytest.skip
        report(f"No package registry can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ")[0].split("==") for line in done.stdout.splitlines() if "==" in line)


#: Torch from the registry is the CUDA build on Linux and a CPU build on macOS.
SYSTEMS = [
    "Linux, CUDA",
    pytest.param("Linux, CPU", marks=pytest.mark.registry),
    pytest.param("macOS", marks=pytest.mark.registry),
]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_constraints_can_be_installed(python, system, tmp_path):
    """All pinned versions have wheels, fit together, and need nothing else."""
    pinned = dict(line.split("==") for line in pins())
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    found = resolve(python, system, tmp_path, "--extra", "dev", "--extra", "flower-simulation")
    assert found["torch"] == pinned["torch"] + "+cpu" * (system == "Linux, CPU")
    assert ("nvidia-cublas" in found) == (system == "Linux, CUDA")
    assert ("triton" in found) == system.startswith("Linux")
    found["torch"] = pinned["torch"]
    assert found.items() <= pinned.items()


@pytest.mark.registry
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_loggers_can_be_installed_with_the_constraints(python, tmp_path):
    """The constraints do not pin the loggers, but allow all of them together."""
    found = resolve(python, "Linux, CUDA", tmp_path, "--all-extras")
    assert {"tensorboard", "wandb", "mlflow"} <= set(found)


FREE = re.compile(
    r"MIT|BSD|Apache|Python|PSF|ISC|MPL|Mozilla|HPND|Zlib|CC0|Unlicense|0BSD|CNRI", re.I
)


def test_every_package_that_a_run_needs_has_a_free_licence():
    packages = needed("all")
    assert {"torch", "numpy", "safetensors"} <= set(packages)
    for name, package in packages.items():
        if name.startswith(("nvidia-", "cuda-")):
            continue  # NVIDIA's libraries have NVIDIA's licence; see SECURITY.md
        about = package.metadata
        classifiers = [
            line for line in about.get_all("Classifier") or () if line.startswith("License")
        ]
        stated = " ".join(
            [about.get("License-Expression") or about.get("License") or "", *classifiers]
        )
        assert FREE.search(stated[:300] + " ".join(classifiers)), f"{name}: {stated[:80]!r}"
        assert not re.search(r"\bA?GPL|proprietary", stated[:300]) or "LGPL" in stated, (
            f"{name}: {stated[:80]!r}"
        )
