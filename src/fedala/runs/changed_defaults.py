"""Hyperparameters whose default has changed (`Method.former_defaults`).

A run records their value even if it is the default. So a record that does not name one is older
than the change, and means the former default.
"""

from dataclasses import replace
from typing import Any

from fedala.methods import list_changed_defaults
from fedala.runs.config import Config


def name_present_defaults(config: Config) -> Config:
    """Return the config of a run that begins, with the values that it must record."""
    present = {key: new for key, (_, new) in list_changed_defaults(config.methods).items()}
    return _complete(config, present)


def name_former_defaults(config: Config) -> Config:
    """Return the config of a record, with the values that an older run left out."""
    former = {key: old for key, (old, _) in list_changed_defaults(config.methods).items()}
    return _complete(config, former)


def _complete(config: Config, defaults: dict[str, Any]) -> Config:
    known = {*config.set, *config.sweep}
    missing = {key: value for key, value in defaults.items() if key not in known}
    return replace(config, set={**config.set, **missing}) if missing else config
