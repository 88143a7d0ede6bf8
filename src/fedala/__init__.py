"""Personalised federated learning with Adaptive Local Aggregation (FedALA)."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from fedala.version import __version__

if TYPE_CHECKING:
    from fedala.ala import ALA
    from fedala.api.result import Result
    from fedala.api.run import run
    from fedala.errors import RunWarning, UserError
    from fedala.runs.config import Config
    from fedala.runs.onboard import onboard
    from fedala.trained.federation import TrainedFederation
    from fedala.trained.load import load

__all__ = [
    "ALA",
    "Config",
    "Result",
    "RunWarning",
    "TrainedFederation",
    "UserError",
    "__version__",
    "load",
    "onboard",
    "run",
]

#: The module of each name. It is imported when the name is first used, so that the command line can
#: start before torch is loaded.
_MODULES = {
    "ALA": "ala",
    "Config": "runs.config",
    "Result": "api.result",
    "RunWarning": "errors",
    "TrainedFederation": "trained.federation",
    "UserError": "errors",
    "load": "trained.load",
    "onboard": "runs.onboard",
    "run": "api.run",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"fedala.{_MODULES[name]}"), name)
    if not name.startswith("_") and importlib.util.find_spec(f"fedala.{name}"):
        return importlib.import_module(f"fedala.{name}")
    raise AttributeError(f"module 'fedala' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
