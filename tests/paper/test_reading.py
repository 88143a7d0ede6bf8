"""`fedala paper` checks what it reads: cells match their folders, numbers are possible."""

import json
import os
from dataclasses import replace

import pytest
from fuzz.bounded import attempt
from paper_results import call, make_result, read_csv, read_results, write_table

from fedala.errors import UserError
from fedala.paper.experiments import tables
from fedala.records import HistoryRow
from fedala.runs.folder import RunFolder

SETTING = "mnist-pathological"
COLUMN = next(column for column in tables()["table2"].columns if column.name == SETTING)
FACTS = {"samples": 240, "data": "", "device": "CPU", "version": "x"}
BASE = make_result(setting=SETTING)


def make_cell(
    out, method="fedala", *, column=COLUMN, rounds=2000, seeds=range(2), accuracy=0.5, **options
):
    """Make a cell's folder, as a run leaves it after five rounds."""
    chosen = column.cell(method, rounds=rounds, **options)
    folder = out / chosen.setting.name / chosen.name / f"seeds-{seeds.start}-{seeds.stop - 1}"
    folder.mkdir(parents=True)
    (folder.parent / "cell.json").write_text(json.dumps(FACTS))
    (folder / "config.toml").write_text(
        chosen.config(rounds=rounds, seeds=len(seeds), seed=seeds.start).text()
    )
    tables_of_run = RunFolder(folder).tables
    for round in range(6):
        for seed in seeds:
            row = HistoryRow(seed, round, accuracy, 1.0, accuracy, sent=1, uploaded=1, seconds=1.0)
            tables_of_run.add_history(chosen.method, row)
    return folder


def check_refusal(folder, *says):
    """Check that `paper report` and `paper run` refuse a folder and do not change it."""
    before = sorted(folder.rglob("*"))
    for arguments in (["report", folder], ["run", "table2", "--data-dir", folder, "--out", folder]):
        answer = call(*arguments)
        assert answer.exit_code == 2, answer.output
        assert answer.stderr.count("\n") == 1
        for words in says:
            assert str(words) in answer.stderr
    assert sorted(folder.rglob("*")) == before


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shuffle": True},
        {"seeds": range(3, 5)},
        {"method": "fedphp", "rounds": 300},
        {"method": "apple"},
        {
            "method": "ditto",
            "column": next(c for c in tables()["table4"].columns if c.name == "cifar100-ala"),
        },
        {"column": next(c for c in tables()["table1"].columns if c.name == "p2")},
        {"column": next(c for c in tables()["table7"].columns if c.name == "cifar100-joining")},
        {"column": tables()["ablation"].columns[0]},
    ],
)
def test_a_cell_is_read_with_its_seeds_and_rounds(tmp_path, changes):
    folder = make_cell(tmp_path, **changes)
    found = read_results(tmp_path).seeds
    assert [run.seed for run in found] == list(changes.get("seeds", range(2)))
    assert {(run.best, run.rounds, run.planned) for run in found} == {
        (0.5, 5, changes.get("rounds", 2000))
    }
    assert {run.where for run in found} == {f"{folder}, seed {run.seed}" for run in found}


@pytest.mark.parametrize(("value", "count"), [("", 1), ("true", 1), ("false", 0)])
def test_a_cell_of_apple_says_which_default_it_ran_with(tmp_path, value, count):
    folder = make_cell(tmp_path, "apple")
    if value:
        with (folder / "config.toml").open("a") as file:
            file.write(f'"apple.scale_core" = {value}\n')
    for run in read_results(tmp_path).seeds:
        assert run.set == f"apple.scale_core={value or 'true'}"
        assert len(run.old_settings) == count


def test_an_empty_config_is_not_filled_with_defaults(tmp_path):
    folder = make_cell(tmp_path, "fedavg")
    (folder / "config.toml").write_text("")
    check_refusal(tmp_path, folder, "does not state method, dataset, model")


@pytest.mark.parametrize(
    "name", ["method", "dataset", "lr", "rounds", "shuffle", "seeds", "seed", "precision"]
)
def test_every_value_must_be_stated(tmp_path, name):
    folder = make_cell(tmp_path)
    lines = (folder / "config.toml").read_text().splitlines(keepends=True)
    (folder / "config.toml").write_text(
        "".join(line for line in lines if not line.startswith(f"{name} ="))
    )
    check_refusal(tmp_path, folder, f"does not state {name}.")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('method = "fedala"', 'method = "fedavg"'),
        ('method = "fedala"', 'method = "fedala,fedavg"'),
        ('dataset = "mnist"', 'dataset = "digits"'),
        ("lr = 0.1", "lr = 0.5"),
        ("batch_size = 10", "batch_size = 20"),
        ('partition = "pathological:2"', 'partition = "iid"'),
        ("shuffle = false", "shuffle = true"),
        ("seed = 0", "seed = 1"),
        ("seeds = 2", "seeds = 3"),
        ("partition_seed = 1", "partition_seed = 2"),
        ("[set]", '[set]\n"fedala.layers" = 2'),
        ("[set]", '[set]\n"ditto.mu" = 2'),
        ("validation = 0.0", "validation = 0.5"),
    ],
)
def test_a_config_must_agree_with_its_folder(tmp_path, old, new):
    folder = make_cell(tmp_path)
    edit(folder / "config.toml", old, new)
    check_refusal(
        tmp_path, folder, f"is not the run of {SETTING}/fedala: its config.toml differs in"
    )


def test_the_config_of_another_cell_is_refused(tmp_path):
    """FedAvg's folder under FedALA's name would be shown as FedALA's number."""
    folder = make_cell(tmp_path, "fedavg")
    folder.parent.rename(folder.parent.with_name("fedala"))
    check_refusal(tmp_path, "fedala/seeds-0-1", "method (fedala → fedavg)")


def test_a_schedule_with_other_rounds_is_another_cell(tmp_path):
    folder = make_cell(tmp_path, "fedphp", rounds=300)
    edit(folder / "config.toml", "rounds = 300", "rounds = 400")
    check_refusal(tmp_path, folder, f"no cell {SETTING}/fedphp,rounds=300 with 400 rounds")


def test_a_history_must_be_of_the_method_of_the_config(tmp_path):
    folder = make_cell(tmp_path, "fedavg")
    (folder / "config.toml").write_text(COLUMN.cell("fedala").config(seeds=2).text())
    folder.parent.rename(folder.parent.with_name("fedala"))
    check_refusal(
        tmp_path, "fedala/seeds-0-1", "its history.csv is of fedavg, and its config.toml of fedala"
    )


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("fedala,1,3,0.5", "fedala,7,3,0.5", "has a seed 7"),
        ("fedala,1,3,0.5", "fedala,1,9,0.5", "not in order"),
        ("fedala,1,5,0.5", "fedala,1,2001,0.5", "rounds must not be greater than planned"),
        ("fedala,1,3,0.5", "fedala,1,3,7.5", "not from 0 to 1"),
        ("fedala,1,3,0.5,1.0,0.5", "fedala,1,3,0.5,1.0,-3", "not from 0 to 1"),
        ("fedala,1,3,0.5", "fedala,1,3,nan", "not from 0 to 1"),
        ("fedala,1,3,0.5", "fedala,nan,3,0.5", "seeds-0-1"),
        ("accuracy_joined", "accuracy_joint", "lacks 'accuracy_joined'"),
    ],
)
def test_a_history_must_be_possible(tmp_path, old, new, says):
    folder = make_cell(tmp_path)
    edit(folder / "history.csv", old, new)
    check_refusal(tmp_path, folder, says)


@pytest.mark.parametrize("name", ["cell.json", "config.toml"])
def test_a_cell_that_lost_a_file_is_refused(tmp_path, name):
    folder = make_cell(tmp_path)
    (folder.parent / name if name == "cell.json" else folder / name).unlink()
    check_refusal(tmp_path, folder.parent)


def test_a_summary_without_a_history_is_refused(tmp_path):
    folder = make_cell(tmp_path)
    (folder / "history.csv").unlink()
    assert read_results(tmp_path).seeds == []  # it has only begun
    (folder / "summary.json").write_text("{}")
    check_refusal(tmp_path, folder, "it has a summary.json but no history.csv")


@pytest.mark.parametrize(
    "text",
    [
        '{"samples": 1e999}',
        '{"samples": NaN}',
        "[" * 99_999,
        '{"data": "\\ud800"}',
        "9" * 5000,
        "[]",
        '"x"',
        "1",
    ],
)
def test_a_damaged_cell_file_is_one_sentence(tmp_path, text):
    folder = make_cell(tmp_path)
    (folder.parent / "cell.json").write_text(text)
    check_refusal(tmp_path, "cell.json is damaged")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("best", 7.5, "best must be at most 1, not 7.5"),
        ("best", -3, "best must be at least 0, not -3"),
        ("best", "nan", "best must be a number"),
        ("best_joined", 7.5, "best_joined must be at most 1"),
        ("final", 1.5, "final must be at most 1"),
        ("final", 0.9, "final must not be greater than best"),
        ("final", "inf", "final must be a number"),
        ("rounds", -1, "rounds must be at least 0"),
        ("rounds", 3000, "rounds must not be greater than planned"),
        ("planned", -1, "planned must be at least 1"),
        ("best_round", 2001, "best_round must not be greater than rounds"),
        ("best_round", -1, "best_round must be"),
        ("seed", -1, "seed must be at least 0"),
        ("seed", 2**64, "seed must be a whole number"),
        ("seconds_per_round", -1, "seconds_per_round must be at least 0"),
        ("seconds_per_round", "1e30", "seconds_per_round must be at most"),
        ("eval_every", 0, "eval_every must be at least 1"),
        ("together", 0, "together must be at least 1"),
        ("diverged", -1, "diverged must be at least 0"),
        ("diverged", 9999, "diverged is 9999, and there are only 2000 rounds"),
        ("sent", -1, "sent must be at least 0"),
        ("uploaded", -1, "uploaded must be"),
        ("samples", 0, "samples must be"),
        ("shuffle", "maybe", "shuffle must be true or false"),
        ("method", "local", "there is no cell of local in mnist-path"),
        ("set", "fedala.layers=77", "there is no cell of fedala with fedala.layers=77"),
        ("data", "x" * 1000, "data must be printable text"),
        ("device", "\u202e", "device must be printable text"),
        ("version", "\x1b[2J", "version must be text"),
        ("data", "a\nb", "data must be text"),
    ],
)
def test_a_number_out_of_bounds_is_refused_with_its_line(tmp_path, name, value, says):
    write_table(tmp_path / "results.csv", replace(BASE, seed=1), {**vars(BASE), name: value})
    answer = call("report", tmp_path)
    assert answer.exit_code == 2, answer.output
    line = 4 if value == "a\nb" else 3  # a field of two lines ends in the second
    assert f"results.csv, line {line}: {says}" in answer.stderr


def test_the_last_of_two_results_of_a_seed_counts_with_a_note(tmp_path):
    write_table(tmp_path / "a.csv", BASE)
    write_table(tmp_path / "b.csv", replace(BASE, best=0.75))
    answer = call("report", tmp_path)
    assert answer.exit_code == 0, answer.output
    [note] = answer.stderr.splitlines()
    assert note == (
        f"Note: Seed 0 of fedala in {SETTING} has an accuracy of 56.00 % "
        f"in {tmp_path / 'a.csv'}, line 2 "
        f"and of 75.00 % in {tmp_path / 'b.csv'}, line 2; the latter is shown."
    )
    assert [run.best for run in read_results(tmp_path).seeds] == [0.75]
    said = "1 of the seeds are given twice, with different accuracies."
    assert said in answer.stdout
    for name in ("tables.md", "index.html"):
        assert said in (tmp_path / "report" / "paper" / name).read_text()


def test_run_folders_count_more_than_csv_files(tmp_path):
    folder = make_cell(tmp_path, seeds=range(1))
    [own] = read_results(tmp_path).seeds
    write_table(tmp_path / "z.csv", replace(own, best=0.75))
    read = read_results(tmp_path)
    assert [run.where for run in read.seeds] == [f"{folder}, seed 0"]
    assert len(read.contradictions) == 1


def test_two_equal_results_of_a_seed_need_no_note(tmp_path):
    """`paper run` writes a line for each run folder, with six digits of its accuracy."""
    make_cell(tmp_path, accuracy=1 / 3)
    read_results(tmp_path).write(tmp_path / "results.csv")
    assert read_results(tmp_path).contradictions == []
    write_table(tmp_path / "longer.csv", replace(BASE, best=0.75))  # of 2000 rounds, not of 5
    assert read_results(tmp_path).contradictions == []


#: Every file that a report or a run reads in a results folder.
READ = [
    "x.csv",
    "figures/x.png",
    f"{SETTING}/fedala/cell.json",
    f"{SETTING}/fedala/seeds-0-1/config.toml",
    f"{SETTING}/fedala/seeds-0-1/history.csv",
]


@pytest.mark.parametrize("kind", ["pipe", "zeros", "endless", "folder", "loop"])
@pytest.mark.parametrize("name", READ)
def test_pipes_and_devices_are_refused_and_not_waited_for(tmp_path, name, kind):
    make_cell(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "zeros":
            path.symlink_to("/dev/zero")
        case "endless":
            with path.open("wb") as file:
                file.truncate(2**42)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
    outcome = attempt(["paper", "report", str(tmp_path)], tmp_path)
    assert (outcome.code, outcome.fault) == (2, ""), outcome.says
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("kind", ["pipe", "zeros", "without a place"])
def test_a_file_without_room_for_tables_is_refused_first(tmp_path, kind):
    write_table(tmp_path / "results.csv", BASE)
    path = tmp_path / "page.md"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("nothing")
    outcome = attempt(["paper", "report", str(tmp_path), "--insert", str(path)], tmp_path)
    assert (outcome.code, outcome.fault) == (2, ""), outcome.says
    assert not (tmp_path / "report").exists()


def test_a_line_of_the_wrong_setting_is_refused(tmp_path):
    with pytest.raises(UserError, match="line 2: there is no setting nowhere"):
        list(read_csv(write_table(tmp_path / "x.csv", replace(BASE, setting="nowhere"))))
