"""The fields of `Config` as options of a command, so that no option is declared twice."""

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedala.cli.completion import completion_of
from fedala.errors import UserError
from fedala.options import flag_of
from fedala.runs.config import Config

#: The panels of `fedala run --help`, by the field of `Config` at which each begins.
PANELS = {
    "method": "Methods",
    "dataset": "Data and model",
    "join_ratio": "Training",
    "optimizer": "Optimiser and schedule",
    "loss": "Loss",
    "local_epochs": "Training",
    "server_optimizer": "Server optimiser",
    "seeds": "Runs and evaluation",
    "device": "Machine",
    "record_weights": "Files",
}

#: The options that can be given several times, and what they take.
REPEATABLE = {"imports": "FILE|MODULE", "set": "KEY=VALUE", "sweep": "KEY=VALUES"}

Command = Callable[..., None]


def config_options(*names: str) -> Callable[[Command], Command]:
    """Give a command the fields of `Config` (all, or those named) as options.

    They arrive as its `**values`: None if absent from the command line, otherwise text that
    `Config` converts and checks, as it does with the values of a file.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command).parameters.values()
        own = [parameter for parameter in signature if parameter.kind is not parameter.VAR_KEYWORD]
        kinds, panel, generated = typing.get_type_hints(Config), None, []
        for field in fields(Config):
            panel = PANELS.get(field.name, panel)
            if not names:
                generated.append(_parameter(field, kinds[field.name], panel))
            elif field.name in names:
                generated.append(_parameter(field, kinds[field.name], None))
        parameters = [*generated, *own]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameter(field: "Field[Any]", kind: Any, panel: str | None) -> inspect.Parameter:
    """Build the parameter of one field: its flag, its placeholder, its help and its default."""
    flag, text = flag_of(field.name), escape(field.metadata["help"])
    annotation: Any = str | None
    default = "" if field.default is None else str(field.default)
    placeholders = {int: "INTEGER", float: "NUMBER"}
    metavar = "|".join(field.metadata.get("choices") or ())
    metavar = metavar or placeholders.get(_without_none(kind), "TEXT")
    if _without_none(kind) is bool:
        annotation, metavar, flag = bool | None, "", f"{flag}/--no-{flag[2:]}"
        default = default and flag.split("/")[0 if field.default else 1]
    elif field.name in REPEATABLE:
        metavar = REPEATABLE[field.name]
        annotation, default = list[str] | None, ""
        text += "; can be given several times"
    if default:
        text += rf" [dim]\[default: {default}][/dim]"
    option = typer.Option(
        flag,
        metavar=metavar,
        help=text,
        show_default=False,
        rich_help_panel=panel,
        autocompletion=completion_of(field),
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[annotation, option],
    )


def _without_none(kind: Any) -> Any:
    """Return `int` for `int | None`."""
    return next((arm for arm in typing.get_args(kind) if arm is not type(None)), kind)


def given_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the options that the command line gives, with `set` and `sweep` as dicts."""
    given = {name: value for name, value in values.items() if value is not None and value != []}
    examples = {"set": "fedala.eta=0.5", "sweep": "lr=0.1,0.01"}
    tables: dict[str, dict[str, str]] = {}
    for name, example in examples.items():
        table = tables.setdefault(name, {})
        for text in given.pop(name, ()):
            key, equals, value = text.partition("=")
            if not equals:
                raise UserError(
                    f"--{name} {key} lacks its value: write it as in --{name} {example}."
                )
            if key.strip() in table:
                advice = "give all its values at once, separated by commas"
                advice = advice if name == "sweep" else "leave one of them out"
                raise UserError(f"--{name} {key.strip()} is given twice: {advice}.")
            table[key.strip()] = value.strip()
    if not tables["sweep"]:
        del tables["sweep"]
    if "imports" in given:
        given["imports"] = ",".join(given["imports"])
    return {**given, **tables}
