"""Methods by name. A file in this folder that defines a `Method` with a name is a method."""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from fedala.errors import UserError
from fedala.lanes.weight_learning import Settings
from fedala.methods.base import Method
from fedala.methods.with_ala import WithALA
from fedala.options import build, suggest

M = TypeVar("M", bound=Method)

#: Other names of a method.
ALIASES = {"fedavg+ala": "fedala"}
#: Other prefixes of a method's settings: `ala.eta` is FedALA's `fedala.eta`.
PREFIXES = {"fedala": ("ala", "fedala")}


@dataclass(frozen=True)
class Entry:
    """A method that can be chosen by name, and the class whose fields are its hyperparameters."""

    name: str
    title: str
    summary: str
    hyperparameters: type
    takes_ala: bool

    def defaults(self) -> dict[str, tuple[Any, str]]:
        """Return each hyperparameter's default and help text."""
        return {f.name: (f.default, f.metadata["help"]) for f in fields(self.hyperparameters)}


@cache
def _classes() -> dict[str, type[Method]]:
    found = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name == "registry":
            continue
        for value in vars(importlib.import_module(f"fedala.methods.{module.name}")).values():
            is_method = isinstance(value, type) and issubclass(value, Method)
            if is_method and isinstance(vars(value).get("name"), str):
                found[value.name] = value
    return dict(sorted(found.items()))


def register(cls: type[M]) -> type[M]:
    """Make a method known that is defined elsewhere, as if it were in this folder: a decorator."""
    known = _classes().get(cls.name)
    is_same = known is not None and known.__module__ == cls.__module__  # a notebook runs it twice
    if cls.name in catalogue() and not is_same:
        raise UserError(f"There is a method {cls.name} already: give yours another name.")
    _classes()[cls.name] = cls
    catalogue.cache_clear()
    return cls


@cache
def catalogue() -> dict[str, Entry]:
    """Return every method by name."""
    return {
        name: Entry(name, cls.title, cls.summary, cls, not cls.refuses_ala)
        for name, cls in _classes().items()
    }


def list_methods() -> list[str]:
    """Return every method and every `+ala`: what `--method all` compares."""
    with_ala = [f"{name}+ala" for name, entry in catalogue().items() if entry.takes_ala]
    return [*catalogue(), *(name for name in with_ala if name not in ALIASES)]


def setting_prefixes(name: str) -> tuple[str, ...]:
    """Return the prefixes of the settings that belong to a method, such as `fedprox`."""
    name = ALIASES.get(name, name)
    return PREFIXES.get(name) or tuple(name.split("+"))


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
