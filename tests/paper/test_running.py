"""`fedala paper run`: cells run once, continue after a stop, and are skipped without data."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from paper_results import call, read_results
from rich.console import Console

from fedala.cells import processes, running
from fedala.cells.folders import read_histories, write_cell_file
from fedala.cells.progress import CellProgress
from fedala.errors import UserError
from fedala.paper.experiments import tables
from fedala.records import HistoryRow
from fedala.runs.folder import RunFolder

SETTING = "mnist-pathological"
COLUMN = next(column for column in tables()["table2"].columns if column.name == SETTING)


def run(data, out, *options, method="fedavg,fedala", rounds=2, seeds=1):
    fixed = (
        "--method",
        method,
        "--rounds",
        rounds,
        "--seeds",
        seeds,
        "--data-dir",
        data,
        "--out",
        out,
    )
    return call("run", "table2", "--columns", SETTING, *fixed, *options)


def read_lines(out):
    with (out / "results.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_without_times(folder):
    return [
        {key: repr(v) for key, v in row.items() if key != "seconds"}
        for row in RunFolder(folder).rows("history.csv")
    ]


class EndRecorder:
    """A `CellObserver` that records how cells end; `at_row` is called with every row."""

    def __init__(self, at_row=lambda cell, row: None):
        self.at_row, self.ends = at_row, []

    def row(self, cell, row):
        self.at_row(cell, row)

    def end(self, cell, outcome, reason=""):
        self.ends.append((cell, outcome))
        self.reason = reason


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    result = run(data, out, rounds=1, seeds=2)
    assert result.exit_code == 0, result.output
    return out, result


def test_every_cell_and_seed_has_a_line_that_matches_its_history(finished):
    out, result = finished
    assert "Cells: 2 run (of 2)." in result.stdout
    found = read_lines(out)
    assert [(line["method"], line["seed"]) for line in found] == [
        ("fedala", "0"),
        ("fedala", "1"),
        ("fedavg", "0"),
        ("fedavg", "1"),
    ]
    for line in found:
        rows = read_histories(out / SETTING / line["method"] / "seeds-0-1")[int(line["seed"])]
        accuracies = [row.accuracy for row in rows]
        assert float(line["best"]) == pytest.approx(max(accuracies), rel=1e-5)
        assert int(line["best_round"]) == accuracies.index(max(accuracies))
        assert float(line["final"]) == pytest.approx(accuracies[-1], rel=1e-5)
        assert (line["rounds"], line["shuffle"], line["data"]) == (
            "1",
            "false",
            "partial: 240 of 70000 samples",
        )


def test_the_presets_are_the_papers(finished):
    out, _ = finished
    config = RunFolder(out / SETTING / "fedala" / "seeds-0-1").config()
    assert (config.partition, config.lr, config.clients, config.shuffle) == (
        "pathological:2",
        0.1,
        20,
        False,
    )
    assert not (out / SETTING / "fedala" / "seeds-0-1" / "models").exists()


def test_finished_cells_have_no_checkpoint(finished):
    out, _ = finished
    assert not list(out.rglob("*.safetensors"))


def test_finished_cells_do_not_run_again(finished, data):
    out, _ = finished
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    result = run(data, out, rounds=1, seeds=2)
    assert "Cells: 2 finished before (of 2)." in result.stdout
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_shuffled_cell_is_another_cell(data, tmp_path):
    assert run(data, tmp_path, "--shuffle", method="fedavg", rounds=1).exit_code == 0
    assert [(line["method"], line["shuffle"]) for line in read_lines(tmp_path)] == [
        ("fedavg", "true")
    ]
    assert (tmp_path / SETTING / "fedavg,shuffled").is_dir()


def make_options(data, out, **options):
    return running.RunOptions(**{"out": out, "rounds": 3, "seeds": 1, "data_dir": data, **options})


def test_an_interrupted_cell_continues_to_the_same_result(data, tmp_path):
    cells, options = [COLUMN.cell("ditto")], make_options(data, tmp_path / "a", rounds=2)

    def interrupt(cell, row):
        if row.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.run_cells(cells, options, EndRecorder(interrupt))
    again = EndRecorder()
    running.run_cells(cells, options, again)
    running.run_cells(cells, make_options(data, tmp_path / "b", rounds=2), EndRecorder())
    part = f"{SETTING}/ditto/seeds-0-0"
    assert again.ends == [(f"{SETTING}/ditto", "done")]
    assert read_without_times(tmp_path / "a" / part) == read_without_times(tmp_path / "b" / part)


def count_checkpoint_rounds(folder):
    """Return the rounds of a run's last checkpoint."""
    return max((int(path.stem) for path in folder.rglob("checkpoint/**/[0-9]*.json")), default=0)


@pytest.mark.skipif(os.name == "nt", reason="signals differ there")
@pytest.mark.parametrize(("jobs", "number"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_signal_stops_cells_after_their_round(jobs, number, data, tmp_path):
    command = [
        sys.executable,
        "-m",
        "fedala.cli.app",
        "paper",
        "run",
        "table2",
        "--columns",
        SETTING,
        "--method",
        "fedavg,fedprox",
        "--rounds",
        "100000",
        "--seeds",
        "1",
        "--data-dir",
        str(data),
        "--out",
        str(tmp_path),
        "--jobs",
        str(jobs),
    ]
    folders = [tmp_path / SETTING / method / "seeds-0-0" for method in ("fedavg", "fedprox")[:jobs]]
    pipes = {"stderr": subprocess.PIPE, "text": True, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    with subprocess.Popen(command, **pipes) as process:
        try:
            deadline = time.monotonic() + 120
            while any(
                max(map(len, read_histories(folder).values()), default=0) < 3 for folder in folders
            ):
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert errors.endswith(
        f"Stopped; the results so far are in {tmp_path}, and the same command continues.\n"
    )
    for folder in folders:
        [rows] = read_histories(folder).values()
        assert count_checkpoint_rounds(folder) == len(rows) >= 3
    if jobs == 1:
        assert not (tmp_path / SETTING / "fedprox").exists()
        seen = EndRecorder()
        running.run_cells(
            [COLUMN.cell("fedavg")], make_options(data, tmp_path, rounds=len(rows) + 1), seen
        )
        assert seen.ends == [(f"{SETTING}/fedavg", "done")]
        [again] = read_histories(folders[0]).values()
        assert [row.round for row in again] == list(range(len(rows) + 2))
        assert again[: len(rows)] == rows


@pytest.fixture
def short_of_time(monkeypatch):
    """Let the time be up after a row of round 1."""
    left = [1.0]
    monkeypatch.setattr(running.RunOptions, "seconds_left", property(lambda self: left[0]))
    return EndRecorder(lambda cell, row: left.__setitem__(0, -1.0 if row.round >= 1 else 1.0)), left


def test_out_of_time_a_cell_stops_between_rounds_and_the_next_does_not_start(
    data, tmp_path, short_of_time
):
    seen, left = short_of_time
    cells = [COLUMN.cell("fedprox"), COLUMN.cell("fedavg")]
    running.run_cells(cells, make_options(data, tmp_path), seen)
    assert seen.ends == [(f"{SETTING}/fedprox", "stopped"), (f"{SETTING}/fedavg", "not started")]
    [stopped] = read_results(tmp_path).seeds
    assert (stopped.rounds, stopped.planned) == (1, 3)
    left[0] = 1e9
    running.run_cells(cells[:1], make_options(data, tmp_path), EndRecorder())
    running.run_cells(cells[:1], make_options(data, tmp_path / "whole"), EndRecorder())
    part = f"{SETTING}/fedprox/seeds-0-0"
    assert read_without_times(tmp_path / part) == read_without_times(tmp_path / "whole" / part)


def test_a_stopped_cell_is_finished_with_fewer_rounds(data, tmp_path, short_of_time):
    seen, left = short_of_time
    running.run_cells([COLUMN.cell("fedavg")], make_options(data, tmp_path, rounds=5), seen)
    left[0] = 1e9
    fewer = EndRecorder()
    running.run_cells([COLUMN.cell("fedavg")], make_options(data, tmp_path, rounds=2), fewer)
    assert fewer.ends == [(f"{SETTING}/fedavg", "done")]
    [found] = read_results(tmp_path).seeds
    assert (found.rounds, found.planned) == (2, 5)


def test_more_seeds_leave_finished_ones_unchanged(data, tmp_path):
    run(data, tmp_path, method="fedavg", rounds=1)
    before = (tmp_path / SETTING / "fedavg" / "seeds-0-0" / "history.csv").read_bytes()
    run(data, tmp_path, method="fedavg", rounds=1, seeds=3)
    assert sorted(path.name for path in (tmp_path / SETTING / "fedavg").glob("seeds-*")) == [
        "seeds-0-0",
        "seeds-1-2",
    ]
    assert (tmp_path / SETTING / "fedavg" / "seeds-0-0" / "history.csv").read_bytes() == before
    assert [line["seed"] for line in read_lines(tmp_path)] == ["0", "1", "2"]


@pytest.mark.parametrize("keep", [(), ("--keep-checkpoints",)])
def test_more_rounds_begin_with_the_same_ones(data, tmp_path, keep):
    run(data, tmp_path, *keep, method="fedavg", rounds=1)
    folder = tmp_path / SETTING / "fedavg" / "seeds-0-0"
    first = read_without_times(folder)[:1]
    run(data, tmp_path, method="fedavg", rounds=3)
    assert read_without_times(folder)[:1] == first
    assert [row["round"] for row in read_without_times(folder)] == ["0", "1", "2", "3"]
    assert [line["rounds"] for line in read_lines(tmp_path)] == ["3"]
    assert bool((folder / "resumed.csv").exists()) == bool(keep)


def test_data_is_loaded_once_for_all_cells_of_a_column(data, tmp_path, monkeypatch):
    loaded = []
    load = running.load
    monkeypatch.setattr(running, "load", lambda *a: loaded.append(a) or load(*a))
    divided = []
    federate = running.federate
    monkeypatch.setattr(running, "federate", lambda *a: divided.append(a) or federate(*a))
    other = next(column for column in tables()["table7"].columns if column.name == "mnist-dir")
    cells = [c.cell(m) for m in ("fedavg", "fedprox") for c in (COLUMN, other)]
    running.run_cells(cells, make_options(data, tmp_path, rounds=1), EndRecorder())
    assert (len(loaded), len(divided)) == (1, 2)


@pytest.mark.parametrize(
    ("signals", "message", "outcome"),
    [
        ([15], "CUDA error: MPS client terminated", "stopped"),
        ([], "CUDA error: MPS client terminated", "failed"),
        ([15], "mat1 and mat2 shapes cannot be multiplied", "failed"),
    ],
)
def test_a_gpu_that_fails_while_cells_stop(signals, message, outcome, data, tmp_path, monkeypatch):
    stop_signals = []

    def fail(*_):
        stop_signals.extend(signals)
        raise RuntimeError(message)

    monkeypatch.setattr(running, "_plan", fail)
    seen = EndRecorder()
    options = make_options(data, tmp_path, stop_signals=stop_signals)
    running.run_cells([COLUMN.cell("fedavg")], options, seen)
    assert seen.ends == [(f"{SETTING}/fedavg", outcome)]


def test_several_processes_give_what_one_gives(finished, data, tmp_path):
    out, _ = finished
    result = run(data, tmp_path, "--jobs", 2, rounds=1, seeds=2)
    assert result.exit_code == 0, result.output
    assert "Cells: 2 run (of 2)." in result.stdout
    for method in ("fedavg", "fedala"):
        assert read_without_times(tmp_path / SETTING / method / "seeds-0-1") == read_without_times(
            out / SETTING / method / "seeds-0-1"
        )


def write_measured(out, method, seconds, rounds=6):
    """Write a cell whose rounds took so many seconds."""
    folder = out / SETTING / method / "seeds-0-0"
    folder.mkdir(parents=True)
    config = COLUMN.cell(method).config(rounds=2000, seeds=1)
    (folder / "config.toml").write_text(config.text(), encoding="utf-8")
    for round in range(rounds):
        row = HistoryRow(0, round, score=0.5, loss=1.0, score_joined=0.5, seconds=seconds)
        RunFolder(folder).tables.add_history(method, row)


def test_the_time_of_a_cell_is_estimated_from_its_seconds_per_round(tmp_path):
    write_measured(tmp_path, "fedavg", 2.0, rounds=6)
    options = make_options(None, tmp_path, rounds=100)
    assert running.estimate_seconds(COLUMN.cell("fedavg"), options) == pytest.approx(
        2.0 * (100 - 5)
    )
    # With shuffling it takes as long. Nothing is known about another method.
    assert running.estimate_seconds(COLUMN.cell("fedavg", shuffle=True), options) == pytest.approx(
        2.0 * 100
    )
    assert running.estimate_seconds(COLUMN.cell("fedprox"), options) == 0


def test_cells_that_do_not_fit_wait_for_those_that_do(tmp_path, monkeypatch):
    write_measured(tmp_path, "fedavg", 1000.0)
    attempts = []
    monkeypatch.setattr(running, "_attempt", lambda cell, *_: attempts.append(cell.name))
    monkeypatch.setattr(running.RunOptions, "seconds_left", property(lambda self: 60.0))
    running.run_cells(
        [COLUMN.cell("fedavg"), COLUMN.cell("fedprox")],
        make_options(None, tmp_path, rounds=100),
        EndRecorder(),
    )
    assert attempts == ["fedprox", "fedavg"]


def test_a_figure_stops_when_the_time_is_up(data, tmp_path, monkeypatch):
    """The time is up before the third round of the first of two figures."""
    moments = iter([1.0, 1.0, 1.0])
    monkeypatch.setattr(
        running.RunOptions, "seconds_left", property(lambda self: next(moments, 0.0))
    )
    result = call(
        "run",
        "figure-con",
        "figure-splits",
        "--rounds",
        5,
        "--minutes",
        1,
        "--data-dir",
        data,
        "--out",
        tmp_path,
        "--device",
        "cpu",
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "Out of time: figure-con is not drawn; it got to 2 of 5 rounds of FedALA.",
        "Left out, because the time is up: figure-splits.",
    ]
    assert list((tmp_path / "figures").iterdir()) == []


def test_processes_get_only_the_cells_and_the_remaining_time(data, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(processes, "run_processes", lambda arguments, *_: given.extend(arguments))
    monkeypatch.setattr(running.RunOptions, "seconds_left", property(lambda self: 90.0))
    result = run(data, tmp_path, "figure-splits", "--jobs", 2, "--minutes", 5)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "figures" / "figure-splits-mnist-dir.png").is_file()
    assert given[:3] == ["paper", "run", "table2"]
    assert "figure-splits" not in given
    assert "--minutes=1.5" in given


def test_missing_data_is_one_sentence_and_the_rest_runs(data, tmp_path):
    result = call(
        "run",
        "table2",
        "--columns",
        f"cifar10-dir,{SETTING}",
        "--method",
        "fedavg",
        "--rounds",
        1,
        "--seeds",
        1,
        "--data-dir",
        data,
        "--out",
        tmp_path,
    )
    assert result.exit_code == 0, result.output
    assert "Skipped: cifar10-dir/fedavg: There is no copy of cifar10" in result.stdout
    assert [line["setting"] for line in read_lines(tmp_path)] == [SETTING]


def test_it_is_an_error_if_nothing_can_run(data, tmp_path):
    result = call("run", "table1", "--data-dir", data, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stdout.count("There is no copy of tiny-imagenet") == 1
    assert "Nothing was run." in result.stderr


def test_a_cell_does_not_continue_with_other_data(finished, data, tmp_path):
    out, _ = finished
    about = out / SETTING / "fedavg" / "cell.json"
    text = about.read_text()
    try:
        write_cell_file(about, {**json.loads(text), "samples": 70000})
        seen = EndRecorder()
        running.run_cells([COLUMN.cell("fedavg")], make_options(data, out, seeds=3), seen)
        assert seen.ends == [(f"{SETTING}/fedavg", "skipped")]
        assert "begun with 70000 samples" in seen.reason
    finally:
        about.write_text(text)


def test_a_cell_that_another_process_runs_is_skipped(data, tmp_path):
    from fedala.io import files

    folder = tmp_path / SETTING / "fedavg"
    folder.mkdir(parents=True)
    with files.lock(folder / ".lock", "busy"):
        seen = EndRecorder()
        running.run_cells([COLUMN.cell("fedavg")], make_options(data, tmp_path, rounds=1), seen)
    assert seen.ends == [(f"{SETTING}/fedavg", "skipped")]
    assert not list(folder.glob("seeds-*"))


def test_the_progress_of_several_processes_is_merged():
    progress = CellProgress(
        Console(file=io.StringIO()), {"a": 99.0, "b": 99.0, "c": 99.0}, rounds=5
    )
    progress.row("a", HistoryRow(0, 2, score=0.2, loss=1.0, score_joined=0.5, seconds=1.0))
    for cell, how in (
        ("a", "stopped"),
        ("a", "not started"),
        ("b", "finished before"),
        ("b", "not started"),
        ("c", "not started"),
    ):
        progress.end(cell, how)
    assert progress.summary() == [
        "Cells: 1 finished before (of 3).",
        "Out of time: a has 2 of 5 rounds; the same command continues it.",
        "Out of time, not started: c.",
    ]


def test_the_summary_says_why_cells_stopped_and_how_far_they_got():
    progress = CellProgress(
        Console(file=io.StringIO()), {"a": 99.0, "b": 99.0, "c": 99.0}, rounds=5
    )
    progress.row("a", HistoryRow(0, 2, score=0.2, loss=1.0, score_joined=0.5, seconds=1.0))
    progress.end("a", "stopped", "RuntimeError: CUDA error (net.py, line 7)")
    progress.end("b", "stopped", "RuntimeError: CUDA error (net.py, line 7)")
    progress.end("c", "stopped")
    error = "Stopped by an error (RuntimeError: CUDA error (net.py, line 7))"
    assert progress.summary() == [
        "Cells: none finished (of 3).",
        f"{error}: a has 2 of 5 rounds; the same command continues it.",
        f"{error}: b is not finished; the same command continues it.",
        "Out of time: c is not finished; the same command continues it.",
    ]


def test_the_summary_names_cells_that_another_command_runs():
    """One of its own processes that finds a cell taken says nothing: another one of them has it."""
    progress = CellProgress(Console(file=io.StringIO()), {"a": 99.0, "b": 99.0}, rounds=5)
    progress.row("a", HistoryRow(0, 2, score=0.2, loss=1.0, score_joined=0.2, seconds=1.0))
    progress.end("a", "failed", "it broke")
    for cell in ("a", "b"):
        progress.end(cell, "skipped", running.BUSY)
    assert progress.summary() == [
        "Cells: none finished (of 2).",
        "Not run here: b: another process is running it",
        "Failed: a: it broke",
    ]


def test_the_progress_shows_the_accuracy_of_participants():
    progress = CellProgress(Console(file=io.StringIO()), {"a": 54.81}, rounds=5)
    progress.row("a", HistoryRow(0, 2, score=0.2, loss=1.0, score_joined=0.5, seconds=1.0))
    [line] = [
        list(column.cells) for column in progress.table().columns if column.header == "accuracy"
    ]
    assert line == ["50.00"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("table9",), "There is no table or figure table9"),
        (("table2", "--columns", "cifar"), "There is no column cifar"),
        (
            ("table2", "--method", "fedalla"),
            "There is no method fedalla in table2 (did you mean fedala?)",
        ),
        (("table2", "--device", "tpu"), "device must be one of"),
        (("table2", "--data-dir", "nowhere"), "The data directory nowhere is not a folder."),
    ],
)
def test_refusals(arguments, sentence, tmp_path):
    result = call("run", *arguments, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert not (tmp_path / "out").exists()


def test_list_names_every_table_column_and_figure():
    text = call("list").stdout
    for table in tables().values():
        assert table.name in text
        assert all(column.name in text for column in table.columns)
    assert "figure-traj" in text


def test_a_missing_results_folder_is_refused():
    with pytest.raises(UserError, match="nowhere is not a results folder"):
        read_results(running.Path("nowhere"))


def test_columns_and_methods_run_in_the_order_of_the_options():
    from fedala.paper.experiments import choose

    chosen = choose(["table2"], ["cifar100-dir", "mnist-pathological"], ["fedala", "fedavg"])
    assert [(column.name, method) for _, column, method in chosen] == [
        ("cifar100-dir", "fedala"),
        ("cifar100-dir", "fedavg"),
        ("mnist-pathological", "fedala"),
        ("mnist-pathological", "fedavg"),
    ]


@pytest.mark.parametrize(
    ("path", "content", "sentence"),
    [
        ("results.csv", "a,b\n", "is not a csv of results"),
        (f"{SETTING}/fedavg/cell.json", "{", "is damaged"),
        (f"{SETTING}/fedavg/cell.json", '{"samples": 1}', "is damaged"),
        (f"{SETTING}/fedavg/seeds-0-0/config.toml", "rounds = [", "is not TOML"),
        (
            f"{SETTING}/fedavg/seeds-0-0/history.csv",
            "method,seed,round\nfedavg,0,0\n",
            "history.csv is damaged: a row lacks 'accuracy'",
        ),
    ],
)
def test_a_damaged_results_folder_is_refused_before_anything_runs(
    data, tmp_path, path, content, sentence
):
    folder = tmp_path / SETTING / "fedavg"
    write_measured(tmp_path, "fedavg", 1.0)
    (folder / "cell.json").write_text(
        json.dumps({"samples": 240, "data": "", "device": "", "version": ""})
    )
    (tmp_path / path).write_text(content)
    result = run(data, tmp_path, method="fedprox")
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert not (tmp_path / SETTING / "fedprox").exists()
