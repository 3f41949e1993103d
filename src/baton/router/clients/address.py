"""Engine URLs. The suffix `#dp_rank=N` names a data-parallel rank of a vLLM or SGLang server, which counts as its own
engine.
"""

from __future__ import annotations

import re

from baton.errors import RequestError
from baton.urls import split_http_url

_RANK = re.compile(r"dp_rank=(0|[1-9][0-9]{0,3})")


def checked_url(url: str) -> str:
    """`url` in canonical form. Raises `RequestError` if it is not a base URL."""
    parts = split_http_url(url)
    has_other_fragment = parts is not None and parts.fragment and not _RANK.fullmatch(parts.fragment)
    if parts is None or has_other_fragment or parts.query or parts.path not in ("", "/") or "@" in parts.netloc:
        raise RequestError(f"{url!r} is not a base URL such as http://127.0.0.1:8100", "url")
    rank = f"#{parts.fragment}" if parts.fragment else ""
    return f"{parts.scheme}://{parts.netloc}{rank}"


def split_rank(url: str) -> tuple[str, int | None]:
    base, _, fragment = url.partition("#")
    return base, int(fragment.removeprefix("dp_rank=")) if fragment else None
