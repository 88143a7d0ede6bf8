"""What a method of a run folder is called beside those of other folders."""

from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedala.errors import UserError, printable
from fedala.methods import catalogue, list_changed_defaults, setting_prefixes
from fedala.report.runs import DEFAULTS, FREE_TO_DIFFER, Run
from fedala.runs.config_values import flatten_settings
from fedala.runs.results import MethodResult
from fedala.runs.sweep import split_label

#: Options that tell runs apart if no other does.
_EXTENT = ("rounds", "seed", "seeds")
_MOST_LETTERS = 40

Entry = tuple[Run, MethodResult, int]


def make_identity(run: Run, result: MethodResult) -> Hashable:
    """Return what two results have in common if they are the same: settings, seeds, figures."""
    rows = tuple((row.seed, row.round, repr(row.score), repr(row.loss)) for row in result.history)
    settings = tuple(sorted(_list_settings(run, result).items()))
    return result.method, result.metric, settings, rows


def label_results(entries: Sequence[Entry]) -> list[str]:
    """Return a label for each result: its title, and the options in which the runs differ.

    If options do not tell two of them apart, the folders' names do.
    """
    labels = [result.title for _, result, _ in entries]
    if len({group for _, _, group in entries}) > 1:
        names = _list_differing([run for run, _, _ in entries])
        labels = [
            _add_options(label, {name: _get_option(run, name) for name in names})
            for label, (run, _, _) in zip(labels, entries, strict=True)
        ]
        if not names:  # another split of the same data
            labels = _add_names(labels, entries)
    labels = _tell_apart(labels, [_list_settings(run, result) for run, result, _ in entries])
    extents = [{name: str(_get_option(run, name)) for name in _EXTENT} for run, _, _ in entries]
    labels = _tell_apart(labels, extents)
    counts = Counter(labels)
    return [
        label if counts[label] == 1 else named
        for label, named in zip(labels, _add_names(labels, entries), strict=True)
    ]


def _add_names(labels: Sequence[str], entries: Sequence[Entry]) -> list[str]:
    pairs = zip(labels, entries, strict=True)
    return [f"{label} · {run.name}" for label, (run, _, _) in pairs]


def _tell_apart(labels: Sequence[str], options: Sequence[dict[str, str]]) -> list[str]:
    """Add to labels that are equal those options in which their results differ."""
    found = list(labels)
    for label, count in Counter(labels).items():
        places = [place for place, other in enumerate(labels) if other == label]
        names = dict.fromkeys(name for place in places for name in options[place])
        differing = [
            name for name in names if len({options[place].get(name) for place in places}) > 1
        ]
        for place in places if count > 1 else ():
            shown = {name: options[place].get(name, "default") for name in differing}
            found[place] = _add_options(label, shown)
    return found


def _add_options(label: str, options: dict[str, Any]) -> str:
    texts = [f"{name}={_format(value)}" for name, value in options.items()]
    return ", ".join([label, *texts])


def _format(value: Any) -> str:
    """Return a value as text. The page may be published: it names files, and not their paths."""
    if value is None:
        return "default"
    if isinstance(value, float):
        return f"{value:g}"
    text = Path(value).name or value if isinstance(value, str) else str(value)
    return printable(text, _MOST_LETTERS)


def _list_settings(run: Run, result: MethodResult) -> dict[str, str]:
    """Return the method's own hyperparameters as text: the defaults, and what the config sets."""
    method, _ = split_label(result.method)
    prefixes, known = setting_prefixes(method), catalogue()
    own: dict[str, Any] = {}
    for prefix in prefixes:
        defaults = known[prefix].defaults() if prefix in known else {}
        own |= {f"{prefix}.{name}": default for name, (default, _) in defaults.items()}
    # A run that does not state them is older than their change.
    own |= {key: former for key, (former, _) in list_changed_defaults([method]).items()}
    with suppress(UserError):  # a folder from elsewhere
        settings = flatten_settings(run.config.get("set", {}))
        own |= {name: settings[name] for name in settings if name.split(".")[0] in prefixes}
    # Both prefixes of FedALA mean the same; those of `ditto+ala` do not.
    hidden = prefixes[:1] if "+" in method else prefixes
    shown = {}
    for name, value in own.items():
        prefix, _, rest = name.partition(".")
        shown[rest if prefix in hidden else name] = _format(value)
    return shown


def _list_differing(runs: Sequence[Run]) -> list[str]:
    """Return the options in which the runs differ and by which their scores may differ."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    return [
        name
        for name in names
        if name not in FREE_TO_DIFFER and len({str(_get_option(run, name)) for run in runs}) > 1
    ]


def _get_option(run: Run, name: str) -> Any:
    """Return an option of a run; folders of earlier versions lack those that are newer."""
    return run.config.get(name, DEFAULTS.get(name))
