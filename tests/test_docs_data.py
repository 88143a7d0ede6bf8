"""The pages about partitions, methods and other libraries name what exists, and their code runs."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command

from fedala.cli.app import app
from fedala.data import partitioner
from fedala.data.feature_shift import parse_feature_shift
from fedala.methods import catalogue, list_kinds
from fedala.runs.config import Config

DOCS = Path(__file__).parents[1] / "docs"
README = (DOCS.parent / "README.md").read_text(encoding="utf-8")
PAGES = {name: (DOCS / f"{name}.md").read_text() for name in ("partitions", "coming-from-pfllib")}


def list_flags():
    commands = get_command(app).commands
    own = (commands["run"], commands["partition"], commands["convert"].commands["pfllib"])
    options = [option for command in own for option in command.params]
    return {flag for option in options for flag in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("name", PAGES)
def test_flags_partitions_and_links_exist(name):
    page = PAGES[name]
    flags = list_flags() | {"--iid", "--config-name"}  # two of FL-bench
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page)) <= flags
    for spec in re.findall(r"--partition ([a-z]+[:0-9.]*)(?=[`\s;,])", page):
        if spec not in ("natural", "mine.json", "mine."):
            partitioner(spec)
    for text in re.findall(r"--feature-shift ([a-z]+:[0-9,]+)", page):
        parse_feature_shift(text)
    for link in re.findall(r"\]\(([^)#]+)", page):
        assert (DOCS / link).exists(), link


def test_methods_and_hyperparameters_exist():
    table = PAGES["coming-from-pfllib"].partition("| algorithm |")[2].partition("\n\n")[0]
    entries = catalogue()
    for key in re.findall(r"`([a-z-]+\.[a-z_]+)(?:=[^`]*)?`", table):
        method, _, field = key.partition(".")
        assert field in {row.name for row in fields(entries[method].hyperparameters)}, key
    for names in re.findall(r"^\|[^|]+\|([^|]+)\|", table, re.MULTILINE):
        assert set(re.findall("`([a-z-]+)`", names)) - {"--method"} <= set(entries)


def test_the_tables_of_methods_have_each_of_them_once_with_its_ala_and_kind():
    page = (DOCS / "methods" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\.md\) `(.+?)` \| (.+?) \|", page, re.MULTILINE)
    entries = catalogue()
    assert sorted(name for _, _, name, _ in rows) == [*entries]
    for title, link, name, ala in rows:
        assert (title, link) == (entries[name].title, name)
        assert (ala in ("yes", "= FedALA")) is entries[name].takes_ala
    for kind, listed in list_kinds().items():
        [row] = re.findall(rf"^\| {kind} \|.*", page, re.MULTILINE)
        assert sorted(re.findall(r"\((.+?)\.md\)", row)) == [entry.name for entry in listed]
        shown = re.search(rf"[|;] {kind}: ([^;.]+)", README)
        assert shown, kind
        assert sorted(re.findall("`(.+?)`", shown[1])) == [entry.name for entry in listed]
    compared = (DOCS / "methods" / "differences.md").read_text(encoding="utf-8")
    assert all(f"[{one.title}]({one.name}.md)" in compared for one in entries.values())


def test_the_numbers_of_methods_are_true():
    entries = catalogue().values()
    numbers = f"| methods | {len(entries)}, and ALA on {sum(one.takes_ala for one in entries)} of"
    assert numbers in README
    assert numbers in (DOCS / "comparison.md").read_text(encoding="utf-8")


def test_the_options_that_flower_names_exist():
    assert {"rounds", "join_ratio"} <= {field.name for field in fields(Config)}


def test_the_python_of_the_page_runs(capsys):
    scope = {}
    for block in re.findall(r"```python\n(.*?)```", PAGES["partitions"], re.DOTALL):
        exec(block, scope)
    counts = eval(capsys.readouterr().out.splitlines()[0])
    assert counts[0] == pytest.approx(counts[2], abs=1)
    assert sum(map(sum, counts)) == 600
