"""Methods by name. A file in this folder that defines a `Method` with a name is a method.

So is a class that was registered, one of a module that a run imports, and one of an installed
package that names it among its entry points (`fedala.methods`).
"""

import importlib
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fedala.errors import PluginWarning, UserError
from fedala.io.user_code import describe_error, load_code, module_name
from fedala.lanes.weight_learning import Settings
from fedala.methods.base import KINDS, Method
from fedala.methods.with_ala import WithALA
from fedala.options import build, name_option, suggest

M = TypeVar("M", bound=Method)

#: Other names of a method.
ALIASES = {"fedavg+ala": "fedala"}
#: Other prefixes of a method's settings: `ala.eta` is FedALA's `fedala.eta`.
PREFIXES = {"fedala": ("ala", "fedala")}
#: The entry points with which an installed package adds methods.
GROUP = "fedala.methods"

_has_loaded_plugins = False
#: By class: the name and version of the installed package that it came from.
_packages: dict[type[Method], tuple[str, str]] = {}
#: By module that is being imported: the package of the methods that it is about to register.
_pending: dict[str, tuple[str, str]] = {}


@dataclass(frozen=True)
class Entry:
    """A method that can be chosen by name, and the class whose fields are its hyperparameters."""

    name: str
    title: str
    summary: str
    kind: str
    hyperparameters: type
    takes_ala: bool

    def defaults(self) -> dict[str, tuple[Any, str]]:
        """Return each hyperparameter's default and help text."""
        return {
            f.name: (f.default, f.metadata.get("help", "")) for f in fields(self.hyperparameters)
        }


def _classes() -> dict[str, type[Method]]:
    _load_plugins()
    return _own_classes()


@cache
def _own_classes() -> dict[str, type[Method]]:
    found = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name != "registry":
            for cls in _find_methods(importlib.import_module(f"fedala.methods.{module.name}")):
                found[cls.name] = cls
    return dict(sorted(found.items()))


def _find_methods(module: ModuleType) -> list[type[Method]]:
    """Return the classes of a module that are methods: those with a name of their own."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    return [
        cls
        for cls in dict.fromkeys(classes)
        if issubclass(cls, Method) and isinstance(vars(cls).get("name"), str)
    ]


def register(cls: type[M]) -> type[M]:
    """Make a method known that is defined elsewhere, as if it were in this folder: a decorator."""
    known = _classes().get(getattr(cls, "name", ""))
    is_same = known is not None and known.__module__ == cls.__module__  # a notebook runs it twice
    if known is not None and not is_same:
        raise UserError(f"There is a method {cls.name} already: give yours another name.")
    _check_class(cls)
    _classes()[cls.name] = cls
    if cls.__module__ in _pending:
        _packages[cls] = _pending[cls.__module__]
    catalogue.cache_clear()
    return cls


def register_module(module: ModuleType) -> list[str]:
    """Register all methods of a module, with or without the decorator; return their names."""
    found = _find_methods(module)
    for cls in found:
        if _classes().get(cls.name) is not cls:
            register(cls)
    return [cls.name for cls in found]


def import_methods(names: Iterable[str]) -> None:
    """Execute the files and modules that a user names, and register their methods."""
    for name in names:
        _check_not_installed(name)
        try:
            found = register_module(load_code(name))
        except UserError as error:
            raise UserError(f"imports: {error}") from None
        if not found:
            raise UserError(
                f"imports: {name} has no method: it needs a class that derives from "
                "fedala.methods.Method and has a name."
            )


def find_package(module: str) -> str:
    """Return the installed package that brings a module's methods; empty if none does."""
    _load_plugins()
    own = (package for cls, (package, _) in _packages.items() if cls.__module__ == module)
    return next(own, "")


def _check_not_installed(name: str) -> None:
    """Refuse a file if an installed package has brought its methods: they cannot be there twice."""
    module = module_name(name)
    if module != name and (package := find_package(module)):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is None or Path(file).resolve() != Path(name).expanduser().resolve():
            raise UserError(
                f"imports: the installed package {package} has the methods of {module} already: "
                f"leave {name_option('imports', name)} out to use them, or uninstall {package} to "
                "use the file."
            )


def _check_class(cls: type[Method]) -> None:
    """Refuse a class with a mistake that would show only later, or never."""
    for text in ("name", "title", "summary"):
        if not isinstance(getattr(cls, text, None), str):
            raise UserError(f"{cls.__name__} lacks its {text}, a text for tables and lists.")
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", cls.name) or cls.name in ("all", "ala"):
        raise UserError(
            f"{cls.__name__} has the name {cls.name!r}: a name has lower-case letters, digits and "
            "hyphens only, and is not all or ala."
        )
    if any(isinstance(value, Field) for value in vars(cls).values()):
        raise UserError(f"{cls.__name__} lacks @dataclass(frozen=True) above the class.")
    for one in fields(cls):
        if one.default is MISSING:
            raise UserError(f"{cls.__name__}.{one.name} needs a default value.")
    numbers = [one.name for one in fields(cls) if "float" in str(one.type)]
    for name in sorted(cls.lane_numbers - set(numbers)):
        raise UserError(
            f"{cls.__name__}.lane_numbers has {name!r}, which is not a field of type float"
            f"{suggest(name, numbers)}."
        )


def _load_plugins() -> None:
    """Register the methods of installed packages, when a method is first looked for."""
    global _has_loaded_plugins
    if _has_loaded_plugins:
        return
    _has_loaded_plugins = True  # before they are loaded: a plugin may register its own methods
    for point in entry_points(group=GROUP):
        try:
            _load_plugin(point)
        except (Exception, SystemExit) as error:  # whatever a package may raise
            package = f"{point.dist.name} {point.dist.version}" if point.dist else "a package"
            warnings.warn(
                f"The methods of {package} are left out, because {point.value} cannot be used: "
                f"{describe_error(error)}.",
                PluginWarning,
                stacklevel=2,
            )


def _load_plugin(point: EntryPoint) -> None:
    """Register what an entry point names: a class, or all methods of a module."""
    module = sys.modules.get(point.module)
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        # The user imports it first; it registers its methods in a moment.
        if point.dist:
            _pending[point.module] = (point.dist.name, point.dist.version)
        return
    loaded = point.load()
    if isinstance(loaded, ModuleType):
        found = [_classes()[name] for name in register_module(loaded)]
    elif isinstance(loaded, type) and issubclass(loaded, Method):
        found = [register(loaded)]
    else:
        found = []
    if not found:
        raise UserError("it is neither a method nor a module with methods")
    if point.dist:
        _packages.update((cls, (point.dist.name, point.dist.version)) for cls in found)


def find_code(name: str) -> tuple[str, tuple[str, str] | None]:
    """Return the module that defines a method, and the installed package that brought it.

    The module is empty for the methods of this package.
    """
    cls = _classes()[ALIASES.get(name, name).partition("+")[0]]
    module = cls.__module__
    return "" if module.startswith("fedala.") else module, _packages.get(cls)


@cache
def catalogue() -> dict[str, Entry]:
    """Return every method by name."""
    return {
        name: Entry(name, cls.title, cls.summary, cls.kind, cls, not cls.refuses_ala)
        for name, cls in _classes().items()
    }


def list_kinds() -> dict[str, list[Entry]]:
    """Return the methods by kind; other kinds than fedala's, and methods of none, come last."""
    found: dict[str, list[Entry]] = {kind: [] for kind in KINDS}
    for entry in catalogue().values():
        found.setdefault(entry.kind, []).append(entry)
    return {kind: entries for kind, entries in found.items() if entries}


def list_methods() -> list[str]:
    """Return every method and every `+ala`: what `--method all` compares."""
    with_ala = [f"{name}+ala" for name, entry in catalogue().items() if entry.takes_ala]
    return [*catalogue(), *(name for name in with_ala if name not in ALIASES)]


def setting_prefixes(name: str) -> tuple[str, ...]:
    """Return the prefixes of the settings that belong to a method, such as `fedprox`."""
    name = ALIASES.get(name, name)
    return PREFIXES.get(name) or tuple(name.split("+"))


def list_options(prefix: str) -> tuple[str, ...]:
    """Return the names of the settings with a prefix, such as `mu`."""
    kinds = {name: entry.hyperparameters for name, entry in catalogue().items()} | {"ala": Settings}
    return tuple(one.name for one in fields(kinds[prefix])) if prefix in kinds else ()


def list_changed_defaults(names: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """Return the settings of methods whose default has changed: the former one and the present.

    Installed packages are not loaded for it. A name that is not a method's has none.
    """
    found = {}
    for name in names:
        cls = _own_classes().get(ALIASES.get(name, name).partition("+")[0], Method)
        present = {one.name: one.default for one in fields(cls)}
        for key, former in cls.former_defaults.items():
            found[f"{cls.name}.{key}"] = (former, present[key])
    return found


def hyperparameters(method: Method) -> dict[str, Any]:
    """Return every hyperparameter of a method, as settings name them: `{"fedprox.mu": 0.01}`."""
    found: dict[str, Any] = {}
    for one in fields(method):
        value = getattr(method, one.name)
        if isinstance(value, Method):
            found |= hyperparameters(value)
        elif isinstance(value, Settings):
            found |= {f"ala.{own.name}": getattr(value, own.name) for own in fields(value)}
        elif isinstance(value, bool | int | float | str):
            found[f"{method.name}.{one.name}"] = value
    return found


def make(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """Make a method (`fedprox`, `ditto+ala`, …) from settings such as `{"fedprox.mu": 0.01}`."""
    chosen: dict[str, dict[str, Any]] = {}
    for key, value in (settings or {}).items():
        prefix, _, option_name = key.partition(".")
        chosen.setdefault(prefix, {})[option_name] = value
    name = ALIASES.get(name, name)
    base, plus, suffix = name.partition("+")
    if base not in _classes() or (plus and suffix != "ala"):
        raise UserError(
            f"There is no method {name!r}{suggest(base, catalogue())}; +ala adds ALA to one."
        )
    cls = _classes()[base]
    own: dict[str, Any] = {}
    for prefix in setting_prefixes(base):
        own |= chosen.get(prefix, {})
    method = build(cls, own, f"{base}.")
    if not plus:
        return method
    if cls.refuses_ala:
        raise UserError(f"{name} is refused: {cls.refuses_ala}.")
    return WithALA(method, build(Settings, chosen.get("ala", {}), "ala."))
