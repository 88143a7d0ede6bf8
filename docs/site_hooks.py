"""What the site needs beyond the pages in docs/: pages of the repository, and links to its files.

On a code host, the pages in docs/ link to files outside docs/. On the site, links to the pages in
`PAGES` lead to copies of these, and other files are named without a link.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: Pages outside docs/, and where they are on the site.
PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/RESULTS.md": "project/benchmarks.md",
    "results/README.md": "project/results.md",
    "README.md": "index.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/."""
    for source, target in PAGES.items():
        if target != "index.md":
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make the links of a page fit the site."""
    here = page.file.src_uri
    sources = {target: source for source, target in PAGES.items() if target != "index.md"}
    source = sources.get(here, f"docs/{here}")  # where the page is in the repository

    def replace(match: re.Match[str]) -> str:
        image, text, link, anchor = match.groups(default="")
        if "://" in link or link.startswith(("mailto:", "/")):
            return match.group(0)
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        on_site = PAGES.get(target)
        if on_site is None and target.startswith("docs/"):
            on_site = target.removeprefix("docs/")
        if on_site is None:
            if image or not (ROOT / target).exists():
                return match.group(0)  # the build reports it
            return text if target in text else f"{text} (`{target}`)"
        relative = posixpath.relpath(on_site, posixpath.dirname(here) or ".")
        return f"{image}[{text}]({relative}{anchor})"

    if here == "reference/options.md":
        return markdown.replace("<!-- options -->", _list_options())
    if here == "reference/command-line.md":
        return markdown.replace("<!-- commands -->", _list_commands())
    return _LINK.sub(replace, markdown)


def _list_options() -> str:
    """Return a table of all options of a run."""
    from dataclasses import MISSING, fields

    from fedala.runs.config import Config

    lines = ["| option | default | |", "|---|---|---|"]
    for field in fields(Config):
        default = "" if field.default in (MISSING, None) else f"`{field.default}`"
        text = field.metadata["help"].replace("|", "\\|")
        if choices := field.metadata.get("choices"):
            text += f" ({', '.join(choices)})"
        lines.append(f"| `{field.name}` | {default} | {text} |")
    return "\n".join(lines)


def _list_commands() -> str:
    """Return the usage, the options and the arguments of every command but those of `run`."""
    import typer

    from fedala.cli.app import app

    parts: list[str] = []

    def describe(command: Any, path: str) -> None:
        for name in getattr(command, "commands", {}):
            describe(command.commands[name], f"{path} {name}")
        if hasattr(command, "commands"):
            return
        parts.append(f"## `{path}`\n\n{(command.help or '').split(chr(12))[0].strip()}\n")
        rows = []
        for parameter in command.params:
            names = ", ".join(f"`{one}`" for one in (*parameter.opts, *parameter.secondary_opts))
            text = getattr(parameter, "help", "") or ""
            if names and "help" not in parameter.opts[0]:
                rows.append(f"| {names} | {text.replace('|', chr(92) + '|')} |")
        if path == "fedala run":
            rows = ["| … | every [option](options.md), with dashes: `--batch-size 20` |"]
        if rows:
            parts.append("\n".join(["| | |", "|---|---|", *rows]) + "\n")

    describe(typer.main.get_command(app), "fedala")
    return "\n".join(parts)
