"""`fedala paper run`: cells are run once, kept, taken up again where they stopped, and skipped where they cannot run."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedala.cli import app as cli
from fedala.errors import UserError
from fedala.paper import processes, running
from fedala.paper.cell_folders import read_histories, write_cell_file
from fedala.paper.experiments import tables
from fedala.paper.progress import CellProgress
from fedala.paper.reading import read_results
from fedala.runs.folder import RunFolder

PLACE = "mnist-pathological"
COLUMN = next(column for column in tables()["table2"].columns if column.name == PLACE)


def call(*arguments):
    return CliRunner().invoke(cli.app, ["paper", *map(str, arguments)], prog_name="fedala")


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
    return call("run", "table2", "--columns", PLACE, *fixed, *options)


def lines(out):
    with (out / "results.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def untimed(folder):
    return [
        {key: repr(v) for key, v in row.items() if key != "seconds"}
        for row in RunFolder(folder).history()
    ]


class Seen:
    """Whoever follows cells; may do something when a row comes."""

    def __init__(self, at=lambda cell, row: None):
        self.at, self.ends = at, []

    def row(self, cell, row):
        self.at(cell, row)

    def end(self, cell, outcome, reason=""):
        self.ends.append((cell, outcome))
        self.reason = reason


# --- run, keep, go on ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    result = run(data, out, seeds=2)
    assert result.exit_code == 0, result.output
    return out, result


def test_a_line_for_every_cell_and_seed_says_what_the_history_says(finished):
    out, result = finished
    assert "Cells: 2 run (of 2)." in result.stdout
    found = lines(out)
    assert [(line["method"], line["seed"]) for line in found] == [
        ("fedala", "0"), ("fedala", "1"), ("fedavg", "0"), ("fedavg", "1"),
    ]  # fmt: skip
    for line in found:
        rows = read_histories(out / PLACE / line["method"] / "seeds-0-1")[int(line["seed"])]
        accuracies = [row["accuracy"] for row in rows]
        assert float(line["best"]) == pytest.approx(max(accuracies), rel=1e-5)
        assert int(line["best_round"]) == accuracies.index(max(accuracies))
        assert float(line["final"]) == pytest.approx(accuracies[-1], rel=1e-5)
        assert (line["rounds"], line["shuffle"], line["data"]) == (
            "2",
            "false",
            "partial: 240 of 70000 samples",
        )


def test_the_presets_are_the_papers(finished):
    out, _ = finished
    config = RunFolder(out / PLACE / "fedala" / "seeds-0-1").config()
    assert (config.partition, config.lr, config.clients, config.shuffle) == (
        "pathological:2",
        0.1,
        20,
        False,
    )
    assert not (out / PLACE / "fedala" / "seeds-0-1" / "models").exists()


def test_finished_cells_leave_no_checkpoint_behind(finished):
    out, _ = finished
    assert not list(out.rglob("*.safetensors"))


def test_finished_cells_are_kept(finished, data):
    out, _ = finished
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    result = run(data, out, seeds=2)
    assert "Cells: 2 finished before (of 2)." in result.stdout
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_with_shuffling_a_cell_is_another(data, tmp_path):
    assert run(data, tmp_path, "--shuffle", method="fedavg", rounds=1).exit_code == 0
    assert [(line["method"], line["shuffle"]) for line in lines(tmp_path)] == [("fedavg", "true")]
    assert (tmp_path / PLACE / "fedavg,shuffled").is_dir()


def order(data, out, **options):
    return running.RunOptions(**{"out": out, "rounds": 3, "seeds": 1, "data_dir": data, **options})


def test_an_interrupted_cell_goes_on_and_gives_what_an_uninterrupted_one_gives(data, tmp_path):
    cells = [COLUMN.cell("ditto")]

    def interrupt(cell, row):
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.run_cells(cells, order(data, tmp_path / "a"), Seen(interrupt))
    again = Seen()
    running.run_cells(cells, order(data, tmp_path / "a"), again)
    running.run_cells(cells, order(data, tmp_path / "b"), Seen())
    part = f"{PLACE}/ditto/seeds-0-0"
    assert again.ends == [(f"{PLACE}/ditto", "done")]
    assert untimed(tmp_path / "a" / part) == untimed(tmp_path / "b" / part)


def in_checkpoint(folder):
    """How many rounds the last checkpoint of a run has."""
    return max((int(path.stem) for path in folder.rglob("checkpoint/**/[0-9]*.json")), default=0)


@pytest.mark.skipif(os.name == "nt", reason="signals differ there")
@pytest.mark.parametrize(("jobs", "number"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_cells_that_are_asked_to_stop_finish_their_round_and_keep_it(jobs, number, data, tmp_path):
    command = [
        sys.executable, "-m", "fedala.cli.app", "paper", "run", "table2", "--columns", PLACE, "--method", "fedavg,fedprox",
        "--rounds", "100000", "--seeds", "1", "--data-dir", str(data), "--out", str(tmp_path), "--jobs", str(jobs),
    ]  # fmt: skip
    folders = [tmp_path / PLACE / method / "seeds-0-0" for method in ("fedavg", "fedprox")[:jobs]]
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
        f"Stopped; what was done is in {tmp_path}, and the same command goes on.\n"
    )
    for folder in folders:
        [rows] = read_histories(folder).values()
        assert in_checkpoint(folder) == len(rows) >= 3
    if jobs == 1:
        assert not (tmp_path / PLACE / "fedprox").exists()
        seen = Seen()
        running.run_cells(
            [COLUMN.cell("fedavg")], order(data, tmp_path, rounds=len(rows) + 1), seen
        )
        assert seen.ends == [(f"{PLACE}/fedavg", "done")]
        [again] = read_histories(folders[0]).values()
        assert [row["round"] for row in again] == list(range(len(rows) + 2))
        assert again[: len(rows)] == rows


@pytest.fixture
def short_of_time(monkeypatch):
    """Time is up as soon as a row of round 1 has come."""
    left = [1.0]
    monkeypatch.setattr(running.RunOptions, "seconds_left", property(lambda self: left[0]))
    return Seen(lambda cell, row: left.__setitem__(0, -1.0 if row["round"] >= 1 else 1.0)), left


def test_out_of_time_the_last_cell_stops_between_two_rounds_and_the_others_are_left_out(
    data, tmp_path, short_of_time
):
    seen, left = short_of_time
    cells = [COLUMN.cell("fedprox"), COLUMN.cell("fedavg")]
    running.run_cells(cells, order(data, tmp_path), seen)
    assert seen.ends == [(f"{PLACE}/fedprox", "stopped"), (f"{PLACE}/fedavg", "not started")]
    [stopped] = read_results(tmp_path).seeds
    assert (stopped.rounds, stopped.planned) == (1, 3)
    left[0] = 1e9
    running.run_cells(cells[:1], order(data, tmp_path), Seen())
    running.run_cells(cells[:1], order(data, tmp_path / "whole"), Seen())
    part = f"{PLACE}/fedprox/seeds-0-0"
    assert untimed(tmp_path / part) == untimed(tmp_path / "whole" / part)


def test_a_stopped_cell_is_finished_if_fewer_rounds_are_asked_for(data, tmp_path, short_of_time):
    seen, left = short_of_time
    running.run_cells([COLUMN.cell("fedavg")], order(data, tmp_path, rounds=5), seen)
    left[0] = 1e9
    fewer = Seen()
    running.run_cells([COLUMN.cell("fedavg")], order(data, tmp_path, rounds=2), fewer)
    assert fewer.ends == [(f"{PLACE}/fedavg", "done")]
    [found] = read_results(tmp_path).seeds
    assert (found.rounds, found.planned) == (2, 5)


def test_more_seeds_run_beside_those_that_there_are(data, tmp_path):
    run(data, tmp_path, method="fedavg", rounds=1)
    before = (tmp_path / PLACE / "fedavg" / "seeds-0-0" / "history.csv").read_bytes()
    run(data, tmp_path, method="fedavg", rounds=1, seeds=3)
    assert sorted(path.name for path in (tmp_path / PLACE / "fedavg").glob("seeds-*")) == [
        "seeds-0-0",
        "seeds-1-2",
    ]
    assert (tmp_path / PLACE / "fedavg" / "seeds-0-0" / "history.csv").read_bytes() == before
    assert [line["seed"] for line in lines(tmp_path)] == ["0", "1", "2"]


@pytest.mark.parametrize("keep", [(), ("--keep-checkpoints",)])
def test_more_rounds_begin_with_the_same_ones(data, tmp_path, keep):
    run(data, tmp_path, *keep, method="fedavg", rounds=1)
    folder = tmp_path / PLACE / "fedavg" / "seeds-0-0"
    first = untimed(folder)[:1]
    run(data, tmp_path, method="fedavg", rounds=3)
    assert untimed(folder)[:1] == first
    assert [row["round"] for row in untimed(folder)] == ["0", "1", "2", "3"]
    assert [line["rounds"] for line in lines(tmp_path)] == ["3"]
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
    running.run_cells(cells, order(data, tmp_path, rounds=1), Seen())
    assert (len(loaded), len(divided)) == (1, 2)


def test_several_processes_give_what_one_gives(finished, data, tmp_path):
    out, _ = finished
    result = run(data, tmp_path, "--jobs", 2, seeds=2)
    assert result.exit_code == 0, result.output
    assert "Cells: 2 run (of 2)." in result.stdout
    for method in ("fedavg", "fedala"):
        assert untimed(tmp_path / PLACE / method / "seeds-0-1") == untimed(
            out / PLACE / method / "seeds-0-1"
        )


# --- time ----------------------------------------------------------------------------------------------------------


def measured(out, method, seconds, rounds=6):
    """A cell of which some rounds are known to have taken so long."""
    folder = out / PLACE / method / "seeds-0-0"
    folder.mkdir(parents=True)
    config = COLUMN.cell(method).config(rounds=2000, seeds=1)
    (folder / "config.toml").write_text(config.text(), encoding="utf-8")
    rows = [
        {"seed": 0, "round": r, "accuracy": 0.5, "accuracy_joined": 0.5, "seconds": seconds}
        for r in range(rounds)
    ]
    RunFolder(folder).add_history(method, rows)


def test_what_is_left_of_a_cell_is_estimated_from_its_seconds_per_round(tmp_path):
    measured(tmp_path, "fedavg", 2.0, rounds=6)
    asked = order(None, tmp_path, rounds=100)
    assert running.estimate_seconds(COLUMN.cell("fedavg"), asked) == pytest.approx(2.0 * (100 - 5))
    # With shuffling it takes as long, and there is nothing of it yet. Of another method nothing is known.
    assert running.estimate_seconds(COLUMN.cell("fedavg", shuffle=True), asked) == pytest.approx(
        2.0 * 100
    )
    assert running.estimate_seconds(COLUMN.cell("fedprox"), asked) == 0


def test_what_does_not_fit_waits_for_what_does(tmp_path, monkeypatch):
    measured(tmp_path, "fedavg", 1000.0)
    attempts = []
    monkeypatch.setattr(running, "_attempt", lambda cell, *_: attempts.append(cell.name))
    monkeypatch.setattr(running.RunOptions, "seconds_left", property(lambda self: 60.0))
    running.run_cells(
        [COLUMN.cell("fedavg"), COLUMN.cell("fedprox")], order(None, tmp_path, rounds=100), Seen()
    )
    assert attempts == ["fedprox", "fedavg"]


def test_a_figure_is_bound_to_the_time_as_well(data, tmp_path, monkeypatch):
    """It is up while the first of two figures is drawn, before its third round begins."""
    moments = iter([1.0, 1.0, 1.0])
    monkeypatch.setattr(
        running.RunOptions, "seconds_left", property(lambda self: next(moments, 0.0))
    )
    result = call("run", "figure-con", "figure-splits", "--rounds", 5, "--minutes", 1, "--data-dir", data,
                  "--out", tmp_path, "--device", "cpu")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "Out of time: figure-con is not drawn; it got to 2 of 5 rounds of FedALA.",
        "Left out, for want of time: figure-splits.",
    ]
    assert list((tmp_path / "figures").iterdir()) == []


def test_processes_get_the_cells_alone_and_the_time_that_is_left(data, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(processes, "run_processes", lambda arguments, *_: given.extend(arguments))
    monkeypatch.setattr(running.RunOptions, "seconds_left", property(lambda self: 90.0))
    result = run(data, tmp_path, "figure-splits", "--jobs", 2, "--minutes", 5)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "figures" / "figure-splits-mnist-dir.png").is_file()
    assert given[0] == "table2"
    assert "figure-splits" not in given
    assert "--minutes=1.5" in given


# --- what cannot be run --------------------------------------------------------------------------------------------


def test_missing_data_is_a_sentence_and_the_rest_is_run(data, tmp_path):
    result = call("run", "table2", "--columns", f"cifar10-dir,{PLACE}", "--method", "fedavg", "--rounds", 1,
                  "--seeds", 1, "--data-dir", data, "--out", tmp_path)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Skipped: cifar10-dir/fedavg: There is no copy of cifar10" in result.stdout
    assert [line["setting"] for line in lines(tmp_path)] == [PLACE]


def test_where_nothing_can_be_run_it_says_so(data, tmp_path):
    result = call("run", "table1", "--data-dir", data, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stdout.count("There is no copy of tiny-imagenet") == 1
    assert "Nothing was run." in result.stderr


def test_a_cell_is_not_gone_on_with_on_other_data(finished, data, tmp_path):
    out, _ = finished
    about = out / PLACE / "fedavg" / "cell.json"
    text = about.read_text()
    try:
        write_cell_file(about, {**json.loads(text), "samples": 70000})
        seen = Seen()
        running.run_cells([COLUMN.cell("fedavg")], order(data, out, seeds=3), seen)
        assert seen.ends == [(f"{PLACE}/fedavg", "skipped")]
        assert "begun with 70000 samples" in seen.reason
    finally:
        about.write_text(text)


def test_a_cell_that_another_process_runs_is_left_to_it(data, tmp_path):
    from fedala.io import files

    folder = tmp_path / PLACE / "fedavg"
    folder.mkdir(parents=True)
    with files.lock(folder / ".lock", "busy"):
        seen = Seen()
        running.run_cells([COLUMN.cell("fedavg")], order(data, tmp_path, rounds=1), seen)
    assert seen.ends == [(f"{PLACE}/fedavg", "skipped")]
    assert not list(folder.glob("seeds-*"))


def test_what_one_process_leaves_out_another_may_have_run():
    board = CellProgress(Console(file=io.StringIO()), {"a": 99.0, "b": 99.0, "c": 99.0}, rounds=5)
    board.row("a", {"seed": 0, "round": 2, "accuracy": 0.2, "accuracy_joined": 0.5, "seconds": 1.0})
    for cell, how in (
        ("a", "stopped"),
        ("a", "not started"),
        ("b", "finished before"),
        ("b", "not started"),
        ("c", "not started"),
    ):
        board.end(cell, how)
    assert board.summary() == [
        "Cells: 1 finished before (of 3).",
        "Out of time: a has 2 of 5 rounds; the same command continues it.",
        "Out of time, not started: c.",
    ]


def test_the_accuracy_beside_the_papers_is_counted_as_the_papers_is():
    board = CellProgress(Console(file=io.StringIO()), {"a": 54.81}, rounds=5)
    board.row("a", {"seed": 0, "round": 2, "accuracy": 0.2, "accuracy_joined": 0.5, "seconds": 1.0})
    [line] = [list(column.cells) for column in board.table().columns if column.header == "accuracy"]
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


def test_the_data_that_is_named_must_be_there():
    with pytest.raises(UserError, match="nowhere is not a results folder"):
        read_results(running.Path("nowhere"))


def test_columns_and_methods_are_run_in_the_order_in_which_they_are_named():
    from fedala.paper.experiments import choose

    chosen = choose(["table2"], ["cifar100-dir", "mnist-pathological"], ["fedala", "fedavg"])
    assert [(column.name, method) for _, column, method in chosen] == [
        ("cifar100-dir", "fedala"), ("cifar100-dir", "fedavg"),
        ("mnist-pathological", "fedala"), ("mnist-pathological", "fedavg"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "content", "sentence"),
    [
        ("results.csv", "a,b\n", "is not a csv of results"),
        (f"{PLACE}/fedavg/cell.json", "{", "is damaged"),
        (f"{PLACE}/fedavg/cell.json", '{"samples": 1}', "is damaged"),
        (f"{PLACE}/fedavg/seeds-0-0/config.toml", "rounds = [", "is not TOML"),
        (
            f"{PLACE}/fedavg/seeds-0-0/history.csv",
            "method,seed,round\nfedavg,0,0\n",
            "is not the run of a cell",
        ),
    ],
)
def test_a_damaged_results_folder_is_a_sentence_before_anything_is_run(
    data, tmp_path, path, content, sentence
):
    folder = tmp_path / PLACE / "fedavg"
    measured(tmp_path, "fedavg", 1.0)
    (folder / "cell.json").write_text(
        json.dumps({"samples": 240, "data": "", "device": "", "version": ""})
    )
    (tmp_path / path).write_text(content)
    result = run(data, tmp_path, method="fedprox")
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert not (tmp_path / PLACE / "fedprox").exists()
