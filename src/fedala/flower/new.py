"""A folder for `flwr run`: an app that runs a method of this package, with every option in its pyproject.toml."""

import os
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedala.errors import UserError
from fedala.flower.experiment import LOCAL, Deployment
from fedala.runs.config import Config, toml
from fedala.runs.folder import nearest_existing_parent

APP = '''"""The app that `flwr run` starts. For data and a model of your own, give both functions a fedala.flower.Own."""

from fedala.flower import client_app, server_app

client = client_app()
server = server_app()
'''

PROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
description = "{method} on Flower, by fedala"
requires-python = ">=3.11"
# Leave fedala out: Flower installs these from a package index, and fedala is not on one.
# Install it on the server and on every node from a copy of its repository: see docs/deployment.md.
dependencies = []

[tool.flwr.app]
publisher = "fedala"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"

# For one run: flwr run . --run-config "rounds=100 experiment='second'"
[tool.flwr.app.config]
{options}
# Hyperparameters, such as "fedala.eta" = 0.5
[tool.flwr.app.config.set]
{hyperparameters}
"""


def check(folder: Path) -> None:
    """Refuse a folder that cannot take an app, before any work is done."""
    try:
        if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is not empty, or not a folder: choose another.")
        parent = nearest_existing_parent(folder)
        if not parent.is_dir():
            raise UserError(f"The app cannot be written to {folder}: {parent} is not a folder.")
    except OSError as error:
        raise UserError(f"The app cannot be written to {folder}: {error.strerror}.") from None


def write(folder: Path, config: Config, deployment: Deployment) -> None:
    """Writes an app folder. `config` has its values resolved: what stands in the file can be set for a run."""
    check(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        options = [*_options(config, {"set", *LOCAL}), *_options(deployment)]
        hyperparameters = [f"{toml(key)} = {toml(value)}" for key, value in config.set.items()]
        name = "".join(
            c if c.isascii() and c.isalnum() else "-" for c in folder.resolve().name.lower()
        ).strip("-")
        text = PROJECT.format(
            name=name or "fedala-app",
            method=config.method,
            options="\n".join(options) + "\n",
            hyperparameters="\n".join(hyperparameters),
        )
        (folder / "pyproject.toml").write_text(text, encoding="utf-8")
        (folder / "app.py").write_text(APP, encoding="utf-8")
    except OSError as error:
        raise UserError(f"The app cannot be written to {folder}: {error.strerror}.") from None


def _options(options: Any, without: Collection[str] = ()) -> list[str]:
    """Each option with what it is for."""
    lines = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in without and value is not None:
            lines.append(f"{field.name} = {toml(value)}  # {field.metadata['help']}")
    return lines
