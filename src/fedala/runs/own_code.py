"""Methods and models of a user's own that a config names: load them, and say which they are."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fedala.errors import UserError
from fedala.io.user_code import (
    describe_error,
    digest_code,
    find_source,
    is_reference,
    load_function,
    module_of,
)
from fedala.lanes import State
from fedala.methods import Method, find_code, import_methods
from fedala.methods.with_ala import InitializedByALA
from fedala.methods.wrapper import Wrapper, is_own
from fedala.models import Samples
from fedala.runs.config import Config
from fedala.runs.config_values import flatten_settings, flatten_sweep
from fedala.runs.model_trial import MakeModel


def configure(given: Mapping[str, Any], file: Mapping[str, Any] | None = None) -> Config:
    """Return the checked config of a run that a user starts, with options that override a file's.

    Its imports are executed first: `method = "all"` stands for their methods, too.
    """
    file = file or {}
    tables = [flatten_settings(values.get("set", {})) for values in (file, given)]
    values = {**file, **given, "set": tables[0] | tables[1]}
    for name in flatten_sweep(values.get("sweep", {})):
        if given.get(name) is not None:
            raise UserError(
                f"{name} is both given and swept: leave one of them out, or add its value to the "
                "values of the sweep."
            )
    import_given(values)
    return Config.from_values(values)


def import_given(values: Mapping[str, Any]) -> None:
    """Execute the imports among a user's options, and register their methods."""
    import_methods(Config.from_values({"imports": values.get("imports")}).import_names)


def check_personal_models(method: Method, state: State) -> None:
    """Refuse a user's method that leaves open which model an absent client is tested with.

    `state` is a client's before its first round. Nothing is open if the state holds a model, or if
    the class says it: in `has_personal_models`, or by a function that returns the model.
    """
    if isinstance(method, InitializedByALA):
        return  # ALA keeps each client's model
    if isinstance(method, Wrapper):
        return check_personal_models(method.base, state)
    answers = ("has_personal_models", "model_when_absent", "model_to_evaluate")
    classes = type(method).__mro__[: type(method).__mro__.index(Method)]
    if any(name in vars(cls) for cls in classes for name in answers):
        return
    if is_own(method) and not state.keys() & {"local", "personal"}:
        raise UserError(
            f"{method.title} does not say whether each client has a model of its own: set "
            "has_personal_models = False in the class if clients are tested with the global "
            "model, or keep the client's model in its state under local (or set it to True, and "
            "a client that is absent is tested with its last upload)."
        )


def load_model_function(reference: str) -> Callable[..., Any]:
    """Return the function that makes a user's model, by its name: `net.py:make`."""
    try:
        return load_function(reference)
    except UserError as error:
        raise UserError(f"model: {error}") from None


def fit_model(function: Callable[..., Any], dataset: Samples) -> MakeModel:
    """Return a function without parameters that makes a user's model for a dataset.

    Parameters called `classes`, `shape` (of a sample), `vocabulary` or `dataset` get their values.
    """
    facts = {
        "classes": dataset.classes,
        "shape": tuple(dataset.x.shape[1:]),
        "vocabulary": dataset.vocabulary,
        "dataset": dataset,
    }
    name, path = getattr(function, "__name__", "The function"), find_source(function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()
    arguments = {}
    for one in parameters:
        is_optional = one.default is not one.empty or one.kind in (
            one.VAR_POSITIONAL,
            one.VAR_KEYWORD,
        )
        if one.name == "vocabulary" and dataset.vocabulary is None and not is_optional:
            raise UserError(f"model: {name} takes a vocabulary, and {dataset.name} has no texts.")
        if one.name in facts and facts[one.name] is not None:
            arguments[one.name] = facts[one.name]
        elif not is_optional:
            raise UserError(
                f"model: {name} takes {one.name}, and what it can get is {', '.join(facts)}: "
                f"give {one.name} a default value."
            )

    def make() -> nn.Module:
        try:
            model = function(**arguments)
        except (Exception, SystemExit) as error:  # whatever the user's own code may raise
            raise UserError(
                f"model: {name} cannot make a model: {describe_error(error, path)}."
            ) from error
        if not isinstance(model, nn.Module):
            raise UserError(f"model: {name} must return an nn.Module, not {type(model).__name__}.")
        return model

    return make


def code_versions(config: Config) -> dict[str, str]:
    """Return the digests of the code that is not this package's, and the packages' versions."""
    found: dict[str, str] = {}
    for name in config.methods:
        module, package = find_code(name)
        if package:
            found[package[0]] = package[1]
        if module and module != "__main__" and (digest := digest_code(module)):
            found[f"method {name.partition('+')[0]}"] = f"sha256:{digest}"
    if is_reference(config.model) and (digest := digest_code(module_of(str(config.model)))):
        found["model"] = f"sha256:{digest}"
    return found
