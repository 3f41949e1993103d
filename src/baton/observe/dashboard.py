"""The page at `/dashboard`: one file with its style and script inside, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from dataclasses import dataclass
from importlib import resources

from baton.observe.faults import REASONS


@dataclass(frozen=True, slots=True)
class Page:
    """`policy`: the Content-Security-Policy that allows exactly the page's own style and script."""

    html: str
    policy: str


@functools.cache
def dashboard_page() -> Page:
    directory = resources.files("baton.observe") / "page"
    html, style, script = ((directory / f"dashboard.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    script = script.replace("/*REASONS*/ {}", json.dumps(REASONS))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; "
        "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return Page(html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script), policy)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
