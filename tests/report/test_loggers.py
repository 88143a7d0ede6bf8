"""Live loggers: every evaluation is logged once, and a logger that fails does not stop the run."""

import sys
import types

import pytest
from typer.testing import CliRunner

from fedala.cli import app as cli
from fedala.errors import UserError
from fedala.records import HistoryRow
from fedala.report import loggers
from fedala.report.loggers import Loggers
from fedala.runs.folder import RunFolder


def row(seed, round, accuracy):
    return HistoryRow(seed, round, accuracy, loss=1.0, score_joined=accuracy)


def log_rounds(names, folder, rounds, **options):
    with Loggers(names, folder, {"rounds": 5, "lr": 0.1}, **options) as live:
        for round in rounds:
            for seed in (0, 1):
                live.row("ditto+ala", row(seed, round, round / 10 + seed))


def read_events(folder):
    """Return what TensorBoard shows: the steps of each run with their values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for path in sorted({file.parent for file in folder.rglob("events.out.*")}):
        logged = EventAccumulator(str(path), purge_orphaned_data=True)
        logged.Reload()
        found[str(path.relative_to(folder))] = {
            name: [(event.step, event.value) for event in logged.Scalars(name)]
            for name in logged.Tags()["scalars"]
        }
    return found


@pytest.mark.filterwarnings("default")  # those of TensorBoard's own packages
def test_tensorboard_has_every_step_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    log_rounds(["tensorboard"], tmp_path, range(5))
    log_rounds(["tensorboard"], tmp_path, range(3, 6))  # resumed from a checkpoint after round 2
    found = read_events(tmp_path / "tensorboard")
    assert set(found) == {"ditto+ala/seed-0", "ditto+ala/seed-1"}
    for seed in (0, 1):
        scalars = found[f"ditto+ala/seed-{seed}"]
        assert set(scalars) == {
            "accuracy", "loss", "accuracy_joined", "sent", "uploaded", "diverged", "seconds",
        }  # fmt: skip
        assert [step for step, _ in scalars["accuracy"]] == list(range(6))
        assert [value for _, value in scalars["accuracy"]] == pytest.approx(
            [r / 10 + seed for r in range(6)]
        )


class FakeWandB(types.ModuleType):
    """The part of wandb that we use: it continues known runs and drops steps before the last."""

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.settings, self.finished = {}, [], 0

    def init(self, **settings):
        self.settings.append(settings)
        assert settings["resume"] == "allow"
        steps = self.runs.setdefault(settings["id"], {})

        def log(figures, step):
            if step >= max(steps, default=0):
                steps[step] = figures

        def finish():
            self.finished += 1

        return types.SimpleNamespace(log=log, finish=finish)


def test_weights_and_biases_continues_the_same_runs(tmp_path, monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log_rounds(["wandb"], tmp_path, range(4))
    log_rounds(["wandb"], tmp_path, range(3, 6))
    assert len(fake.runs) == 2
    assert fake.finished == 4
    for seed, steps in enumerate(fake.runs.values()):
        assert {step: logged["accuracy"] for step, logged in steps.items()} == {
            r: r / 10 + seed for r in range(6)
        }
    assert fake.settings[0]["config"] == {"rounds": 5, "lr": 0.1, "method": "ditto+ala", "seed": 0}
    (tmp_path / "log-id").unlink()  # as when a folder is replaced by a new run
    log_rounds(["wandb"], tmp_path, range(1))
    assert len(fake.runs) == 4


class FakeMLflow(types.ModuleType):
    """The part of mlflow that we use; a metric that is logged twice is there twice."""

    def __init__(self):
        super().__init__("mlflow")
        self.experiments, self.tags, self.metrics, self.params, self.ended = [], {}, {}, {}, []
        self.MlflowClient = lambda: self

    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name):
        self.experiments.append(name)
        return name

    def search_runs(self, experiments, wanted):
        assert experiments == ["fedala"]
        own = [
            run for run, tags in self.tags.items() if wanted == f"tags.fedala = '{tags['fedala']}'"
        ]
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=run)) for run in own]

    def create_run(self, experiment, tags, run_name):
        self.tags[run_name] = tags
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_name))

    def log_param(self, run, key, value):
        self.params.setdefault(run, {})[key] = value

    def log_metric(self, run, key, value, step):
        self.metrics.setdefault((run, key), []).append(
            types.SimpleNamespace(step=step, value=value)
        )

    def get_metric_history(self, run, key):
        return self.metrics.get((run, key), [])

    def set_terminated(self, run):
        self.ended.append(run)


def test_mlflow_continues_the_same_runs(tmp_path, monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    log_rounds(["mlflow"], tmp_path / "", range(4))
    log_rounds(["mlflow"], tmp_path / "", range(2, 6))
    assert fake.experiments == ["fedala"]
    assert len(fake.tags) == 2
    for (run, key), logged in fake.metrics.items():
        assert [one.step for one in logged] == list(range(6)), key
        assert fake.params[run]["rounds"] == 5
    assert len(fake.ended) == 4


def test_a_run_logs_what_its_history_says(tmp_path, monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    arguments = [
        "run",
        "--method",
        "fedavg",
        "--rounds",
        "2",
        "--clients",
        "3",
        "--batch-size",
        "50",
        "--log",
        "mlflow",
    ]
    result = CliRunner().invoke(
        cli.app, [*arguments, "--no-save-models", "--out", str(tmp_path / "run")]
    )
    assert result.exit_code == 0, result.output
    history = RunFolder(tmp_path / "run").rows("history.csv")
    for (_, key), logged in fake.metrics.items():
        wanted = [
            (row["round"], row[key]) for row in history if row[key] is not None
        ]  # the last does not train
        assert [(one.step, one.value) for one in logged] == wanted
    [logged] = fake.params.values()
    assert (logged["batch_size"], logged["model"], logged["method"]) == (50, "cnn", "fedavg")


def test_a_logger_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no connection\nand more")

    broken, fake = types.ModuleType("wandb"), FakeMLflow()
    broken.init = fail
    monkeypatch.setitem(sys.modules, "wandb", broken)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    messages = []
    log_rounds(["wandb", "mlflow"], tmp_path, range(3), complain=messages.append)
    assert messages == ["Logging to wandb failed (no connection). The run continues without it."]
    assert all(len(logged) == 3 for logged in fake.metrics.values())


def test_unknown_and_missing_loggers_are_refused(tmp_path, monkeypatch):
    with pytest.raises(
        UserError, match=r"There is no logger 'tensorbord' \(did you mean tensorboard\?\)"
    ):
        loggers.check(["tensorbord"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        UserError, match=r"Logging to wandb needs wandb: pip install 'fedala\[wandb\]'"
    ):
        loggers.check(["wandb"])
