"""The files, programs and commands of docs/your-data.md work, in their order."""

import re
from pathlib import Path

from typer.testing import CliRunner

from fedala.cli.app import app

PAGE = (Path(__file__).parents[2] / "docs" / "your-data.md").read_text(encoding="utf-8")


def test_the_page_works_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown, scope = {}, {}
    for language, title, content in re.findall(
        r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE
    ):
        if title:
            Path(title).parent.mkdir(parents=True, exist_ok=True)
            Path(title).write_text(content, encoding="utf-8")
        elif language == "python":
            exec(content, scope)
        elif language == "sh":
            [command] = content.splitlines()
            result = CliRunner().invoke(app, command.split()[1:])
            assert result.exit_code == 0, result.output
            shown[command.split()[3]] = result.stdout
    assert list(shown) == [
        "patients.csv", "people.parquet", "reviews.csv", "digits.npz", "photos", "leaf",
    ]  # fmt: skip
    quoted = re.search(r"\n((?:    .*\n)+)", PAGE)[1]
    assert shown["patients.csv"].endswith(quoted.replace("    ", ""))
    for name, clients in [("people.parquet", 2), ("reviews.csv", 2), ("digits.npz", 5),
                          ("photos", 2), ("leaf", 2)]:  # fmt: skip
        assert f"natural, {clients} clients" in shown[name]
        assert ("The split of the data is kept" in shown[name]) is (name != "people.parquet")
    Path("l.json").write_text('{"user_data": {"u": {"x": ["a", "b"], "y": ["c", "d"]}}}')
    scope["write_csv"]("l.json", "l.csv")
    assert scope["load"]("l.csv").client_names == ("u",)
