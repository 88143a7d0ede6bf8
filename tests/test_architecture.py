"""The architecture as a test: the order of imports, the size of files, and plain words.

Imports are read from the source, also those inside functions and under `TYPE_CHECKING`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedala"

#: The rooms of the package. A room imports from itself and from those above it in this list.
ROOMS = (
    "errors",
    "options",
    "version",
    "metrics",
    "io",
    "lanes",
    "cuda",
    "models",
    "data",
    "records",
    "ala",
    "methods",
    "simulation",
    "runs",
    "trained",
    "report",
    "bench",
    "ranks",
    "flower",
    "cells",
    "paper",
    "leaderboard",
    "api",
    "cli",
    "",  # the package itself: `__init__` and `__main__`
)
#: Imports against this order, each with its reason.
EXCEPTIONS = {
    ("lanes.backend", "cuda"): "the fast path is loaded only if the device is a GPU",
}
MAX_TOP_MODULES = 8
MAX_LINES = 400
MAX_COLUMNS = 100
#: A file may be longer if its docstring gives the reason with these words.
LONG_BECAUSE = "Long because"
FORBIDDEN = ("anew", "whom", "suffices?", "for want of", "goes on")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the name inside the package: `runs.folder`, `runs` for its `__init__`, or ``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part not in ("__init__", "__main__"))


def room(module: str) -> str:
    return module.partition(".")[0]


MODULES = {module_name(path): path for path in sources() if path.name != "__main__.py"}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def bound_names(package: str) -> set[str]:
    """Return the names that the `__init__` of a package defines or imports."""
    names = set()
    for node in parse(MODULES[package]).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def targets(node: ast.AST, importer: Path) -> Iterator[str]:
    """Yield the modules of this package that an import statement names."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "fedala":
                yield alias.name.partition(".")[2]
    elif isinstance(node, ast.ImportFrom):
        full = node.module or ""
        if node.level:
            folder = importer.relative_to(PACKAGE.parent).parts[: -node.level]
            full = ".".join([*folder, *filter(None, [node.module])])
        if full.split(".")[0] != "fedala":
            return
        base = full.partition(".")[2]
        for alias in node.names:
            module = f"{base}.{alias.name}".lstrip(".")
            is_module = module in MODULES and not (base and alias.name in bound_names(base))
            yield module if is_module else base


def imports(path: Path) -> set[str]:
    """Return the modules of this package that a file imports, anywhere in it."""
    found = {target for node in ast.walk(parse(path)) for target in targets(node, path)}
    return found - {module_name(path)}


IMPORTS = {path: imports(path) for path in sources()}


def test_every_kind_of_import_is_found():
    text = (
        "import fedala.io.files\n"
        "from fedala.data import load\n"
        "from fedala.io import untrusted\n"
        "from fedala import UserError, errors\n"
        "def f():\n    from fedala.runs.config import Config\n"
        "if TYPE_CHECKING:\n    from fedala.models.cnn import CNN\n"
        "import numpy\n"
    )
    found = {name for node in ast.walk(ast.parse(text)) for name in targets(node, PACKAGE / "x.py")}
    expected = {"io.files", "data", "io.untrusted", "", "errors", "runs.config", "models.cnn"}
    assert found == expected


def test_every_room_is_in_the_order():
    assert {room(module) for module in MODULES} == set(ROOMS)


def test_rooms_import_only_from_rooms_above_them():
    rank = {name: index for index, name in enumerate(ROOMS)}
    wrong = set()
    for path, found in IMPORTS.items():
        importer = module_name(path)
        for target in found:
            if rank[room(target)] > rank[room(importer)]:
                wrong.add((importer, room(target)))
    assert wrong - set(EXCEPTIONS) == set()


def test_the_exceptions_are_few_and_have_reasons():
    assert len(EXCEPTIONS) <= 5
    assert all(reason for reason in EXCEPTIONS.values())


def reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in edges.get(waiting.pop(), ()):
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found


def test_no_module_imports_itself_through_others():
    """The package's own `__init__` imports nothing when it is loaded, so it is left out."""
    edges: dict[str, set[str]] = {}
    for path, found in IMPORTS.items():
        importer = module_name(path)
        edges[importer] = {name for name in found if (importer, room(name)) not in EXCEPTIONS}
    edges.pop("")
    in_cycle = {module for module in edges if module in reachable(module, edges)}
    assert in_cycle == set()


def test_no_module_imports_another_only_for_a_type():
    wrong = set()
    for path in sources():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                names = [name for line in node.body for name in targets(line, path)]
                wrong |= {module_name(path)} if names else set()
    assert wrong - {""} == set()


def test_few_modules_at_the_top():
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_TOP_MODULES


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_short_and_lines_are_narrow(path):
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    wide = [number for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS]
    assert not wide, f"lines of more than {MAX_COLUMNS} characters: {wide}"
    has_reason = LONG_BECAUSE in (ast.get_docstring(ast.parse(text)) or "")
    is_long = len(lines) > MAX_LINES and not has_reason
    assert not is_long, f"{len(lines)} lines: split it, or say in its docstring: {LONG_BECAUSE} …"


def prose() -> list[Path]:
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.js"), *(ROOT / "docs").rglob("*.md")]
    return [*sorted(files), ROOT / "README.md"]


@pytest.mark.parametrize("path", prose(), ids=lambda path: str(path.relative_to(ROOT)))
def test_words_are_plain(path):
    text = re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
    found = re.findall(rf"\b(?:{'|'.join(FORBIDDEN)})\b", text, re.IGNORECASE)
    assert not found
