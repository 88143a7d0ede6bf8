"""Which options may change when a run is resumed, and which make it the run that it is."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedala.data.catalogue import find_known
from fedala.errors import UserError
from fedala.io.user_code import is_reference, module_name
from fedala.methods import find_package, list_methods, setting_prefixes
from fedala.methods.registry import ALIASES
from fedala.options import are_flags_used, name_option
from fedala.runs.config import Config
from fedala.runs.config_values import flatten_settings

#: The options that may change. Device and lanes change results by rounding only. Other code, in
#: another place or not, is noted like another version of the program. `resume.py`
#: refuses other rounds for a method whose schedule depends on them.
CHANGEABLE = (
    "rounds", "data_dir", "device", "lanes", "client_memory", "feature_memory", "on_divergence",
    "record_weights", "metrics_every", "save_models", "save_best", "checkpoint_every",
    "keep_checkpoint", "imports",
)  # fmt: skip


def change_config(config: Config, changes: Mapping[str, Any], folder: Path) -> Config:
    """Return the config of a run that is resumed; refuse a change of any other option.

    Methods and seeds may be added: `method` names them all, or after a `+` only the further ones.
    A config that names code is refused unless the changes name it, too. `folder` is the run's.
    """
    changes = dict(changes)
    if "imports" not in changes and (names := config.import_names):
        # Files whose methods an installed package brings by now are not needed.
        needed = [name for name in names if not find_package(module_name(name))]
        if len(needed) < len(names):
            config = replace(config, imports=",".join(needed) or None)
            if not needed:
                changes["imports"] = None
    _check_code_is_named(config, changes, folder)
    if isinstance(changes.get("method"), str):
        changes["method"] = _merge_methods(config, changes["method"])
    settings = {**config.set, **flatten_settings(changes.get("set", {}))}
    changed = Config.from_values({**config.values(), **changes, "set": settings})
    if changed.seeds < config.seeds:
        raise UserError(
            f"seeds is {changed.seeds}, and the run has {config.seeds} already: "
            "seeds can be added to a run, and not taken away."
        )
    additions = {"method", "seeds"}
    if not _changes_settings_of_own_methods(config, changed):
        additions.add("set")
    if config.has_own_model and changed.has_own_model:
        additions.add("model")  # the function may lie in another place by now
    # The same data and the same lists may lie in another place; their content is compared later.
    if is_data_path(config.dataset) and is_data_path(changed.dataset):
        additions.add("dataset")
    if _is_list_of_clients(config.partition) and _is_list_of_clients(changed.partition):
        additions.add("partition")
    differences = config.differences(changed)
    refused = [
        f"{name} ({change})"
        for name, change in differences.items()
        if name not in {*CHANGEABLE, *additions}
    ]
    if refused:
        raise UserError(
            "A run that is resumed must stay what it is, and this would change "
            f"{', '.join(refused)}. What may change is {', '.join(CHANGEABLE)}; "
            "further seeds and methods may be added."
        )
    if "rounds" in differences and has_additions(config, changed):
        raise UserError(
            "A run cannot get another number of rounds and further seeds or methods at once: "
            "resume it first with the one, then with the other."
        )
    return changed


def resume_command(config: Config, folder: Path, own: Sequence[str] = ()) -> str:
    """Return the command, or in Python the call, that resumes a run.

    It names the code that the run needs, and its `own` arguments, which must be given again.
    """
    options = [("resume", str(folder)), *(("imports", name) for name in config.import_names)]
    if is_reference(config.model):
        options.append(("model", str(config.model)))
    if are_flags_used():
        return " ".join(["fedala run", *(name_option(*option) for option in options)])
    given = {name: repr(value) for name, value in options}
    if len(config.import_names) > 1:
        given["imports"] = repr(list(config.import_names))
    given |= dict.fromkeys(own, "…")
    return f"fedala.run({', '.join(f'{name}={value}' for name, value in given.items())})"


def _check_code_is_named(config: Config, changes: Mapping[str, Any], folder: Path) -> None:
    """Refuse to execute code because a run folder names it: the user must name it, too."""
    is_missing = bool(config.import_names) and "imports" not in changes
    is_missing |= is_reference(config.model) and "model" not in changes
    if is_missing:
        raise UserError(
            f"The run in {folder} names code, which is executed only if you name it again: "
            f"use {resume_command(config, folder)} if you trust it."
        )


def is_data_path(dataset: str) -> bool:
    """Tell whether a dataset is given as a file or folder, and not by a name."""
    return not dataset.startswith("hub:") and find_known(dataset) is None


def _is_list_of_clients(partition: str | None) -> bool:
    return partition is not None and partition.endswith(".json")


def has_moved(before: Config, after: Config) -> bool:
    """Tell whether the data, or the lists of the clients' samples, lie in another place."""
    return (before.dataset, before.partition) != (after.dataset, after.partition)


def has_additions(before: Config, after: Config) -> bool:
    """Tell whether seeds or methods are added to a run."""
    return (before.method, before.seeds) != (after.method, after.seeds)


def _merge_methods(config: Config, given: str) -> str:
    """Return the methods of a run with those that are added behind them."""
    is_addition = given.strip().startswith("+")
    names = [name.strip().removeprefix("+") for name in given.split(",")]
    if given == "all":
        names = list_methods()
    chosen = Config.from_values({"method": ",".join(names)}).methods
    own = [_resolve_alias(name) for name in config.methods]
    missing = [name for name in own if name not in map(_resolve_alias, chosen)]
    if missing and not is_addition:
        raise UserError(
            f"method is {given}, and the run has {', '.join(missing)}, too: methods can be added "
            f"to a run, as in {name_option('method', '+ditto')}, and not taken away."
        )
    added = [name for name in chosen if _resolve_alias(name) not in own]
    return ",".join([config.method, *added])


def _resolve_alias(name: str) -> str:
    return ALIASES.get(name, name)


def _changes_settings_of_own_methods(before: Config, after: Config) -> bool:
    """Tell whether a hyperparameter changes of a method that the run has already."""
    prefixes = {prefix for name in before.methods for prefix in setting_prefixes(name)}
    changed = [key for key, value in after.set.items() if before.set.get(key) != value]
    return any(key.partition(".")[0] in prefixes for key in changed)


#: Options that every run has named since the first version that recorded an identity.
FIRST_OPTIONS = {
    "method", "set", "dataset", "model", "partition", "partition_seed", "clients", "join_ratio",
    "batch_size", "lr", "local_epochs", "shuffle", "seeds", "seed", "eval_every", "eval_clients",
    "validation", "precision",
}  # fmt: skip


def identify(config: Config) -> dict[str, Any]:
    """Return the options that may not change.

    Later options count only if they are used, so that older runs keep their identity.
    """
    usual = Config().values()
    values = {
        name: value
        for name, value in config.values().items()
        if name not in CHANGEABLE and (name in FIRST_OPTIONS or value != usual[name])
    }
    return {**values, "model": "own" if config.has_own_model else config.model}
