"""The table for a paper: what it says of which folder, and that it can be typeset."""

import csv
import io
import re

import numpy as np
import pytest
from folders import accuracy, made_up
from markdown_it import MarkdownIt
from scipy import stats
from typer.testing import CliRunner

from fedala import run
from fedala.cli.app import app
from fedala.errors import UserError
from fedala.records import HistoryRow
from fedala.report.results_formats import to_csv, to_latex, to_markdown
from fedala.report.results_table import make_table
from fedala.report.runs import find_runs
from fedala.runs.config import Config
from fedala.runs.folder import RunFolder


def make_folder(path, histories, *, rounds=1, client_accuracies=None, **options):
    """Make a finished folder with `histories[method][seed]`: the accuracy of each evaluation."""
    seeds = len(next(iter(histories.values())))
    options = {"partition": "dir:0.1", **options}
    config = Config(method="fedavg", rounds=rounds, seeds=seeds, model="cnn", **options)
    with RunFolder.create(path, config, force=False) as folder:
        for method, runs in histories.items():
            for seed, values in enumerate(runs):
                for round, value in enumerate(values):
                    test, validation = value if isinstance(value, tuple) else (value, None)
                    row = HistoryRow(seed, round, test, 1.0, test, validation, sent=1, uploaded=1)
                    folder.tables.add_history(method, row)
                if client_accuracies:
                    correct = 100 * np.array(client_accuracies[method][seed])
                    scores = np.stack([correct, correct, np.full(len(correct), 100.0)], 1)
                    folder.tables.add_clients(method, row, scores)
            folder.record_progress(method, is_finished=True)
    return path


def make(*paths, **options):
    return make_table(find_runs(paths), **options)


def texts(table):
    """Return the cells of the Markdown table by row."""
    lines = [line for line in to_markdown(table).splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows if set("".join(row)) != {"-"}}


TWO = {"fedala": [[0.1, 0.9, 0.8], [0.1, 0.8, 0.7]], "fedavg": [[0.1, 0.5, 0.6], [0.1, 0.4, 0.5]]}


def test_cells_are_mean_and_population_deviation_as_in_a_summary(tmp_path):
    one = make_folder(tmp_path / "one", TWO, rounds=2)
    shown = texts(make(one))
    assert shown["FedALA"] == ["**85.00 ± 5.00**"]
    assert shown["FedAvg"] == ["<ins>55.00 ± 5.00</ins>"]
    assert texts(make(one, figure="final"))["FedALA"] == ["**75.00 ± 5.00**"]
    [cell] = [c for (method, _), c in make(one).cells.items() if method == "fedala"]
    [run] = find_runs([one])
    assert cell.figure == run.results["fedala"].summary()["accuracy"]["best"]


def test_the_notes_say_what_the_numbers_are(tmp_path):
    one = make_folder(tmp_path / "one", TWO, rounds=2)
    [what, emphasis] = make(one).notes()
    assert what == (
        "Test accuracy in %, in the best round, which is picked on test data: "
        "mean ± population standard deviation over 2 seeds."
    )
    assert "bold" in emphasis
    assert "after the last round" in make(one, figure="final").notes()[0]


def test_a_single_seed_has_no_deviation(tmp_path):
    one = make_folder(tmp_path / "one", {"fedavg": [[0.25, 0.5]]})
    assert texts(make(one))["FedAvg"] == ["**50.00**"]
    assert make(one).notes() == [
        "Test accuracy in %, in the best round, which is picked on test data: 1 seed."
    ]


def test_the_default_is_validation_only_if_every_folder_has_it(tmp_path):
    held_out = {"fedavg": [[(0.5, 0.9), (0.6, 0.8)]]}
    one = make_folder(tmp_path / "one", held_out)
    two = make_folder(tmp_path / "two", {"fedavg": [[0.5, 0.6]]}, partition="iid")
    assert texts(make(one))["FedAvg"] == ["**50.00**"]
    assert make(one).figure == "validation"
    assert texts(make(one, two))["FedAvg"] == ["**60.00**", "**60.00**"]
    assert "picked on test data" in make(one, two).notes()[0]
    with pytest.raises(UserError, match=r"held no validation samples out"):
        make(one, two, figure="validation")


def test_ties_are_both_bold_and_the_next_is_second(tmp_path):
    one = make_folder(
        tmp_path / "one",
        {"a": [[0.0, 0.5]], "b": [[0.0, 0.500001]], "c": [[0.0, 0.4]], "d": [[0.0, 0.3]]},
    )
    shown = texts(make(one))
    assert [shown[name][0] for name in "abcd"] == [
        "**50.00**", "**50.00**", "<ins>40.00</ins>", "30.00",
    ]  # fmt: skip


def test_columns_are_data_and_partition_or_folders_if_these_are_equal(tmp_path):
    one = make_folder(tmp_path / "one", TWO, rounds=2)
    two = make_folder(tmp_path / "two", {"local": [[0.0, 0.5]]}, rounds=1)
    three = make_folder(tmp_path / "three", TWO, rounds=2, partition="iid")
    assert make(one, three).heads == ["digits, dir:0.1", "digits, iid"]
    table = make(one, two, three)
    assert table.heads == ["one", "two", "digits, iid"]
    assert texts(table)["Local"] == ["—", "**50.00**", "—"]
    assert "(one: 2 seeds; two: 1 seed; digits, iid: 2 seeds)" in table.notes()[0]


def test_an_unfinished_run_is_named(tmp_path):
    made_up(tmp_path / "one", ("fedala", "fedavg"), rounds=6, reached=3)
    assert make(tmp_path / "one").notes()[-1] == (
        "Unfinished: FedAvg in digits, dir:0.1, 3 of 6 rounds."
    )


def test_the_test_over_seeds_is_scipys_t_test(tmp_path):
    random = np.random.default_rng(0)
    histories = {"fedavg": [], "fedala": [], "ditto": []}
    for _ in range(5):
        base = random.uniform(0.4, 0.6)
        histories["fedavg"].append([0.0, base])
        histories["fedala"].append([0.0, base + 0.2 + random.uniform(-0.01, 0.01)])
        histories["ditto"].append([0.0, base + random.uniform(-0.1, 0.1)])
    one = make_folder(tmp_path / "one", histories)
    table = make(one, baseline="FedAvg")
    last = {method: np.array(runs)[:, 1] for method, runs in histories.items()}
    for method in ("fedala", "ditto"):
        expected = stats.ttest_rel(last[method], last["fedavg"]).pvalue
        assert table.cells[method, 0].p_value == pytest.approx(expected, rel=1e-6)
    assert table.cells["fedavg", 0].p_value is None
    assert texts(table)["FedALA"][0].endswith("**‡")
    assert not texts(table)["Ditto"][0].endswith(("†", "‡"))
    assert table.notes()[2] == (
        "† p < 0.05, ‡ p < 0.01: differs from FedAvg (two-sided paired t-test over the seeds; "
        "not corrected for multiple comparisons)."
    )


def test_the_test_over_clients_is_scipys_wilcoxon_test(tmp_path):
    random = np.random.default_rng(1)
    base = random.permutation(np.arange(20, 80))[:12] / 100
    scores = {"fedavg": [base, base], "fedala": [base + 0.1, base + np.arange(12) / 100 - 0.03]}
    one = make_folder(
        tmp_path / "one",
        {"fedavg": [[0, 0.5], [0, 0.5]], "fedala": [[0, 0.6], [0, 0.6]]},
        client_accuracies=scores,
    )
    table = make(one, baseline="fedavg", paired="clients")
    differences = np.mean(scores["fedala"], 0) - base
    expected = stats.wilcoxon(differences, method="exact").pvalue
    assert table.cells["fedala", 0].p_value == pytest.approx(expected)
    assert texts(table)["FedALA"][0].endswith("‡")


def test_too_few_pairs_are_refused(tmp_path):
    one = make_folder(tmp_path / "one", {"fedala": [[0, 0.5]], "fedavg": [[0, 0.5]]})
    with pytest.raises(UserError, match=r"two seeds, and .*one has 1: run more"):
        make(one, baseline="fedavg")
    with pytest.raises(UserError, match=r"two clients, and .*one has 0"):
        make(one, baseline="fedavg", paired="clients")
    with pytest.raises(UserError, match=r"There is no fedavgg in .*one.*did you mean"):
        make(one, baseline="fedavgg")


HOSTILE = "fedprox[lr=0.1] & {x}_|`$\\"


def test_names_show_as_they_are(tmp_path):
    one = make_folder(tmp_path / "one", {HOSTILE: [[0, 0.5]], "[a]": [[0, 0.4]]})
    table = make(one)
    rendered = MarkdownIt("gfm-like", {"linkify": False}).render(to_markdown(table))
    assert "<td>fedprox[lr=0.1] &amp; {x}_|`$\\</td>" in rendered
    assert "<td><strong>50.00</strong></td>" in rendered
    latex = to_latex(table)
    assert r"fedprox[lr=0.1] \& \{x\}\_\textbar{}`\$\textbackslash{} & \textbf{50.00} \\" in latex
    assert "\n{}[a] & \\underline{40.00} \\\\\n" in latex


def test_latex_has_balanced_braces_and_equal_columns(tmp_path):
    histories = {
        "fedala": [[0, 0.9], [0, 0.91], [0, 0.9]],
        "fedavg": [[0, 0.5], [0, 0.5], [0, 0.4]],
    }
    one = make_folder(tmp_path / "one", histories)
    two = make_folder(tmp_path / "two", histories, partition="iid")
    latex = to_latex(make(one, two, baseline="fedavg"))
    assert latex.count("{") == latex.count("}")
    rows = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert {row.count("&") for row in rows} == {2}
    assert r"\begin{tabular}{lcc}" in latex
    assert r"\textbf{90.33 $\pm$ 0.47}$^\ddagger$" in latex
    assert r"$^\ddagger$ p \textless{} 0.01" in latex


def test_csv_has_all_digits_and_no_formula(tmp_path):
    one = make_folder(tmp_path / "one", {"=a": [[0, 1 / 3], [0, 1 / 2]], "b": [[0, 0.25]] * 2})
    [first, second] = csv.DictReader(io.StringIO(to_csv(make(one, baseline="b"))))
    assert (first["method"], first["rank"], first["seeds"]) == ("'=a", "1", "2")
    assert float(first["mean"]) == (1 / 3 + 1 / 2) / 2
    assert float(first["std"]) == pytest.approx(1 / 12)
    assert 0 < float(first["p"]) < 1
    assert second["p"] == ""


# --- the command --------------------------------------------------------------------------------


def call(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_prints_tables_or_writes_them(tmp_path):
    made_up(tmp_path / "one", sealed=True)
    printed = call(tmp_path / "one", "--markdown")
    assert printed.exit_code == 0
    best = np.mean([accuracy("fedavg", seed, 6) for seed in range(2)])
    assert re.search(rf"\| FedAvg \| .*{100 * best:.2f} ± 0.50", printed.stdout)
    assert not (tmp_path / "one" / "report.html").exists()
    written = call(tmp_path / "one", "--latex", "--markdown", "--csv", "--out", tmp_path / "t")
    assert written.stdout.count("Written: ") == 3
    assert (tmp_path / "t" / "table.md").read_text() == printed.stdout
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == [
        "table.csv", "table.md", "table.tex",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--figure", "best"), "add --latex, --markdown or --csv"),
        (("--latex", "--figure", "bset"), "--figure must be one of validation, best, final"),
        (("--latex", "--paired", "clients"), "add --baseline"),
        (("--latex", "--baseline", "ditto"), "There is no ditto in"),
        (("--latex", "--figure", "validation"), "held no validation samples out"),
    ],
)
def test_the_command_refuses(tmp_path, options, sentence):
    made_up(tmp_path / "one")
    answer = call(tmp_path / "one", *options)
    assert answer.exit_code == 2
    assert sentence in answer.stderr
    assert answer.stdout == ""


def test_winners_of_a_sweep(tmp_path):
    """A row for each method, at the point that its sweep picks; the baseline is tuned, too."""
    path = tmp_path / "sweep"
    options = {"method": "fedavg,local", "sweep": {"lr": "0.0001,0.1"}, "seeds": 2, "rounds": 2}
    small = {"model": "mlp", "clients": 3, "batch_size": 100, "device": "cpu", "validation": 0.2}
    run(**options, **small, out=path)
    [read] = find_runs([path])
    table = make_table([read], baseline="fedavg", winners=True)
    assert list(table.titles.items()) == [("fedavg", "FedAvg"), ("local", "Local")]
    winners = {sweep.method: sweep.test_score(sweep.winner) for sweep in read.sweeps}
    assert {name: cell.figure["mean"] for (name, _), cell in table.cells.items()} == {
        name: score["mean"] for name, score in winners.items()
    }
    assert table.cells["local", 0].p_value is not None
    assert "picked by validation samples: FedAvg[lr=" in " ".join(table.notes())
    answer = CliRunner().invoke(app, ["report", str(path), "--winners", "--baseline", "fedavg"])
    assert answer.exit_code == 0
    assert answer.stdout.count("| FedAvg") == 1
