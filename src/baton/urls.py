"""URLs of HTTP servers."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


def is_host(name: str) -> bool:
    """Whether the name can be looked up."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


def split_http_url(url: str) -> SplitResult | None:
    """None for another scheme, without a host, with a malformed port or IPv6 address, or with spaces."""
    if " " in url or not url.isprintable():
        return None
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname is not None and is_host(parts.hostname)
        usable = usable and parts.port != 0
    except ValueError:
        return None
    return parts if usable else None
