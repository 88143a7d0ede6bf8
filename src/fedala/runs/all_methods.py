"""`--method all`: every method that the options, the model and the data allow."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fedala.errors import UserError
from fedala.methods import list_methods, make, setting_prefixes
from fedala.runs.config import Config


def names_all(config: Config) -> bool:
    """Tell whether a config names every method that there is."""
    return set(config.methods) == set(list_methods())


def keep_possible(config: Config, check: Callable[[Config], Any]) -> tuple[Config, tuple[str, ...]]:
    """Return the config without the methods that `check` refuses, and a sentence for each of them.

    `check` raises a `UserError` if the one method of its config is not possible.
    """
    possible, sentences = [], []
    for name in config.methods:
        try:
            check(_select(config, [name]))
        except UserError as error:
            sentences.append(f"{make(name).title} is left out: {error}")
        else:
            possible.append(name)
    if not possible:
        raise UserError(f"No method is possible. {sentences[0]}")
    return _select(config, possible), tuple(sentences)


def _select(config: Config, methods: list[str]) -> Config:
    """Return the config with these methods alone, and their hyperparameters."""
    prefixes = {prefix for name in methods for prefix in setting_prefixes(name)}

    def belongs(key: str) -> bool:
        return "." not in key or key.partition(".")[0] in prefixes

    settings = {key: value for key, value in config.set.items() if belongs(key)}
    sweep = {key: value for key, value in config.sweep.items() if belongs(key)}
    return replace(config, method=",".join(methods), set=settings, sweep=sweep)
