"""An app folder for `flwr run`: it runs a method of fedala, with all options in pyproject.toml."""

import os
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedala.errors import UserError
from fedala.flower.experiment import EVALUATION_OPTIONS, SIMULATION_OPTIONS, Deployment
from fedala.io.files import write_folder
from fedala.io.user_code import module_name, read_source
from fedala.runs.config import Config
from fedala.runs.config_values import toml
from fedala.runs.folder import nearest_existing_parent
from fedala.simulation.participation import draw_participants

APP = '''"""The app that `flwr run` starts.

For your own data and model, pass a `fedala.flower.CustomApp` to both functions. Flower's mods, such
as LocalDpMod(…) of flwr.clientapp.mod, go into the list `mods`; the first is the outermost.
"""

{imports}from fedala.flower import client_app, server_app
{registrations}
client = client_app(mods=[])
server = server_app()
'''

PROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
description = "{method} on Flower, by fedala"
requires-python = ">=3.11"
# Leave fedala out: Flower installs these from a package index, and fedala is not on one.
# Install it with the SuperLink and on every node, from its repository: see docs/deployment.md.
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


def check_app_folder(folder: Path) -> None:
    """Refuse a folder that cannot hold a new app, before any work is done."""
    try:
        if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is not empty, or not a folder: choose another.")
        parent = nearest_existing_parent(folder)
        if not parent.is_dir():
            raise UserError(f"The app cannot be written to {folder}: {parent} is not a folder.")
    except OSError as error:
        raise UserError(f"The app cannot be written to {folder}: {error.strerror}.") from None


def choose_deployment(folder: Path, config: Config) -> Deployment:
    """Return the options of a new app's federation.

    The experiment has the app's name, so that two apps do not share a run folder and client states.
    A round waits for as many nodes as take part in it.
    """
    population = config.clients or Deployment.min_nodes
    joined = len(draw_participants(config.seed, 1, population, config.join_ratio))
    return Deployment(experiment=_make_project_name(folder), min_nodes=joined)


def write_app(folder: Path, config: Config, deployment: Deployment) -> None:
    """Write an app folder. `config` has all its values resolved, so that a run can change each.

    The files that the config imports become parts of the app.
    """
    check_app_folder(folder)
    code = [(module_name(name), read_source(name)) for name in config.import_names]
    for name, _ in code:
        if name == "app" or not all(part.isidentifier() for part in name.split(".")):
            raise UserError(f"A module called {name} cannot be a part of an app: rename it.")
    hyperparameters = [f"{toml(key)} = {toml(value)}" for key, value in config.set.items()]
    hidden = {"set", "imports", *SIMULATION_OPTIONS, *EVALUATION_OPTIONS}
    options = [*_list_options(config, hidden), *_list_options(deployment)]
    project = PROJECT.format(
        name=_make_project_name(folder),
        method=config.method,
        options="\n".join(options) + "\n",
        hyperparameters="\n".join(hyperparameters),
    )
    program = _write_imports([name for name, _ in code])
    contents = {"pyproject.toml": project.encode(), "app.py": program.encode()}
    contents |= {f"{name}.py": source for name, source in code if source is not None}
    write_folder(folder, contents)


def _write_imports(modules: Collection[str]) -> str:
    """Return the app's program. It registers the methods of modules, on the server and nodes."""
    if not modules:
        return APP.format(imports="", registrations="")
    imports = "".join(f"import {module}\n" for module in modules)
    calls = "".join(f"register_module({module})\n" for module in modules)
    return APP.format(
        imports=imports,
        registrations=f"from fedala.methods import register_module\n\n{calls}",
    )


def _make_project_name(folder: Path) -> str:
    letters = (c if c.isascii() and c.isalnum() else "-" for c in folder.resolve().name.lower())
    return "".join(letters)[:100].strip("-") or "fedala-app"


def _list_options(options: Any, without: Collection[str] = ()) -> list[str]:
    """Return a line for each option, with its help as a comment."""
    lines = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in without and value is not None:
            lines.append(f"{field.name} = {toml(value)}  # {field.metadata['help']}")
    return lines
