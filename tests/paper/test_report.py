"""`fedala paper report`: our numbers, their difference to the paper's, and the departures."""

import base64
import csv
import hashlib
import html
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from paper_results import call, make_result, read_csv, read_results, write_table

from fedala.cells.report_files import insert, make_marks
from fedala.cells.results import CellResult, Results
from fedala.errors import UserError
from fedala.paper import comparison, formats, report
from fedala.paper.experiments import drawings, settings, tables

BASE = make_result()
SETTING = settings()[BASE.setting]
BEGIN, END = make_marks("paper")


def seeds(*bests, **changes):
    return [
        replace(
            BASE,
            seed=seed,
            best=best,
            best_joined=round(best - 0.1, 6),
            final=min(0.5, best),
            **changes,
        )
        for seed, best in enumerate(bests)
    ]


@pytest.fixture
def results():
    return Results(
        [
            *seeds(0.55, 0.56, 0.57, 0.56, 0.56),
            *seeds(0.574, shuffle=True, rounds=300),
            *seeds(0.29, 0.31, method="fedavg", rounds=300, planned=2000),
            *seeds(0.7, setting="ag-news-dir", data="partial: 82031 of 127600 samples"),
            *seeds(0.64, setting="cifar100-joining"),
            *seeds(0.5, method="ditto", rounds=300),
            *seeds(0.56, method="ditto+ala", rounds=300),
        ]
    )


def find_column(table, column):
    return next(c for c in tables()[table].columns if c.name == column)


def test_mean_deviation_and_difference(results):
    figure = results.find(find_column("table2", "cifar100-dir").cell("fedala"))
    assert figure.accuracy == pytest.approx(56.0)
    assert figure.std == pytest.approx(0.632455, abs=1e-5)
    assert figure.departures == []
    [ours, shuffled] = [
        row
        for row in comparison.list_comparisons(results)
        if (row["table"], row["column"], row["method"]) == ("table2", "cifar100-dir", "fedala")
    ]
    assert (ours["paper"], ours["ours"], ours["difference"], ours["agreement"]) == (
        55.92,
        56.0,
        0.08,
        "agrees",
    )
    assert (shuffled["difference"], shuffled["agreement"]) == (1.48, "near")


@pytest.mark.parametrize(
    ("changes", "departures"),
    [
        ({"rounds": 300}, ["300 of 2000 rounds"]),
        ({"shuffle": True}, ["shuffled"]),
        ({"eval_every": 5}, ["evaluated every 5 rounds"]),
        ({"data": "partial: 1 of 2 samples"}, ["data partial: 1 of 2 samples"]),
        ({"diverged": 3}, ["clients diverged in 3 rounds"]),
        ({"diverged": 1}, ["clients diverged in 1 round"]),
    ],
)
def test_departures_from_the_paper_are_listed(changes, departures):
    assert CellResult(tuple(seeds(*[0.5] * 5, **changes)), SETTING).departures == departures


def test_fewer_seeds_and_unequal_rounds_are_departures():
    assert CellResult((BASE, replace(BASE, seed=1, rounds=300)), SETTING).departures == [
        "300 to 2000 of 2000 rounds",
        "2 of 5 seeds",
    ]


@pytest.mark.parametrize(
    ("difference", "spread", "agreement"),
    [
        (-1.0, 0, "agrees"),
        (1.004, 0, "agrees"),
        (1.01, 0, "near"),
        (-3.0, 0, "near"),
        (3.2, 0, "differs"),
        (0.9, 0.1, "agrees"),
        (-1.5, 1.5, "agrees"),
        (1.5, 1.4, "near"),
        (-3.2, 3.3, "agrees"),
        (3.2, 3.1, "differs"),
    ],
)
def test_agreement(difference, spread, agreement):
    assert comparison.OwnNumber("", difference, spread=spread).agreement == agreement


def test_a_difference_within_the_two_standard_deviations_agrees():
    """FedProx has 33.87 ± 2.39 in the paper. Ours: 36 and 38 with one seed, 38 ± 2 with two."""
    cell = {"setting": "cifar100-joining", "method": "fedprox"}
    for bests, agreement in (([0.46], "agrees"), ([0.48], "differs"), ([0.46, 0.5], "agrees")):
        [row] = comparison.list_comparisons(Results(seeds(*bests, **cell)))
        assert row["agreement"] == agreement


def test_only_participants_count_if_the_paper_counts_only_them(results):
    assert results.find(
        find_column("table7", "cifar100-joining").cell("fedala")
    ).accuracy == pytest.approx(54.0)


def test_the_longer_of_two_runs_of_a_seed_counts():
    longer = replace(BASE, rounds=2000, best=0.6)
    for runs in ([replace(BASE, rounds=10), longer], [longer, replace(BASE, rounds=10)]):
        assert Results(runs).seeds == [longer]


def test_runs_with_different_schedules_are_not_mixed():
    runs = [
        replace(BASE, method="fedphp", planned=300, rounds=300, seed=0),
        replace(BASE, method="fedphp", planned=2000, rounds=400, seed=1),
    ]
    figure = Results(runs).find(find_column("table2", "cifar100-dir").cell("fedphp"))
    assert [run.seed for run in figure.seeds] == [1]


def test_improvements_are_ours_with_ala_minus_ours_without(results):
    [sheet] = [sheet for sheet in comparison.make_sheets(results) if sheet.table.name == "table4"]
    cells = next(cells for group in sheet.groups for title, cells in group if title == "Ditto")
    paper, [ours] = cells[-1].paper, cells[-1].ours
    assert paper == "3.46"
    assert ours.text == "6.00"
    assert ours.difference == pytest.approx(6.0 - 3.46)


def test_an_improvement_says_how_each_of_the_two_was_run():
    def departures(**without):
        runs = [
            replace(BASE, method="ditto+ala", rounds=300),
            replace(BASE, method="ditto", **without),
        ]
        [sheet] = [
            sheet for sheet in comparison.make_sheets(Results(runs)) if sheet.table.name == "table4"
        ]
        cells = next(cells for group in sheet.groups for title, cells in group if title == "Ditto")
        return cells[-1].ours[0].departures

    assert departures(rounds=300) == ("300 of 2000 rounds", "1 of 5 seeds")
    assert departures(rounds=400) == (
        "with ALA: 300 of 2000 rounds, 1 of 5 seeds; without: 400 of 2000 rounds, 1 of 5 seeds",
    )


def test_the_description_counts_cells_once():
    runs = [
        replace(BASE, seed=1),
        replace(BASE, seed=2),
        replace(BASE, shuffle=True),
    ]  # FedALA stands in two tables
    assert comparison.describe(Results(runs)).startswith(
        "1 of the paper's 241 cells have been run, and 1 with shuffling. Of"
    )


def test_tables_without_own_numbers_are_left_out(results):
    assert [sheet.table.name for sheet in comparison.make_sheets(results)] == [
        "table1",
        "table2",
        "table4",
        "table6",
        "table7",
    ]


def test_the_cost_table_shows_seconds_and_parameters():
    [sheet] = [
        sheet
        for sheet in comparison.make_sheets(
            Results([replace(BASE, setting="tiny-resnet18-dir", seconds_per_round=1.5)])
        )
        if sheet.table.cost
    ]
    total, per_round, parameters = dict(row for group in sheet.groups for row in group)["FedALA"]
    assert (total.paper, per_round.paper, parameters.paper) == ("7+116 min", "1.93 min", "2·Σ")
    assert total.ours[0].text.startswith("3:45 (150 rounds")
    assert (per_round.ours[0].text, parameters.ours[0].text) == ("1.5 s", "200")


@pytest.fixture
def output(results, tmp_path):
    results.write(tmp_path / "results.csv")
    answer = call("report", tmp_path)
    assert answer.exit_code == 0, answer.output
    return tmp_path / "report" / "paper", answer


def test_a_report_needs_only_the_csv(output, results, tmp_path):
    assert read_results(tmp_path).seeds == sorted(
        results.seeds, key=lambda run: (run.cell, run.planned, run.seed)
    )
    folder, answer = output
    assert {path.name for path in folder.iterdir()} == {
        "tables.md",
        "tables.tex",
        "tables.csv",
        "index.html",
    }
    assert "55.92" in answer.stdout
    assert "partial: 82031 of 127600 samples" in answer.stdout


def test_markdown(output):
    text = (output[0] / "tables.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| FedALA | 99.88"))
    assert "55.92 ± 0.03<br>**56.00 ± 0.63** (+0.08) ●<br>**57.40**<sup>" in row
    assert "300 of 2000 rounds, 1 of 5 seeds, shuffled" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert (
            len({line.count(" | ") for line in table.splitlines() if not line.startswith("|---")})
            == 1
        )


def test_latex(output):
    text = (output[0] / "tables.tex").read_text(encoding="utf-8")
    assert text.count("\\begin{") == text.count("\\end{")
    assert "\\textcolor{agrees}{56.00 $\\pm$ 0.63 ($+0.08$)}" in text
    assert not set("±ρΣα·") & set(text)
    for table in re.findall(r"\\toprule(.*?)\\bottomrule", text, re.S):
        rows = [
            line
            for line in table.splitlines()
            if line.endswith(r"\\") and "multicolumn" not in line
        ]
        assert len({line.count("&") for line in rows}) == 1


def test_csv(output):
    with (output[0] / "tables.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    fedavg = next(row for row in rows if (row["table"], row["method"]) == ("table2", "fedavg"))
    assert (fedavg["paper"], fedavg["ours"], fedavg["difference"]) == ("31.89", "30.0", "-1.89")
    assert fedavg["departures"] == "300 of 2000 rounds; 2 of 5 seeds"


class Balanced(HTMLParser):
    """Checks that every element is closed, in order."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_complete_and_loads_nothing(output):
    text = (output[0] / "index.html").read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert "http" not in text.replace("http-equiv", "")
    style = text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'"
    assert policy in html.unescape(text)
    assert (
        '<span class="ours agrees" title="agrees">56.00 ± 0.63<small> (+0.08) ●</small></span>'
        in text
    )


def test_a_figure_on_the_page_says_what_it_shows(results, tmp_path):
    (tmp_path / "figure-wl.png").write_bytes(b"png")
    report.write(results, tmp_path, [tmp_path / "figure-wl.png"])
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    caption = f"figure-wl: {drawings()['figure-wl'].title}"
    assert html.unescape(text).count(caption) == 2  # as a caption, and for screen readers


def test_text_from_a_file_is_escaped_in_html(tmp_path):
    Results([replace(BASE, data="<script>x</script>")]).write(tmp_path / "results.csv")
    report.write(read_results(tmp_path), tmp_path / "report")
    assert "<script>" not in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


def test_text_from_a_file_is_escaped_in_latex(tmp_path):
    text = formats.to_latex(comparison.make_sheets(Results([replace(BASE, data=r"\x{#$^~")]))[1])
    assert r"data \textbackslash{}x\{\#\$\textasciicircum{}\textasciitilde{}" in text


def test_the_tables_go_between_the_marks_of_a_file(results, tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        insert(report.make_markdown(results), path, "paper")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert text.count("### Table 2") == 1


def test_a_file_without_marks_is_refused(results, tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(UserError, match="has no place for the tables"):
        insert(report.make_markdown(results), tmp_path / "page.md", "paper")


def test_a_report_is_not_written_among_the_results(results, tmp_path):
    results.write(tmp_path / "results.csv")
    answer = call("report", tmp_path, "--out", tmp_path)
    assert answer.exit_code == 2
    assert "read as results" in answer.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digests.json", "results.csv"]


def test_a_folder_without_results_is_refused(tmp_path):
    answer = call("report", tmp_path)
    assert answer.exit_code == 2
    assert "There is no result to report" in answer.stderr


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text.replace("setting", "place", 1), "is not a csv of results"),
        (lambda text: text.replace("cifar100-dir", "cifar"), "line 2: there is no setting cifar"),
        (lambda text: text.replace("0.56,150", "much,150"), "line 2: best must be a number"),
        (lambda text: text.rstrip() + ",more\n", "must have 33 columns"),
        (lambda text: text.replace("fedala", "fed/ala"), "line 2: there is no cell of fed/ala"),
    ],
)
def test_a_csv_that_is_not_of_results_is_refused(tmp_path, change, sentence):
    path = tmp_path / "results.csv"
    Results([BASE]).write(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=sentence):
        Results(read_csv(path))


def test_a_result_with_a_default_that_has_changed_says_so(tmp_path):
    """Lines of APPLE that do not name scale_core are from before its default changed."""
    old, new = (
        make_result(method="apple", set=text, best=best, final=0.4)
        for text, best in (("", 0.43), ("apple.scale_core=false", 0.46))
    )
    cell = tables()["table2"].columns[4].cell("apple")
    assert cell.setting.name == old.setting
    found = Results(read_csv(write_table(tmp_path / "old.csv", old))).find(cell)
    assert found.departures[1] == "apple.scale_core=true (the default then)"
    both = Results(read_csv(write_table(tmp_path / "both.csv", new, old)))
    assert both.find(cell).accuracy == pytest.approx(46)  # the present default wins
    assert both.find(cell).departures == ["1 of 5 seeds"]
    assert not both.contradictions
    other = make_result(method="apple", set="apple.scale_core=maybe")
    with pytest.raises(UserError, match="no cell of apple with apple"):
        list(read_csv(write_table(tmp_path / "other.csv", other)))


def test_the_docs_and_the_stored_report_match_the_results(tmp_path):
    root = Path(__file__).parents[2]
    results = read_results(root / "results")
    page = (root / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert (
        page.partition(BEGIN)[2].partition(END)[0].strip() == report.make_markdown(results).strip()
    )
    for path in report.write(results, tmp_path, []):
        stored = root / "results" / "report" / "paper" / path.name
        assert stored.read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), (
            "fedala paper report results"
        )
