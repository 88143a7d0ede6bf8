"""The methods, one file each. A file in this folder that defines a `Method` is a method: nothing else needs to be edited."""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, TypeVar

from fedala.errors import UserError
from fedala.lanes.weight_learning import Settings
from fedala.methods.base import Method, State
from fedala.methods.fedala import WithALA
from fedala.methods.fedavg import FedAvg
from fedala.options import build, suggest

__all__ = ["Method", "State", "WithALA", "catalogue", "everything", "make", "register"]

M = TypeVar("M", bound=Method)


@dataclass(frozen=True)
class Entry:
    """A method that can be asked for by name, and the class whose fields are its hyperparameters."""

    name: str
    title: str
    summary: str
    hyperparameters: type
    takes_ala: bool

    def defaults(self) -> dict[str, tuple[Any, str]]:
        """Each hyperparameter's default and help text."""
        return {f.name: (f.default, f.metadata["help"]) for f in fields(self.hyperparameters)}


@cache
def _classes() -> dict[str, type[Method]]:
    found = {}
    for module in pkgutil.iter_modules(__path__):
        for value in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if (
                isinstance(value, type)
                and issubclass(value, Method)
                and isinstance(vars(value).get("name"), str)
            ):
                found[value.name] = value
    return dict(sorted(found.items()))


def register(cls: type[M]) -> type[M]:
    """Makes a method that is defined elsewhere known by its name, as if its file were in this folder. A class decorator."""
    known = _classes().get(cls.name)
    again = (
        known is not None and known.__module__ == cls.__module__
    )  # a notebook may define it anew
    if cls.name in catalogue() and not again:
        raise UserError(f"There is a method {cls.name} already: give yours another name.")
    _classes()[cls.name] = cls
    catalogue.cache_clear()
    return cls


@cache
def catalogue() -> dict[str, Entry]:
    """Every method by name."""
    entries = {
        name: Entry(name, cls.title, cls.summary, cls, not cls.refuses_ala)
        for name, cls in _classes().items()
    }
    summary = (
        "each client blends the global model into its own, element by element, with learned weights"
    )
    entries["fedala"] = Entry("fedala", "FedALA", summary, Settings, takes_ala=False)
    return entries


def everything() -> list[str]:
    """Every method, and every `+ala`: what `--method all` compares. (FedAvg's `+ala` is FedALA.)"""
    with_ala = [
        f"{name}+ala" for name, entry in catalogue().items() if entry.takes_ala and name != "fedavg"
    ]
    return [*catalogue(), *with_ala]


def make(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """The method `name` (`fedprox`, `ditto+ala`, …) with hyperparameters such as `{"fedprox.mu": 0.01, "ala.eta": 0.5}`."""
    chosen: dict[str, dict[str, Any]] = {}
    for key, value in (settings or {}).items():
        owner, _, option_name = key.partition(".")
        chosen.setdefault(owner, {})[option_name] = value
    base, plus, suffix = name.partition("+")
    if name in ("fedala", "fedavg+ala"):
        return WithALA(
            FedAvg(),
            build(Settings, {**chosen.get("ala", {}), **chosen.get("fedala", {})}, "fedala."),
        )
    if base not in _classes() or (plus and suffix != "ala"):
        raise UserError(
            f"There is no method {name!r}{suggest(base, catalogue())}; +ala adds ALA to one."
        )
    cls = _classes()[base]
    method = build(cls, chosen.get(base, {}), f"{base}.")
    if not plus:
        return method
    if cls.refuses_ala:
        raise UserError(f"{name} is refused: {cls.refuses_ala}.")
    return WithALA(method, build(Settings, chosen.get("ala", {}), "ala."))
