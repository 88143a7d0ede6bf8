"""Text from a results folder stays text in Markdown, LaTeX, HTML and spreadsheets."""

import html
import re
from dataclasses import replace

import pytest
from markdown_it import MarkdownIt
from paper_results import call, make_result, read_csv, write_table

from fedala.cells.results import Results
from fedala.errors import spreadsheet_safe
from fedala.paper import report
from fedala.report.formats import escape_markdown

BASE = make_result(setting="mnist-pathological")
HOSTILE = (
    r"<script>x</script> a|b `c` [d](javascript:e) \input{/etc/passwd} "
    r"$5 %f &g #h _i ^j ~k *l* https://m.n o@p"
)


@pytest.fixture
def report_texts(tmp_path):
    write_table(
        tmp_path / "results.csv",
        replace(BASE, data=HOSTILE),
        replace(BASE, setting="tiny-resnet18-dir", device=HOSTILE),
    )
    answer = call("report", tmp_path)
    assert answer.exit_code == 0, answer.output
    paths = (tmp_path / "report" / "paper").iterdir()
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def test_markdown_shows_a_field_and_does_not_run_it(report_texts):
    shown = (
        r"&lt;script&gt;x&lt;/script&gt; a\|b \`c\` \[d\](javascript:e) \\input{/etc/passwd} "
        r"\$5 %f &amp;g #h \_i ^j \~k "
        r"\*l\* https:\//m.n o&#64;p"
    )
    assert report_texts["tables.md"].count(shown) >= 2  # as a note, and as a device in a table
    assert "<script" not in report_texts["tables.md"]
    for rows in re.findall(r"(?:^\|.*\n)+", report_texts["tables.md"], re.M):
        assert len({line.replace(r"\|", "").count("|") for line in rows.splitlines()}) == 1


def test_markdown_renders_to_the_original_text():
    for text in (
        HOSTILE,
        "&#64; &lt;",
        "**x** ![y](z) <!-- c -->",
        "a\\|b",
        "www.x.y http://x",
        "~~x~~ ```",
    ):
        rendered = MarkdownIt("gfm-like", {"linkify": False}).render(
            f"| a |\n|---|\n| x {escape_markdown(text)} |\n"
        )
        assert rendered.count("<td>") == 1
        inside = rendered.partition("<td>")[2].partition("</td>")[0]
        assert "<" not in inside
        assert html.unescape(inside) == f"x {text}"


def test_latex_prints_a_field_and_does_not_run_it(report_texts):
    shown = (
        r"\textless{}script\textgreater{}x\textless{}/script\textgreater{} a\textbar{}b `c` "
        r"[d](javascript:e) \textbackslash{}input\{/etc/passwd\} \$5 \%f \&g \#h \_i "
        r"\textasciicircum{}j \textasciitilde{}k *l*"
    )
    assert report_texts["tables.tex"].count(shown) >= 2
    assert r"\input" not in report_texts["tables.tex"]


def test_html_shows_a_field_and_does_not_run_it(report_texts):
    assert "<script" not in report_texts["index.html"]
    assert "&lt;script&gt;" in report_texts["index.html"]


@pytest.mark.parametrize(
    "text", ["=1+1", "+1+1", "-1+cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1", "-", "--1"]
)
def test_no_field_is_a_formula_of_a_spreadsheet(text):
    assert spreadsheet_safe(text) == f"'{text}"
    assert spreadsheet_safe(spreadsheet_safe(text)) == f"'{text}"


@pytest.mark.parametrize(
    "value", ["-1.89", "+3", "-1e-5", -1.89, -2, None, True, "a=b", "", "'=1", "1-2"]
)
def test_numbers_and_plain_text_stay_as_they_are(value):
    assert spreadsheet_safe(value) is value


def test_the_csv_of_results_holds_no_formula(tmp_path):
    Results([replace(BASE, data='=HYPERLINK("http://x")', device="@x", version="-x")]).write(
        tmp_path / "results.csv"
    )
    [run] = read_csv(tmp_path / "results.csv")
    assert (run.data, run.device, run.version) == ('\'=HYPERLINK("http://x")', "'@x", "'-x")
    Results([run]).write(tmp_path / "results.csv")
    assert list(read_csv(tmp_path / "results.csv")) == [run]


def test_a_reports_csv_holds_no_formula(monkeypatch):
    monkeypatch.setattr(
        report, "list_comparisons", lambda results: [{"method": "=x", "difference": -1.5}]
    )
    assert report._make_csv(Results([])) == "method,difference\n'=x,-1.5\n"
