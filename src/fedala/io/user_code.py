"""Load code that a user names: a Python file, or a module. To load it is to execute it.

So no name that stands in a run folder, in a data file or in a message from another machine may get
here. A user gives it: on the command line, in a config file to run, or as an argument.
"""

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from fedala.errors import UserError, first_line
from fedala.io.files import sha256
from fedala.io.untrusted import read_file

LARGEST = 2**24  # bytes of a source file
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_REFERENCE = re.compile(r"(?P<code>.+):(?P<name>[^\W\d]\w*)")

#: By module: the digest of the source that was executed.
_digests: dict[str, str] = {}


def load_code(name: str) -> ModuleType:
    """Import a Python file (`my/fedsim.py`) or a module (`fedsim`) and return it.

    A file is known by its own name afterwards, as if Python had found it, and its folder is
    searched for what it imports. A file that has changed since is loaded again.
    """
    if _is_file(name):
        return _load_file(name)
    if not _MODULE.fullmatch(name):
        raise UserError(f"{name!r} is neither a Python file, such as my/fedsim.py, nor a module.")
    _extend_path(Path.cwd())
    try:
        with _refuse_errors(name, None):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"{name} cannot be imported: {first_line(error)}.") from None
        raise UserError(
            f"There is no module {error.name} here: name a file, as in my/{name}.py, or a module "
            "that is installed or lies in this folder."
        ) from None


def is_reference(text: str | None) -> bool:
    """Tell whether a text is meant to name a function of a user: `net.py:make` or `net:make`."""
    return text is not None and (_REFERENCE.fullmatch(text) is not None or _is_file(text))


def load_function(reference: str) -> Callable[..., Any]:
    """Return the function, or class, that `net.py:make` or `package.net:make` names."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise UserError(f"{reference} lacks a function: name it, too, as in net.py:make.")
    found = getattr(load_code(match["code"]), match["name"], None)
    if not callable(found):
        what = "is not a function" if found is not None else "does not exist"
        raise UserError(f"{reference}: {match['name']} {what} in {match['code']}.")
    return found  # type: ignore[no-any-return]


def module_of(reference: str) -> str:
    """Return the name of the module that holds the function which a reference names."""
    return module_name(reference.rpartition(":")[0])


def module_name(name: str) -> str:
    """Return the name of the module that a file or module becomes."""
    return Path(name).stem if _is_file(name) else name


def read_source(name: str) -> bytes | None:
    """Return the content of a file of code; None for a module."""
    return read_file(Path(name).expanduser(), LARGEST) if _is_file(name) else None


def digest_code(module: str) -> str:
    """Return the digest of a loaded module's source, or of all sources of a package."""
    if module in _digests:
        return _digests[module]
    loaded = sys.modules.get(module)
    if file := getattr(loaded, "__file__", None):
        try:
            return _digest_files(Path(file), is_package=hasattr(loaded, "__path__"))
        except (OSError, UserError):
            pass  # the source was removed, or lies in an archive
    return ""


def describe_error(error: BaseException, path: Path | None = None) -> str:
    """Return an error of a user's code in a few words, with the line of their file if it has one.

    `line 7: NameError: name 'x' is not defined`
    """
    line = _find_line(error, path) if path else None
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    message = error.msg if isinstance(error, SyntaxError) else first_line(error)
    text = f"{kind}{message}" if message != type(error).__name__ else message
    return f"line {line}: {text.rstrip('.')}" if line else text.rstrip(".")


def trace_own_code(error: BaseException) -> str:
    """Return an error with its traceback from the user's files on; "" if it came from elsewhere."""
    files = {getattr(sys.modules.get(name), "__file__", None) for name in _digests}
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename not in files:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)) if trace else ""


def find_source(function: Callable[..., Any]) -> Path | None:
    """Return the file that defines a function or class."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    return Path(file) if file else None


def _is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name or "\\" in name


class _Loader(SourceFileLoader):
    """Executes the bytes that were read, and neither reads nor writes a compiled version."""

    def __init__(self, module: str, path: Path, source: bytes) -> None:
        super().__init__(module, str(path))
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.source, self.path)
        return code


def _load_file(name: str) -> ModuleType:
    path = Path(name).expanduser().resolve()
    if not path.exists():
        raise UserError(f"There is no file {name}.")
    if path.suffix != ".py" or "." in path.stem:
        raise UserError(f"{name} cannot be imported: a Python file is called ….py, without dots.")
    try:
        source = read_file(path, LARGEST)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}.") from None
    known = _find_known(name, path)
    if known is not None and _digests.get(path.stem, sha256(source)) == sha256(source):
        return known
    _extend_path(path.parent)
    loader = _Loader(path.stem, path, source)
    spec = ModuleSpec(path.stem, loader, origin=str(path))
    spec.has_location = True
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        with _refuse_errors(name, path):
            loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    _digests[path.stem] = sha256(source)
    return module


def _find_known(name: str, path: Path) -> ModuleType | None:
    """Return the module of a file if it is loaded; refuse a file with another module's name."""
    known = sys.modules.get(path.stem)
    spec = None
    if known is None:
        try:
            spec = importlib.util.find_spec(path.stem)
        except (ImportError, ValueError):
            spec = None
    origin = str(getattr(known, "__file__", None) or (spec and spec.origin) or "")
    if (known or spec) and not (origin and Path(origin).resolve() == path):
        raise UserError(
            f"{name} has the name of another module, {path.stem} ({origin or 'built in'}): "
            "give the file another name."
        )
    return known


def _extend_path(folder: Path) -> None:
    """Search a folder for modules, after all others: it must not replace what is installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


@contextmanager
def _refuse_errors(name: str, path: Path | None) -> Iterator[None]:
    """Turn whatever code raises while it is imported into one sentence. No .pyc is written."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    except ModuleNotFoundError as error:
        if path is None:
            raise
        reason = describe_error(error, path)
        raise UserError(f"{name} cannot be imported: {reason}.") from error
    except (Exception, SystemExit) as error:
        reason = describe_error(error, path or _last_file(error))
        raise UserError(f"{name} cannot be imported: {reason}.") from error
    finally:
        sys.dont_write_bytecode = before


def _last_file(error: BaseException) -> Path | None:
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename) if frames else None


def _find_line(error: BaseException, path: Path) -> int | None:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return lines[-1] if lines else None


def _digest_files(file: Path, *, is_package: bool) -> str:
    if not is_package:
        return sha256(read_file(file, LARGEST))
    sources = sorted(file.parent.rglob("*.py"))
    lines = [f"{one.relative_to(file.parent)} {sha256(read_file(one, LARGEST))}" for one in sources]
    return sha256("\n".join(lines).encode())
