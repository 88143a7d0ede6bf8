"""Live loggers: send every evaluation to TensorBoard, Weights & Biases or MLflow.

Every method and seed is a run of its own there. A resumed run continues it, and no step is logged
twice.
"""

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from fedala.errors import UserError, first_line, import_optional
from fedala.options import suggest
from fedala.records import HistoryRow


class Logger(Protocol):
    """Logs the figures of one method and seed."""

    def log(self, figures: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir RUN`."""

    def __init__(self, folder: Path, method: str, seed: int, config: Mapping[str, Any]) -> None:
        self.package = import_optional(
            "torch.utils.tensorboard", "tensorboard", "tensorboard", "Logging to TensorBoard"
        )
        self.folder = folder / "tensorboard" / method / f"seed-{seed}"
        self.writer: Any = None

    def log(self, figures: Mapping[str, float], step: int) -> None:
        if self.writer is None:  # purge_step hides later steps that an interrupted run wrote
            self.writer = self.package.SummaryWriter(self.folder, purge_step=step, flush_secs=10)
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class WandB:
    """Weights & Biases, in the project fedala; it skips steps that it already has."""

    def __init__(self, folder: Path, method: str, seed: int, config: Mapping[str, Any]) -> None:
        package = import_optional("wandb", "wandb", "wandb", "Logging to Weights & Biases")
        self.run = package.init(
            project="fedala",
            group=folder.resolve().name,
            name=f"{method}, seed {seed}",
            id=_identity(folder, method, seed),
            resume="allow",
            reinit="create_new",
            dir=folder,
            config={**config, "method": method, "seed": seed},
        )

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self.run.log(dict(figures), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """MLflow, in the experiment fedala of the tracking server that its own settings name."""

    def __init__(self, folder: Path, method: str, seed: int, config: Mapping[str, Any]) -> None:
        package = import_optional("mlflow", "mlflow", "mlflow", "Logging to MLflow")
        self.client = package.MlflowClient()
        own = self.client.get_experiment_by_name("fedala")
        experiment_id = own.experiment_id if own else self.client.create_experiment("fedala")
        identity = _identity(folder, method, seed)
        runs = self.client.search_runs([experiment_id], f"tags.fedala = '{identity}'")
        if runs:
            self.run = runs[0].info.run_id
            history = self.client.get_metric_history(self.run, "loss")
            self.last = max((metric.step for metric in history), default=-1)
        else:
            name = f"{folder.resolve().name}, {method}, seed {seed}"
            tags = {"fedala": identity}
            created = self.client.create_run(experiment_id, tags=tags, run_name=name)
            self.run = created.info.run_id
            self.last = -1
            for key, value in {**config, "method": method, "seed": seed}.items():
                self.client.log_param(self.run, key, value)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        if step > self.last:
            for name, value in figures.items():
                self.client.log_metric(self.run, name, value, step=step)

    def close(self) -> None:
        self.client.set_terminated(self.run)


KINDS: dict[str, tuple[type[Any], str]] = {
    "tensorboard": (TensorBoard, "torch.utils.tensorboard"),
    "wandb": (WandB, "wandb"),
    "mlflow": (MLflow, "mlflow"),
}


def check(names: Sequence[str]) -> None:
    """Refuse loggers that are unknown or not installed, before any work is done."""
    for name in names:
        if name not in KINDS:
            raise UserError(f"There is no logger {name!r}{suggest(name, KINDS)}.")
        import_optional(KINDS[name][1], name, name, f"Logging to {name}")


class Loggers:
    """The loggers of a run.

    `with Loggers(["tensorboard"], folder, config) as loggers: run(…, on_row=loggers.row)`

    A logger that fails is reported once and not used again; the run continues.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        config: Mapping[str, Any] | None = None,
        complain: Callable[[str], None] = print,
    ) -> None:
        check(names)
        self.names = list(dict.fromkeys(names))
        self.folder, self.config, self.complain = folder, config or {}, complain
        self.open: dict[tuple[str, str, int], Logger] = {}

    def row(self, method: str, row: HistoryRow) -> None:
        """Log one run's evaluation of a round."""
        figures = {
            name: float(value)
            for name, value in row.columns().items()
            if isinstance(value, Real) and name not in ("seed", "round")
        }
        for name in list(self.names):
            key = (name, method, row.seed)
            try:
                if key not in self.open:
                    self.open[key] = KINDS[name][0](self.folder, method, key[2], self.config)
                self.open[key].log(figures, row.round)
            except Exception as error:
                self.names.remove(name)
                self.complain(
                    f"Logging to {name} failed ({first_line(error)}). The run continues without it."
                )

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, *exception: object) -> None:
        for (name, *_), logger in self.open.items():
            try:
                logger.close()
            except Exception as error:
                self.complain(f"The last log entries may not reach {name} ({first_line(error)}).")


def _identity(folder: Path, method: str, seed: int) -> str:
    """Return a run's identity: the same after a resume, a new one for a new run in the folder."""
    path = folder / "log-id"
    if not path.exists():
        path.write_text(secrets.token_hex(16), encoding="utf-8")
    own = path.read_text(encoding="utf-8")
    return hashlib.sha256(f"{own}/{method}/{seed}".encode()).hexdigest()[:32]
