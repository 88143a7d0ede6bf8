"""`fedala leaderboard report`: from csv files alone, with published numbers; text stays text."""

import csv
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from board_results import call, make_result, write_table
from paper_results import read_csv

from fedala.cells.cell import format_value
from fedala.cells.curves import read_curve, write_curve
from fedala.cells.report_files import make_marks
from fedala.cells.results import Results
from fedala.cli.cells import read_folders
from fedala.leaderboard.board import BOARD, settings
from fedala.leaderboard.report import make_markdown
from fedala.leaderboard.table import COLUMNS, find_partner, format_bytes, format_points, make_boards
from fedala.methods import list_changed_defaults

BASE = make_result(curve="0:0.01 100:0.5 140:0.56", trained_curve="100:0.55")
DITTO = replace(BASE, method="ditto", best=0.53, best_round=199)
RESULTS = [
    BASE,
    replace(BASE, seed=1, best=0.57),
    replace(BASE, method="fedavg", best=0.31, final=0.3, worst=0.2, rounds=150),
    DITTO,
    replace(DITTO, method="ditto+ala", best=0.525),
    replace(BASE, method="elsewhere", best=0.6, trained=None, trained_curve=""),
]


def make_rows(*seeds, setting="cifar100-dir"):
    results = Results(seeds or RESULTS)
    [board] = [board for board in make_boards(results) if board.setting.name == setting]
    return board, {row.method: row for row in board.rows}


class Page(HTMLParser):
    """The sort keys and texts of each row of the leaderboards, and all tags."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags, self.is_open = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append((tag, values))
        if tag == "tr":
            self.is_open = "data-rank" in values
            self.rows += [[]] * self.is_open
        if tag in ("th", "td") and self.is_open:
            self.rows[-1] = [*self.rows[-1], [values.get("data-key"), ""]]

    def handle_data(self, data):
        if self.is_open and self.rows[-1]:
            self.rows[-1][-1][1] += data

    def handle_endtag(self, tag):
        self.is_open = self.is_open and tag != "tr"


def read_report(folder):
    """Return the texts of the report in a results folder, by file."""
    paths = (folder / "report" / "leaderboard").iterdir()
    return {path.name: path.read_text("utf-8") for path in paths}


@pytest.fixture
def written(tmp_path):
    """Return the texts of a report that is made of csv files of two machines."""
    write_table(tmp_path / "a" / "h200.csv", *RESULTS[:3])
    write_table(tmp_path / "b" / "cpu.csv", *RESULTS[3:])
    page = tmp_path / "page.md"
    page.write_text("before\n{}\nold\n{}\nafter\n".format(*make_marks("leaderboard")))
    answer = call("report", tmp_path / "a", tmp_path / "b", "--insert", page)
    assert answer.exit_code == 0, answer.output
    return {
        **read_report(tmp_path / "a"),
        "page.md": page.read_text("utf-8"),
        "answer": answer.stdout,
    }


def test_ala_stands_beside_its_method_with_what_it_adds():
    _, rows = make_rows()
    assert rows["fedavg"].with_ala == pytest.approx(56.5)
    assert rows["ditto"].gain == rows["ditto+ala"].gain == pytest.approx(-0.5)
    texts = {column.name: column.text(rows["ditto"]) for column in COLUMNS}
    assert (texts["accuracy"], texts["with_ala"], texts["gain"]) == ("53.00", "52.50", "−0.50")
    assert rows["ditto+ala"].with_ala is None
    assert rows["elsewhere"].gain is None
    assert [find_partner(name) for name in ("fedavg", "fedala", "ditto+ala", "ditto")] == [
        *("fedala", "fedavg", "ditto", "ditto+ala")
    ]


def test_runs_of_different_lengths_say_what_ala_adds_if_both_had_their_best_rounds_by_then():
    """All have best rounds of at most 140, so that 150 rounds decide."""
    _, rows = make_rows()
    assert max(seed.best_round for seed in rows["fedala"].seeds) <= 150
    assert rows["fedavg"].gain == rows["fedala"].gain == pytest.approx(25.5)
    assert "without ALA: 150 rounds" in rows["fedala"].facts
    late = [replace(one, best_round=151) if one.method == "fedala" else one for one in RESULTS]
    _, rows = make_rows(*late)
    assert rows["fedavg"].gain is rows["fedala"].gain is None
    whole = [replace(result, rounds=200) for result in RESULTS]
    _, rows = make_rows(*whole)
    assert rows["fedavg"].gain == rows["fedala"].gain == pytest.approx(25.5)
    assert not any("without ALA" in fact for fact in rows["fedala"].facts)


def test_a_cell_states_rounds_seeds_best_round_machine_and_version():
    _, rows = make_rows()
    assert rows["ditto"].facts == [
        *("200 rounds", "1 seed", "best round 199, still rising", "GPU", "fedala x")
    ]
    assert rows["fedala"].facts[:2] == ["200 rounds", "2 seeds"]
    assert rows["fedcp"].facts == ["not run"]


@pytest.mark.parametrize(("best", "rising"), [(180, False), (181, True), (200, True)])
def test_a_method_is_still_rising_if_its_best_round_is_in_the_last_tenth(best, rising):
    _, rows = make_rows(replace(BASE, best_round=best))
    assert rows["fedala"].is_rising is rising


def test_the_published_number_stands_beside_ours(written):
    _, rows = make_rows()
    assert rows["fedala"].published.accuracy == 55.92
    assert rows["fedala"].difference == pytest.approx(56.5 - 55.92)
    lines = {
        (line["setting"], line["method"]): line
        for line in csv.DictReader(written["leaderboard.csv"].splitlines())
    }
    line = lines["cifar100-dir", "feddbe"]
    assert (line["accuracy"], line["published"], line["how"]) == ("", "64.39", "not run")
    assert line["source"].startswith("PFLlib")
    assert float(lines["cifar100-dir", "fedala"]["difference"]) == pytest.approx(0.58)


def test_the_report_says_that_fedala_is_not_first(written):
    sentence = "FedALA (55.92) is not first: FedDBE (64.39), GPFL (61.86), FedCP (59.56)"
    for name in ("index.html", "leaderboard.md", "page.md", "answer"):
        assert sentence in written[name]
        assert "What ALA adds" in written[name]
    assert (
        "Among ours, FedALA (56.50) is not first: elsewhere (60.00) is ahead."
        in (written["index.html"])
    )


def test_a_shuffled_run_does_not_count_in_a_rank():
    board, _ = make_rows(BASE, DITTO, replace(BASE, method="fedavg", shuffle=True, best=0.9))
    before, _ = make_rows(BASE, DITTO)
    assert board.rows[0].title == "FedAvg, shuffled"
    assert board.describe() == before.describe()
    assert "Among ours, FedALA (56.00) is first of 2." in board.describe()


def test_the_page_of_the_docs_matches_the_results():
    root = Path(__file__).parents[2]
    begin, end = make_marks("leaderboard")
    page = (root / "docs" / "leaderboard.md").read_text("utf-8")
    text = make_markdown(read_folders(root / "results", shown=BOARD))
    assert page.partition(begin)[2].partition(end)[0].strip() == text.strip(), (
        "fedala leaderboard report results --insert docs/leaderboard.md"
    )


def test_tables_are_put_between_the_marks(written):
    before, _, rest = written["page.md"].partition("<!-- begin: fedala leaderboard report -->")
    inside, _, after = rest.partition("<!-- end: fedala leaderboard report -->")
    assert (before, after) == ("before\n", "\nafter\n")
    assert inside.strip() == written["leaderboard.md"].strip()
    tables = re.findall(r"(?:^\|.*\n)+", inside, re.M)
    assert len(tables) == 1  # of the setting that has results
    assert len({line.count("|") for line in tables[0].splitlines()}) == 1


def test_every_cell_of_the_page_has_its_sort_key(written):
    page = Page(written["index.html"])
    # Method, curve and "how" are always there. A setting without results has published numbers.
    assert {len(row) for row in page.rows} == {3 + len(COLUMNS), 3 + 2}
    own = {row[0][1].strip(): row for row in page.rows if row[2][1].strip() not in ("–", "")}
    assert float(own["FedALA"][2][0]) == pytest.approx(56.5)
    assert own["FedALA"][2][1].strip() == "56.50 ± 0.50"
    assert own["FedALA"][0][0] == "FedAvg+ALA"  # sorted by name, it follows FedAvg
    keys = [row[2][0] for row in page.rows]
    numbers = [float(key) for key in keys[: len(own)]]
    assert numbers == sorted(numbers, reverse=True)
    assert set(keys[len(own) :]) == {""}  # what has not been run comes last
    heads = [values for tag, values in page.tags if tag == "th" and "data-sort" in values]
    assert heads[0]["data-sort"] == "text"
    assert heads[1]["aria-sort"] == "descending"


def test_the_page_has_every_setting_and_loads_nothing(written):
    page = Page(written["index.html"])
    shown = [values["data-setting"] for _, values in page.tags if "data-setting" in values]
    assert shown == [name for name in settings() if name not in ("mnist-writer", "digits")]
    [policy] = [values["content"] for _, values in page.tags if "http-equiv" in values]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert not [tag for tag, values in page.tags if {"src", "style", "onclick"} & values.keys()]
    assert '"group":"cifar100-dir"' in written["index.html"]
    assert '"accuracy_trained@cifar100-dir"' in written["index.html"]


def test_latex_has_the_numbers_of_the_markdown_tables(written, tmp_path):
    """`--latex` prints, and nothing else on stdout, the file that every report writes."""
    latex = written["leaderboard.tex"]
    answer = call("report", tmp_path / "a", tmp_path / "b", "--latex")
    assert (answer.stdout, answer.exit_code) == (latex, 0)
    assert "leaderboard.tex" in answer.stderr
    rows = [line for line in latex.splitlines() if line.endswith(r"\\")]
    table = re.findall(r"^\|.*\|$", written["leaderboard.md"], re.M)
    assert {row.count(" & ") for row in rows} == {table[0].count("|") - 2}
    assert len(rows) == len(table) - 1  # Markdown has a line below the head
    [own] = [row for row in rows if row.startswith("FedALA &")]
    assert r"& 56.50 $\pm$ 0.50 & --- & +25.50 & 55.92$^{a}$ &" in own
    [ditto] = [row for row in rows if row.startswith("Ditto &")]
    assert "& $-$0.50 &" in ditto
    assert r"\begin{tabular}{l" + "r" * (rows[0].count(" & ") - 1) + "l}" in latex
    assert latex.count("{") == latex.count("}")


HOSTILE = "</script><script>x</script> a|b `c` [d](javascript:e) *l*"


def test_text_of_a_csv_stays_text(tmp_path):
    write_table(tmp_path / "x.csv", replace(BASE, device=HOSTILE, version="=1+1", data=HOSTILE))
    answer = call("report", tmp_path)
    assert answer.exit_code == 0, answer.output
    texts = read_report(tmp_path)
    assert "<script>x" not in texts["index.html"]
    assert "&lt;script&gt;x" in texts["index.html"]
    assert "<script" not in texts["leaderboard.md"]
    assert r"a\|b \`c\` \[d\](javascript:e) \*l\*" in texts["leaderboard.md"]
    assert not re.search(r"(^|,)=", texts["leaderboard.csv"], re.M)
    assert r"\textless{}script\textgreater{}x" in texts["leaderboard.tex"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"setting": "nowhere"}, "there is no setting nowhere"),
        ({"method": "<b>"}, "no cell of <b>"),
        ({"method": "a+b"}, "no cell of a"),
        ({"set": "fedala.eta=2"}, "no cell of fedala with fedala.eta=2"),
        ({"curve": "5:0.1 3:0.2"}, "rounds in order"),
        ({"curve": "1:1.5"}, "rounds in order"),
        ({"curve": "<svg>"}, "rounds in order"),
        ({"curve": "201:0.5"}, "ends in round 201"),
        ({"worst": 1.5}, "worst must be at most 1"),
        ({"bytes_sent": -1}, "bytes_sent must be at least 0"),
    ],
)
def test_a_line_that_cannot_be_is_refused(changes, sentence, tmp_path):
    write_table(tmp_path / "x.csv", {**vars(BASE), **changes})
    answer = call("report", tmp_path)
    assert answer.exit_code == 2
    assert sentence in answer.stderr
    assert "x.csv, line 2" in answer.stderr


def test_results_are_read_as_they_were_written(tmp_path):
    Results(RESULTS).write(tmp_path / "results.csv")
    assert sorted(read_csv(tmp_path / "results.csv"), key=str) == sorted(RESULTS, key=str)


def test_a_default_that_has_changed_since_is_stated():
    [(key, (old, new))] = list_changed_defaults(["apple"]).items()
    texts = [f"{key}={format_value(value)}" for value in (old, new)]
    before, now = (replace(BASE, method="apple", set=text) for text in texts)
    assert BOARD.has(now)
    assert make_rows(before, now)[1]["apple"].seeds == (now,)
    assert f"{texts[0]} (the default then)" in make_rows(before)[1]["apple"].facts


def test_no_result_and_a_page_without_marks_are_refused(tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    answer = call("report", tmp_path)
    assert (answer.exit_code, "no result" in answer.stderr) == (2, True)
    write_table(tmp_path / "x.csv", BASE)
    answer = call("report", tmp_path, "--insert", tmp_path / "page.md")
    assert (answer.exit_code, "has no place" in answer.stderr) == (2, True)
    assert call("report", tmp_path, "--out", tmp_path).exit_code == 2
    assert not (tmp_path / "report").exists()


def test_a_curve_has_both_ends_and_few_points():
    text = write_curve((round, round / 2000) for round in range(2001))
    points = read_curve(text)
    assert (points[0], points[-1]) == ((0, 0.0), (2000, 1.0))
    assert len(points) == 60
    assert read_curve("") == []


def test_differences_have_a_sign_and_zero_has_one():
    texts = [format_points(value) for value in (1.234, -0.5, 0.0, -0.001, None)]
    assert texts == ["+1.23", "−0.50", "+0.00", "+0.00", ""]


def test_bytes_have_three_digits():
    assert [format_bytes(count) for count in (0, 999, 2_328_104, 5.2e10, None)] == [
        *("0 B", "999 B", "2.33 MB", "52 GB", "")
    ]
