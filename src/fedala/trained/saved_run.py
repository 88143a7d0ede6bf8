"""Find the run whose models are wanted: one method of a run folder, with one seed."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedala.data.preprocessing import Preprocessing
from fedala.errors import UserError
from fedala.io.files import DamagedFile
from fedala.metrics import Metric
from fedala.options import name_option, suggest
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder
from fedala.runs.models import Clients
from fedala.runs.resumable_options import resume_command
from fedala.runs.sweep import list_labels
from fedala.runs.verified_files import CLIENTS


@dataclass(frozen=True)
class SavedRun:
    """The models of one run: of its last evaluation, or of its best one."""

    folder: RunFolder
    config: Config
    methods: tuple[str, ...]
    """All methods of the folder whose models were saved."""
    method: str
    seed: int
    best: bool
    clients: Clients
    """Whose models there are; None: the global one."""
    metric: Metric
    """What the scores of the run measure."""

    @property
    def has_personal_models(self) -> bool:
        return self.clients != {None}

    def read(self, client: int | None) -> dict[str, Tensor]:
        """Return a saved model's tensors by name, verified."""
        return self.folder.model(self.method, self.seed, client, best=self.best)

    def read_preprocessing(self) -> Preprocessing | None:
        """Return what the models are fed; None if an older version wrote the folder."""
        return self.folder.preprocessing()

    def read_client_names(self) -> tuple[str, ...]:
        """Return the names of the clients; none if the data did not name them."""
        names = self.folder.client_names()
        if names and len(names) != self.config.clients:
            raise DamagedFile(
                f"{self.folder.path / CLIENTS} is damaged: it has {len(names)} names for "
                f"{self.config.clients} clients."
            )
        return names


def find_run(path: Path, method: str | None, seed: int | None, *, best: bool) -> SavedRun:
    """Find a run by its method, which may be left out if there is one, and its seed, or the first.

    Refuses a folder without such models, and says which there are.
    """
    folder = RunFolder.open(path)
    config = folder.config()
    saved = folder.models.list_saved(best=best)
    labels = [label for label in list_labels(config) if label in {name for name, _ in saved}]
    if not labels:
        raise UserError(_explain_missing(folder, config, best))
    chosen = _choose_method(path, method, labels, list_labels(config), best)
    seeds = sorted(number for name, number in saved if name == chosen)
    if seed is not None and seed not in seeds:
        raise UserError(
            f"{path} has no models of {chosen} with the seed {seed}; "
            f"{_enumerate('seed', map(str, seeds))}."
        )
    number = seeds[0] if seed is None else seed
    rows = folder.history().get(chosen)
    if not rows:
        raise DamagedFile(f"{path / 'history.csv'} is damaged: it has no row of {chosen}.")
    clients, metric = saved[chosen, number], rows[0].metric
    return SavedRun(folder, config, tuple(labels), chosen, number, best, clients, metric)


def _choose_method(
    path: Path, method: str | None, labels: list[str], all_labels: list[str], best: bool
) -> str:
    if method is None:
        if len(labels) > 1:
            raise UserError(
                f"{path} has models of several methods: name one of {list_few(labels)}, as in "
                f"{name_option('method', labels[-1])}."
            )
        return labels[0]
    chosen = method.strip().lower()
    if chosen in labels:
        return chosen
    if chosen in all_labels:
        which = "the best evaluation of " if best else ""
        raise UserError(
            f"{path} has no models of {which}{chosen} yet, because that method is not finished; "
            f"{_enumerate('method', labels)}."
        )
    raise UserError(
        f"{path} has no method {method!r}{suggest(chosen, labels)}; {_enumerate('method', labels)}."
    )


def _explain_missing(folder: RunFolder, config: Config, best: bool) -> str:
    """Say why a folder has no models, and what to do."""
    path = folder.path
    if best and folder.models.list_saved():
        return (
            f"{path} has the models of the last evaluation, and not of the best one: leave out "
            "best, or run it again with save_best."
        )
    if not config.save_models and not (best and config.save_best):
        return (
            f"{path} has no models, because save_models was off: run it again without that option."
        )
    return (
        f"{path} has no models yet: they are saved when a method ends. "
        f"Continue it with {resume_command(config, path)}."
    )


def _enumerate(noun: str, values: Iterable[str]) -> str:
    values = list(values)
    verb = f"the only {noun} is" if len(values) == 1 else f"the {noun}s are"
    return f"{verb} {list_few(values)}"


def list_few(values: list[str]) -> str:
    """Return values as in a sentence, the first twelve of many."""
    shown = ", ".join(values[:12])
    return shown if len(values) <= 12 else f"{shown} and {len(values) - 12} more"
