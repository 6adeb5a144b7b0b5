"""What pages have inside them: style sheets, data, and the policy that keeps all else out."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

HERE = Path(__file__).parent


def page(name: str, title: str, script: str, data: Any, connect: bool = False, **fields: Any) -> str:
    """The HTML of a page: `page.html` around the body `name.html`, with the style sheet of that name.

    The `script` reads `data`, as JSON. With `connect` it may ask the server that the page came from. `fields` are HTML
    for the names in the body.
    """
    whole, body = (Template((HERE / file).read_text(encoding="utf-8")) for file in ("page.html", f"{name}.html"))
    return whole.substitute(
        title=escape(title), policy=policy([script], connect=connect), css=style(name), script=script,
        data=data_of(data), body=body.substitute(fields),
    )  # fmt: skip


def style(name: str) -> str:
    """The style sheet of a page, after the colours and rules that all pages share."""
    return "".join((HERE / file).read_text(encoding="utf-8") for file in ("colours.css", f"{name}.css"))


def data_of(value: Any) -> str:
    """JSON that may stand in a script element of HTML."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", r"\u003c")


def policy(scripts: Sequence[str], images: bool = False, connect: bool = False) -> str:
    """The content security policy of a page that may run these scripts, and nothing else.

    With `images` it may save a plot as a picture, and with `connect` ask the server that it came from.
    """
    digests = (b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    more = ("img-src data:; " if images else "") + ("connect-src 'self'; " if connect else "")
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; {more}"
        "base-uri 'none'; form-action 'none'"
    )
