"""Which options may change when a run is resumed, and which make it the run that it is."""

from collections.abc import Mapping
from typing import Any

from fedala.errors import UserError
from fedala.runs.config import Config, flatten_settings

#: The options that may change. Device and lanes change results by rounding only. `resume.py`
#: refuses other rounds for a method whose schedule depends on them.
CHANGEABLE = (
    "rounds", "data_dir", "device", "lanes", "client_memory", "feature_memory", "on_divergence",
    "record_weights", "save_models", "save_best", "checkpoint_every", "keep_checkpoint",
)  # fmt: skip


def change_config(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the config of a run that is resumed; refuse a change of any other option."""
    settings = {**config.set, **flatten_settings(changes.get("set", {}))}
    changed = Config.from_values({**config.values(), **changes, "set": settings})
    differences = [
        f"{name} ({change})"
        for name, change in config.differences(changed).items()
        if name not in CHANGEABLE
    ]
    if differences:
        raise UserError(
            "A run that is resumed must stay what it is, and this would change "
            f"{', '.join(differences)}. What may change is {', '.join(CHANGEABLE)}."
        )
    return changed


def identify(config: Config) -> dict[str, Any]:
    """Return the options that may not change."""
    return {name: value for name, value in config.values().items() if name not in CHANGEABLE}
