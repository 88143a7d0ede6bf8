"""HTML that is safe by construction, and the page around it: one file, no network, light and dark.

Whatever is not `Html` already is escaped, so that a name out of somebody's run folder is text and nothing else.
"""

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

from fedala.errors import printable

_VOID = {"meta", "input", "img"}


class Html(str):
    """Text that is markup."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """`tag("th", "a < b", scope="row", class_="x")`: an attribute may end in `_`, and is left out where None or False."""
    given = []
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            given.append(f" {key}")
        elif value is not None and value is not False:
            given.append(f' {key}="{html.escape(str(value))}"')
    opening = f"<{name}{''.join(given)}>"
    return Html(opening if name in _VOID else f"{opening}{join(children)}</{name}>")


def join(children: Iterable[object]) -> Html:
    """Children one after the other; lists are taken apart, None is nothing, text is escaped."""
    parts = []
    for child in children:
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, list | tuple):
            parts.append(join(child))
        elif child is not None:
            parts.append(Html(html.escape(str(child))))
    return Html("".join(parts))


#: What Markdown takes for more than text, beside HTML. A bare address or name becomes a link without these, too.
_MARKDOWN = re.compile(r"[\\`*_\[\]|~$]|(?<=:)//|(?i:(?<=www)\.)|@")


def escape_markdown(text: str) -> str:
    """`text` as one line of Markdown, inside a table or not, that shows exactly these characters."""

    def escaped(found: re.Match[str]) -> str:
        return "&#64;" if found[0] == "@" else f"\\{found[0]}"

    return _MARKDOWN.sub(escaped, html.escape(printable(text, 1000), quote=False))


def table(
    caption: object,
    heads: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    label: object = None,
    **attributes: object,
) -> Html:
    """A table whose first column names the row; it scrolls by itself where the screen is narrow. `label`: a shorter caption."""
    head = tag("tr", [tag("th", text, scope="col") for text in heads])
    body = [
        tag("tr", tag("th", row[0], scope="row"), [tag("td", cell) for cell in row[1:]])
        for row in rows
    ]
    whole = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", head),
        tag("tbody", body),
        **attributes,
    )
    return tag(
        "div", whole, class_="scroll", tabindex=0, role="region", aria_label=label or caption
    )


def details(summary: object, *children: object) -> Html:
    return tag("details", tag("summary", summary), *children)


def section(identifier: str, title: str, *children: object) -> Html:
    heading = tag("h2", title, id=f"{identifier}-title")
    return tag("section", heading, *children, id=identifier, aria_labelledby=f"{identifier}-title")


def data_block(identifier: str, data: object) -> Html:
    """JSON for the page's script. No character in it can end the element that it stands in."""
    text = json.dumps(_finite(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{html.escape(identifier)}">{text}</script>')


def _finite(data: Any) -> Any:
    """What JSON can say: NaN and infinity become null."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list | tuple) else data


def document(
    title: str,
    sections: Sequence[tuple[str, str, Html]],
    *,
    lead: object = None,
    data: object = None,
) -> str:
    """A whole page: `sections` are (id, title, content), which also make the navigation; `data` is for charts.

    The page may run the one script that it was made with and nothing else, and may load nothing at all.
    """
    style, script = (
        files(__package__).joinpath(name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js")
    )
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(style)),
    )
    links = [tag("a", name, href=f"#{identifier}") for identifier, name, _ in sections]
    body = tag(
        "body",
        tag("a", "Skip to the results", href="#main", class_="skip"),
        tag(
            "header",
            tag(
                "div",
                tag("h1", title),
                tag("button", "Dark", type="button", id="theme", hidden=True),
                class_="top",
            ),
            lead,
            tag("nav", links, aria_label="Sections"),
        ),
        tag(
            "div", id="methods", role="group", aria_label="Methods shown in the charts", hidden=True
        ),
        tag("main", [section(*entry) for entry in sections], id="main", tabindex=-1),
        tag(
            "noscript",
            tag("p", "Charts need JavaScript; the tables hold the same figures.", class_="note"),
        ),
        tag("div", id="tip", hidden=True, aria_hidden="true"),
        tag("div", id="live", aria_live="polite", class_="unseen"),
        data_block("data", data) if data is not None else None,
        tag("script", Html(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
