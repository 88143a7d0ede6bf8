"""HTML pages from Jinja2 templates: every value is escaped, and a page loads nothing.

A page is one file. Its content-security policy allows its own style and script only.
"""

import base64
import hashlib
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from fedala.errors import import_optional


def render(
    package: str,
    template: str,
    *,
    styles: Sequence[str],
    scripts: Sequence[str] = (),
    data: object = None,
    shows_images: bool = False,
    **values: object,
) -> str:
    """Return a page from a template of `package`, which may build on those of `fedala.report`.

    `styles` and `scripts` name files among the templates; the scripts read `data`.
    """
    environment = _environment(package)
    style, script = ("\n".join(_read(package, name) for name in own) for own in (styles, scripts))
    policy = ["default-src 'none'", f"style-src {_source(style)}"]
    if script:
        policy.append(f"script-src {_source(script)}")
    if shows_images:
        policy.append("img-src data:")
    values |= {
        "policy": "; ".join([*policy, "base-uri 'none'"]),
        "style": style,
        "script": script,
        "data": replace_nan(data),
    }
    return str(environment.get_template(template).render(values))


@cache
def _environment(package: str) -> Any:
    jinja2 = import_optional("jinja2", "Jinja2", "cli", "An HTML report")
    packages = dict.fromkeys((package, __package__))
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in packages]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _read(package: str, name: str) -> str:
    own = files(package).joinpath("templates", name)
    shared = files(__package__).joinpath("templates", name)
    return (own if own.is_file() else shared).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """Return the source of a content-security policy that allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def replace_nan(data: Any) -> Any:
    """Return data that JSON can hold: NaN and infinity become None."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {str(key): replace_nan(value) for key, value in data.items()}
    return [replace_nan(value) for value in data] if isinstance(data, list | tuple) else data
