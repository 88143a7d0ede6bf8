"""The methods, one file each: `base.py` says what a method is, `registry.py` finds one by name."""

from fedala.lanes.trees import State
from fedala.methods.base import Method, ServerRound
from fedala.methods.registry import (
    Entry,
    catalogue,
    list_methods,
    make,
    register,
    setting_prefixes,
)

__all__ = [
    "Entry",
    "Method",
    "ServerRound",
    "State",
    "catalogue",
    "list_methods",
    "make",
    "register",
    "setting_prefixes",
]
