"""What comes in from outside: nothing is unpickled or evaluated, dependencies are pinned and freely licensed."""

import ast
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

#: Modules that turn bytes into objects, or text into code.
_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "jsonpickle"}
#: Calls that do; numpy's loader only where it may.
_CALLS = {"eval", "exec", "torch.load", "pd.read_pickle", "pandas.read_pickle", "np.load", "numpy.load", "os.system"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_or_evaluated(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & _MODULES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in _MODULES
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in _CALLS, f"line {node.lineno}: {name}"
            for keyword in node.keywords:
                if keyword.arg in ("allow_pickle", "shell", "trust_remote_code", "weights_only"):
                    assert ast.unparse(keyword.value) == "False", f"line {node.lineno}: {keyword.arg}"


def pins():
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return [line for line in lines if line]


def test_every_constraint_is_one_version():
    for line in pins():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line), line
    names = [canonicalize_name(line.split("==")[0]) for line in pins()]
    assert len(set(names)) == len(names)


def needed(*extras):
    """The packages that fedala needs here with these extras, and what they need in turn."""
    found, open_ = {}, [("fedala", frozenset(extras))]
    seen = set(open_)
    while open_:
        name, wanted = open_.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:  # an optional part that is not installed here
            continue
        found[canonicalize_name(name)] = package
        for text in package.requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (wanted or {""})):
                step = (canonicalize_name(requirement.name), frozenset(requirement.extras))
                if step not in seen:
                    seen.add(step)
                    open_.append(step)
    del found["fedala"]
    return found


def test_whatever_is_installed_is_pinned():
    pinned = {canonicalize_name(line.split("==")[0]) for line in pins()}
    # What torch brings along for a GPU is pinned by torch itself.
    missing = {name for name in needed("dev") if not name.startswith(("nvidia-", "cuda-"))} - pinned
    assert not missing


FREE = re.compile(r"MIT|BSD|Apache|Python|PSF|ISC|MPL|Mozilla|HPND|Zlib|CC0|Unlicense|0BSD|CNRI", re.I)


def test_every_package_that_a_run_needs_has_a_free_licence():
    packages = needed("all")
    assert {"torch", "numpy", "safetensors"} <= set(packages)
    for name, package in packages.items():
        if name.startswith(("nvidia-", "cuda-")):
            continue  # NVIDIA's libraries have NVIDIA's licence; see SECURITY.md
        about = package.metadata
        classifiers = [line for line in about.get_all("Classifier") or () if line.startswith("License")]
        stated = " ".join([about.get("License-Expression") or about.get("License") or "", *classifiers])
        assert FREE.search(stated[:300] + " ".join(classifiers)), f"{name}: {stated[:80]!r}"
        assert not re.search(r"\bA?GPL|proprietary", stated[:300]) or "LGPL" in stated, f"{name}: {stated[:80]!r}"
