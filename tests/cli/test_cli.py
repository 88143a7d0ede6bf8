"""The command line: its options, its output, and one sentence for every mistake.

Long because the commands share the runs that they are tested on.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import made_up
from typer.main import get_command
from typer.testing import CliRunner

import fedala
from fedala.cli import app as cli
from fedala.cli import run as run_command
from fedala.data import Dataset, federate, known_datasets, load, write_partition
from fedala.errors import UserError
from fedala.methods import catalogue
from fedala.models import mlp
from fedala.options import flag_of, use_flags
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder
from fedala.runs.resume import resume_advice

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(fedala.__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
}


def call(*arguments):
    return CliRunner().invoke(
        cli.app, [str(argument) for argument in arguments], prog_name="fedala"
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Work in an empty folder. Files of a test that must not be in it go to `tmp_path`."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


SMALL = (
    "--clients",
    4,
    "--batch-size",
    50,
    "--set",
    "fedala.max_epochs=2",
    "--set",
    "fedala.sample=0.1",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "both"
    result = call(
        "run",
        "--method",
        "fedala,fedavg",
        "--rounds",
        2,
        "--seeds",
        2,
        "--seed",
        3,
        "--model",
        "mlp",
        *SMALL,
        "--out",
        out,
    )
    assert result.exit_code == 0, result.output
    return RunFolder(out), result


def test_history_has_a_row_for_every_method_seed_and_round(finished):
    folder, _ = finished
    rows = folder.rows("history.csv")
    assert [(row["method"], row["round"], row["seed"]) for row in rows] == [
        (method, round, seed)
        for method in ("fedala", "fedavg")
        for round in range(3)
        for seed in (3, 4)
    ]
    assert all(0 <= row["accuracy"] <= 1 and row["loss"] > 0 and row["seconds"] > 0 for row in rows)


def test_summary_agrees_with_the_history(finished):
    folder, _ = finished
    summary = json.loads((folder.path / "summary.json").read_text(encoding="utf-8"))
    assert set(summary) == {
        "methods",
        "majority_share",
        "note",
        "rounds",
        "seeds",
        "seconds",
        "command",
        "data",
        "versions",
    }
    assert list(summary["methods"]) == ["fedala", "fedavg"]
    for name, method in summary["methods"].items():
        assert set(method) == {
            "title", "accuracy", "seconds_per_round", "total_seconds",
            "parameters_per_client_and_round", "client_rounds_that_diverged", "checkpoints",
            "best_models", "hyperparameters",
        }  # fmt: skip
        assert method["total_seconds"] > method["seconds_per_round"]
        assert method["client_rounds_that_diverged"] == 0
        checkpoints = folder.checkpoint_folder(list(summary["methods"]).index(name))
        sizes = [file.stat().st_size for file in checkpoints.glob("*.safetensors")]
        assert method["checkpoints"]["bytes"] == sum(sizes)
        runs = [
            [row.accuracy for row in folder.history()[name] if row.seed == seed] for seed in (3, 4)
        ]
        for key, values in (
            ("best", [max(run) for run in runs]),
            ("final", [run[-1] for run in runs]),
        ):
            figure = method["accuracy"][key]
            assert figure["runs"] == values
            assert figure["mean"] == pytest.approx(np.mean(values))
            assert figure["std"] == pytest.approx(np.std(values))


def test_models_can_be_loaded_by_name(finished):
    folder, _ = finished
    model = mlp(28 * 28, 10)
    for seed in (3, 4):
        for method, client in (
            ("fedavg", None),
            ("fedala", None),
            *(("fedala", client) for client in range(4)),
        ):
            model.load_state_dict(folder.model(method, seed, client))
            model.load_state_dict(folder.model(method, seed, client, best=True))
    assert len(list((folder.path / "models").rglob("*.safetensors"))) == 2 * 2 * (2 + 4)


def test_the_table_says_what_it_shows(finished):
    folder, result = finished
    summary = json.loads((folder.path / "summary.json").read_text(encoding="utf-8"))["methods"]
    for method in summary.values():
        line = next(line for line in result.stdout.splitlines() if method["title"] in line)
        for key in ("best", "final"):
            figure = method["accuracy"][key]
            assert f"{100 * figure['mean']:.2f} ± {100 * figure['std']:.2f}" in line
        assert f"{method['parameters_per_client_and_round']['together']:,}" in line
    assert "best round" in result.stdout
    assert "last round" in result.stdout
    assert "validation" not in result.stdout
    assert "participants" not in result.stdout
    assert "The best round is picked on test data, as in the paper." in result.stdout
    assert "The accuracy is that of the initialised personal models" in result.stdout
    assert result.stdout.count("For comparison, always the most frequent class: ") == 1
    assert result.stdout.splitlines()[-1] == f"Run folder: {folder.path}"


def test_a_run_ends_with_its_page(finished):
    folder, result = finished
    assert f"Report: {folder.path / 'report.html'}" in result.stdout
    assert "FedALA and FedAvg on digits" in (folder.path / "report.html").read_text(
        encoding="utf-8"
    )


def test_a_page_that_cannot_be_written_does_not_lose_the_run(here, monkeypatch):
    def fail(folders, **options):
        raise OSError("no room")

    monkeypatch.setattr(run_command.page, "write", fail)
    result = call("run", "--method", "fedavg", "--rounds", 1, "--out", "run", *SMALL[:4])
    assert result.exit_code == 0, result.output
    assert (
        "The report could not be written (no room); try again with: fedala report run"
        in result.stderr
    )
    assert result.stdout.splitlines()[-1] == "Run folder: run"
    assert (here / "run" / "summary.json").is_file()


def test_no_control_characters_where_there_is_no_terminal(finished):
    _, result = finished
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", result.output)
    assert re.search(
        r"^FedALA: round 2/2  accuracy [\d.]+ %  best [\d.]+ %  [\d.e-]+ s/round$",
        result.stderr,
        re.M,
    )


def test_the_saved_config_reproduces_the_run(finished, tmp_path):
    folder, _ = finished
    assert Config.read(folder.path / "config.toml")["set"] == {
        "fedala.max_epochs": "2",
        "fedala.sample": "0.1",
    }
    assert (
        call("run", "--config", folder.path / "config.toml", "--out", tmp_path / "again").exit_code
        == 0
    )
    again = RunFolder(tmp_path / "again")
    assert (again.path / "config.toml").read_text() == (folder.path / "config.toml").read_text()
    assert untimed(again) == untimed(folder)
    for file in (folder.path / "models").rglob("*.safetensors"):
        assert file.read_bytes() == (again.path / file.relative_to(folder.path)).read_bytes()


def untimed(folder):
    return [
        {name: repr(value) for name, value in row.items() if name != "seconds"}
        for row in folder.rows("history.csv")
    ]


def test_a_run_with_validation_and_few_participants_labels_both(here):
    options = ("--validation", 0.2, "--join-ratio", 0.5, "--no-save-models", *SMALL[:4])
    result = call("run", "--method", "fedavg", "--rounds", 1, *options)
    assert result.exit_code == 0, result.output
    assert "round picked by" in result.stdout
    assert "participants" in result.stdout
    assert "With ρ = 0.5, accuracy is that of all clients" in result.stdout
    [folder] = (here / "runs").iterdir()
    assert re.fullmatch(r"digits-fedavg-\d{8}-\d{6}-\d{3}", folder.name)
    assert not (folder / "models").exists()


def test_own_data_gives_a_folder_name_that_every_file_system_takes():
    config = Config(dataset="C:\\my data/β, new?.npz", method="ditto+ala,fedavg")
    assert re.fullmatch(r"[A-Za-z0-9._+-]{1,120}", run_command._folder_name(config))
    assert "ditto+ala-fedavg" in run_command._folder_name(config)


@pytest.fixture
def asked(monkeypatch, here):
    """Return a function that parses a command line to its config, without running it."""

    def ask(*arguments):
        seen = []

        def stop(config):
            seen.append(config)
            raise UserError("Stop.")

        monkeypatch.setattr(run_command, "plan", stop)
        result = call("run", *arguments)
        assert result.exit_code == 2, result.output
        return seen[0]

    return ask


def test_every_field_of_the_config_is_an_option():
    flags = {
        flag for parameter in get_command(cli.app).commands["run"].params for flag in parameter.opts
    }
    assert {flag_of(field.name) for field in fields(Config)} <= flags
    assert flag_of("batch_size") == "--batch-size"
    assert "--import" in flags


def test_the_help_teaches_every_option_and_its_default():
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", call("run", "--help").stdout).split())
    for field in fields(Config):
        assert field.metadata["help"].split()[0] in text
    for default in (
        "[default: fedala,fedavg]",
        "[default: 10]",
        "[default: given]",
        "[default: --shuffle]",
    ):
        assert default in text


def test_nothing_given_means_the_defaults(asked):
    assert asked() == Config()


def test_options_are_converted(asked):
    config = asked(
        "--clients",
        "7",
        "--lr",
        "1e-2",
        "--data-dir",
        "x",
        "--set",
        "fedala.eta=0.5",
        "--set",
        "ala.a=b=c",
    )
    assert (config.clients, config.lr, config.data_dir) == (7, 0.01, "x")
    assert config.set == {"fedala.eta": "0.5", "ala.a": "b=c"}


@pytest.mark.parametrize(("flag", "value"), [("--shuffle", True), ("--no-shuffle", False)])
def test_flags_are_what_they_say(asked, tmp_path, flag, value):
    (tmp_path / "my.toml").write_text(f"shuffle = {str(not value).lower()}")
    assert asked(flag).shuffle is value
    assert asked(flag, "--config", tmp_path / "my.toml").shuffle is value
    assert asked("--config", tmp_path / "my.toml").shuffle is not value


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(asked, tmp_path):
    (tmp_path / "my.toml").write_text(
        "clients = 7\nrounds = 5\nlanes = 2\n[set.fedala]\neta = 0.5\nlayers = 2\n"
    )
    config = asked("--config", tmp_path / "my.toml", "--clients", 20, "--set", "fedala.eta=0.1")
    assert config.clients == 20  # the default's value, but given
    assert (config.rounds, config.lanes, config.batch_size) == (5, "2", 10)
    assert config.set == {"fedala.eta": "0.1", "fedala.layers": 2}


def refused(result, says):
    assert result.exit_code == 2, result.output
    assert re.fullmatch(r"Error: [^\n]+\.\n", result.stderr), result.stderr
    assert says in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--method fedalla", "There is no method 'fedalla' (did you mean fedala?)"),
        ("--method local+ala", "local+ala is refused"),
        ("--method fedprox --set mu=0.5", "set mu: write fedprox.mu."),
        ("--method ditto+ala --set fedala.x=1", "fedala is not among the methods of this run"),
        ("--method fedala --set fedala.etta=1", "fedala.etta (did you mean fedala.eta?)"),
        ("--method fedala+x", "There is no method 'fedala+x'"),
        ("--dataset digit", "There is no dataset digit (did you mean digits?)"),
        ("--dataset nothing.npz", "There is no file or folder nothing.npz"),
        ("--model cnnn", "There is no model 'cnnn' (did you mean cnn?)"),
        ("--model fasttext", "fasttext reads texts"),
        ("--clients 0", "clients must be at least 1, not 0"),
        ("--clients -3", "clients must be at least 1, not -3"),
        ("--clients many", "clients must be a whole number, not 'many'"),
        ("--clients 1798", "1797 clients"),
        ("--rounds 0", "rounds must be at least 1, not 0"),
        ("--batch-size -1", "batch_size must be at least 0, not -1"),
        ("--local-epochs 0", "local_epochs must be at least 1"),
        ("--seeds 0", "seeds must be at least 1"),
        ("--lr 0", "lr must be greater than 0"),
        ("--lr nan", "lr must be a number"),
        ("--partition dir:0", "greater than 0"),
        ("--partition dir:-1", "greater than 0"),
        ("--partition dir:x", "dir:0.1"),
        ("--partition pathological:11", "not 11"),
        ("--partition mine.json", "There is no partition file mine.json"),
        ("--join-ratio 0", "join_ratio must be greater than 0"),
        ("--join-ratio 1.5", "join_ratio must be at most 1, not 1.5"),
        ("--validation 1", "validation must be at most 0.9"),
        ("--lanes 0", "lanes must be auto, all or a number from 1 on"),
        ("--device tpu", "device must be one of auto, cpu, cuda"),
        ("--set fedala.nope=1", "There is no option fedala.nope"),
        ("--set fedala.eta=abc", "fedala.eta must be a number, not 'abc'"),
        ("--set fedala.eta", "--set fedala.eta lacks its value"),
        ("--set fedprox.mu=1", "fedprox is not among the methods of this run (fedala, fedavg)"),
        ("--set eta=1", "set eta"),
        ("--set ala.layers=9", "layers"),
        ("--config nothing.toml", "cannot be read"),
        ("--log tensorbord", "There is no logger 'tensorbord' (did you mean tensorboard?)"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(here, arguments, says):
    refused(call("run", *arguments.split()), says)
    assert list(here.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda(here):
    refused(call("run", "--device", "cuda"), "there is no CUDA device here")
    assert list(here.iterdir()) == []


def csv_without_labels(path):
    (path / "my.csv").write_text("text,topic\nhello,1\n")
    return "--dataset", path / "my.csv"


def truncated_npz(path):
    np.savez(path / "my.npz", x=np.zeros((40, 28, 28), np.uint8), y=np.arange(40) % 2)
    content = (path / "my.npz").read_bytes()
    (path / "my.npz").write_bytes(content[: len(content) // 2])
    return "--dataset", path / "my.npz"


def pickled_npz(path):
    np.savez(
        path / "my.npz",
        x=np.zeros((4, 28, 28), np.uint8),
        y=np.array([0, 1, 0, "one"], dtype=object),
    )
    return "--dataset", path / "my.npz"


def broken_image(path):
    for name in ("cat", "dog"):
        (path / "pets" / name).mkdir(parents=True)
        (path / "pets" / name / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    return "--dataset", path / "pets"


def partition_of_other_data(path):
    other = Dataset("other", torch.zeros(100, 1), torch.arange(100) % 10, 10)
    write_partition(federate(other, "iid", 4), path / "other.json")
    return "--partition", path / "other.json"


def existing_folder(path):
    (path / "out").mkdir()
    return "--out", path / "out"


def existing_folder_that_is_not_a_run(path):
    (path / "out").mkdir()
    (path / "out" / "mine.txt").write_text("x")
    return "--out", path / "out", "--force"


def unknown_option_in_file(path):
    (path / "my.toml").write_text("cleints = 3")
    return "--config", path / "my.toml"


def file_that_is_not_toml(path):
    (path / "my.toml").write_text("clients: 3")
    return "--config", path / "my.toml"


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (csv_without_labels, "has no label column"),
        (truncated_npz, "is not a readable .npz file"),
        (pickled_npz, "pickled Python objects, which are never loaded"),
        (broken_image, "1.png is not a readable image"),
        (partition_of_other_data, "a partition fits one dataset only"),
        (existing_folder, "exists already"),
        (existing_folder_that_is_not_a_run, "part of a run"),
        (unknown_option_in_file, "has an unknown option cleints (did you mean clients?)"),
        (file_that_is_not_toml, "is not TOML"),
    ],
)
def test_a_bad_file_is_one_sentence_and_leaves_nothing(here, tmp_path, prepare, says):
    arguments = prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    refused(call("run", *arguments), says)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("arguments", [["run", "--nope"], ["nope"], ["run", "--clients"]])
def test_unknown_commands_and_options(here, arguments):
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert list(here.iterdir()) == []


def test_partition_shows_draws_and_saves_what_run_then_uses(here):
    result = call(
        "partition",
        "--clients",
        3,
        "--validation",
        0.2,
        "--plot",
        "split.png",
        "--save",
        "split.json",
    )
    assert result.exit_code == 0, result.output
    assert (here / "split.png").read_bytes().startswith(b"\x89PNG")
    rows = [line.split() for line in result.stdout.splitlines() if re.match(r"\s*\d", line)]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    samples, train, validation, test = (
        np.array([int(row[i]) for row in rows]) for i in range(1, 5)
    )
    assert samples.sum() == 1797
    assert (train + validation + test == samples).all()
    again = call("partition", "--partition", "split.json")
    assert [line.split() for line in again.stdout.splitlines() if re.match(r"\s*\d", line)] == rows
    refused(
        call("partition", "--partition", "split.json", "--clients", 20),
        "holds 3 clients, but 20 were asked for",
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plot", "split.xyz"], "split.xyz must end with .png, .pdf or .svg"),
        (["--plot", "no/split.png"], "its folder must exist"),
        (["--save", "split.txt"], "must end with .json"),
        (["--clients", "0", "--plot", "split.png"], "clients must be at least 1"),
    ],
)
def test_partition_refuses(here, arguments, says):
    refused(call("partition", *arguments), says)
    assert list(here.iterdir()) == []


def test_report_makes_one_page_of_several_folders(here):
    made_up(here / "one")
    made_up(here / "two", lr=0.5)
    assert call("report", "one").stdout == "Written: one/report.html\n"
    assert call("report", "one", "two", "--out", "both.html").stdout == "Written: both.html\n"
    assert "FedALA, lr=0.5" in (here / "both.html").read_text(encoding="utf-8")
    refused(call("report", "one", "two"), "name its file")
    refused(call("report", "three"), "There is no folder three")


def test_methods_lists_every_method_and_hyperparameter():
    text = call("methods").stdout
    rows = [" ".join(line.split()) for line in text.splitlines()]
    for entry in catalogue().values():
        with_ala = "+ala " if entry.takes_ala else ""
        row = f"{entry.name} {entry.title} {with_ala}{entry.summary}"
        assert sum(one.endswith(f" {row}") or one == row for one in rows) == 1
        for name, (_, explanation) in entry.defaults().items():
            line = next(line for line in text.splitlines() if f"{entry.name}.{name} " in line)
            assert explanation in line


def test_layers_shows_what_ala_blends():
    shown = call("layers", "--model", "cnn", "--dataset", "digits", "--layers", 2)
    assert shown.exit_code == 0
    rows = [line.split() for line in shown.output.splitlines()[1:]]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert [row[4] for row in rows] == ["fc2", "fc1", "conv2", "conv1"]
    assert [row[1] == row[3] for row in rows] == [True, True, False, False]
    by_name = call("layers", "--layers", "conv1,fc2").output.splitlines()
    assert [line.split()[3] for line in by_name[1:]] == ["5,130", "0", "0", "832"]
    assert call("layers", "--layers", "nothing").exit_code == 2


def test_datasets_lists_every_dataset():
    text = call("datasets").stdout
    for row in known_datasets():
        assert re.search(rf"^ *{row.name} .* {row.samples:,} ", text, re.M)


PROGRAM = [sys.executable, "-W", "error", "-m", "fedala"]


def test_the_version():
    answer = call("--version")
    assert answer.exit_code == 0
    assert answer.stdout.startswith("fedala ")
    assert f"torch {torch.__version__}" in answer.stdout


def test_a_mistake_in_a_real_process(here):
    """A console without Greek letters must not make it fail."""
    narrow = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    answer = subprocess.run(
        [*PROGRAM, "run", "--partition", "dir:0"], env=narrow, capture_output=True, text=True
    )
    assert answer.returncode == 2
    assert re.fullmatch(r"Error: The \? of a Dirichlet partition must be [^\n]+\.\n", answer.stderr)
    assert list(here.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="signals differ there")
def test_a_run_that_is_asked_to_stop_finishes_its_round_and_can_be_resumed(here):
    """By Ctrl+C. test_refusals.py sends the other signal, with checkpoints and without."""
    options = "--method fedavg --model mlp --batch-size 100 --rounds 100000 --clients 2 --out run"
    command = [*PROGRAM, "run", *options.split()]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        history = here / "run" / "history.csv"
        deadline = time.monotonic() + 60
        while not history.exists() or len(history.read_text().splitlines()) < 3:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in errors
    rounds = [row.round for row in RunFolder(here / "run").history()["fedavg"]]
    assert rounds == list(range(len(rounds)))
    with use_flags():
        advice = resume_advice(RunFolder(here / "run").config(), Path("run"))
    assert errors.splitlines()[-1] == f"Stopped after {len(rounds)} rounds of FedAvg; {advice}."
    assert "fedala run --resume run" in advice
    result = call("run", "--resume", "run", "--rounds", str(len(rounds) + 1))
    assert result.exit_code == 0
    assert [row.round for row in RunFolder(here / "run").history()["fedavg"]] == list(
        range(len(rounds) + 2)
    )


def test_ctrl_c_while_the_program_is_still_loading(here):
    (here / "torch.py").write_text("raise KeyboardInterrupt\n")
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{here}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"}
    answer = subprocess.run([*PROGRAM, "methods"], env=environment, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout, answer.stderr) == (130, "", "Interrupted.\n")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_folder_whose_name_no_terminal_should_see(here):
    name = os.fsdecode(b"odd-\xff\x1b[31m")
    result = call("run", "--method", "fedavg", "--rounds", 1, *SMALL[:4], "--out", name)
    assert result.exit_code == 0
    assert "Run folder: odd-��[31m" in result.stdout
    assert "Report: odd-��[31m/report.html" in result.stdout
    assert (here / name / "report.html").is_file()
    assert "\x1b[31m" not in result.output
    result = call("run", "--resume", name, "--rounds", 2)
    assert result.exit_code == 0
    result = call("run", "--resume", "gone\x1b[31m")
    assert (result.exit_code, "\x1b[31m" in result.stderr) == (2, False)


def test_resuming_takes_everything_from_its_folder(here):
    for arguments, sentence in (
        (["--resume", "nowhere"], "there is no config.toml in it"),
        (["--resume", "nowhere", "--force"], "--resume takes all options from its folder"),
        (["--resume", "nowhere", "--config", "x.toml"], "The config file x.toml cannot be read"),
    ):
        result = call("run", *arguments)
        assert result.exit_code == 2
        assert sentence in result.stderr


def test_the_core_needs_none_of_the_command_lines_packages():
    code = (
        "import sys; import fedala, fedala.runs.folder\n"
        "names = 'typer', 'click', 'rich', 'matplotlib', 'PIL', 'sklearn'\n"
        "print([name for name in names if name in sys.modules])\n"
        "sys.modules['typer'] = None; import fedala.cli.app"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert answer.stdout == "[]\n"
    assert answer.returncode == 2
    assert (
        answer.stderr
        == "Error: the command line needs typer and rich: pip install 'fedala[cli]'.\n"
    )


def test_clients_and_splits_of_files_are_said_aloud_and_named(here):
    x = np.random.RandomState(0).randint(0, 255, (24, 28, 28), np.uint8)
    users = np.array(["ada", "bob", "=eve"] * 8)
    parts = {"train": slice(0, 18), "test": slice(18, 24)}
    arrays = {f"x_{part}": x[rows] for part, rows in parts.items()}
    arrays |= {f"y_{part}": np.arange(24)[rows] // 3 % 2 for part, rows in parts.items()}
    arrays |= {f"user_{part}": users[rows] for part, rows in parts.items()}
    np.savez("people.npz", **arrays)
    shown = call("partition", "--dataset", "people.npz", "--clients", 2).stdout
    for client, name in enumerate(federate(load("people.npz"), clients=2).client_names):
        assert re.search(rf"^ +{client} +{name} +8 +6 +2 ", shown, re.M)
    said = [
        "The array user names 3 clients.",
        "2 of the 3 clients are drawn, by the seed of the partition.",
        "The split of the data is kept: 12 train, 4 test; --split pooled mixes them.",
    ]
    assert shown.splitlines()[-3:] == said
    options = ("--dataset", "people.npz", "--clients", 2, "--rounds", 1, "--method", "fedavg")
    result = call("run", *options, "--out", "run")
    assert result.exit_code == 0, result.output
    assert "natural over 2 clients" in result.stderr
    for sentence in said:
        assert sentence in result.stderr
    rows = RunFolder(here / "run").rows("split.csv")
    names = [row["client_name"] for row in rows]
    assert set(names) <= {"ada", "bob", "'=eve"}
    assert len(set(names)) == 2
    assert f"{rows[0]['client']} ({names[0]})" in (here / "run" / "report.html").read_text()
    assert call("run", "--resume", "run", "--rounds", 2).exit_code == 0
    refused(
        call("partition", "--dataset", "people.npz", "--clients-by", "usr"), "it needs usr_train"
    )
