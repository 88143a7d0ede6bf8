"""The methods, one file each: `base.py` says what a method is, `registry.py` finds one by name."""

from fedala.lanes.trees import State
from fedala.methods.base import Method, ServerRound
from fedala.methods.registry import (
    Entry,
    catalogue,
    find_code,
    find_package,
    hyperparameters,
    import_methods,
    list_changed_defaults,
    list_kinds,
    list_methods,
    list_options,
    make,
    register,
    register_module,
    setting_prefixes,
)

__all__ = [
    "Entry",
    "Method",
    "ServerRound",
    "State",
    "catalogue",
    "find_code",
    "find_package",
    "hyperparameters",
    "import_methods",
    "list_changed_defaults",
    "list_kinds",
    "list_methods",
    "list_options",
    "make",
    "register",
    "register_module",
    "setting_prefixes",
]
