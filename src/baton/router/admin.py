"""Access control for requests that change a router's engines."""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from baton.directories import own_secret
from baton.errors import ConfigError, ForbiddenError, UnauthorizedError

TOKEN_VARIABLE = "BATON_ADMIN_TOKEN"
_MIN_TOKEN_CHARS = 16


class Admin:
    """Administrative requests need `token`, and must not come from another server's web page. Without a token all are
    refused.

    `names`: the router's host names besides this machine's own. The Host header must be one of them or an IP address: a
    foreign page can point its own host name at the router (DNS rebinding).
    """

    def __init__(self, token: str | None, names: Collection[str] = ()) -> None:
        self._token = token
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    @property
    def enabled(self) -> bool:
        return self._token is not None

    def check(self, request: web.Request) -> None:
        """Raises `ForbiddenError`, `UnauthorizedError` or `HTTPUnsupportedMediaType`."""
        if self._token is None:
            raise ForbiddenError("administration is off: start the router with --admin-token-file")
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"{request.scheme}://{request.host}":
            raise ForbiddenError("administration is not for other servers' web pages")
        if not self._is_own(request.host):
            raise ForbiddenError(
                "the Host header names neither an address nor the host of this router: use its address,"
                " or start it with --host NAME"
            )
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._token.encode()):
            raise UnauthorizedError("administration needs the router's admin token: Authorization: Bearer TOKEN")
        if request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(reason="the content type must be application/json")

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self._names
        return True


def admin_token(path: str | None) -> str | None:
    """The token in the file, created if missing, else in the environment.

    Raises `ConfigError`.
    """
    token, field = os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE
    if path is not None:
        field = "admin_token_file"
        content = own_secret(Path(path), field, lambda: secrets.token_urlsafe(32).encode() + b"\n")
        token = content.decode(errors="replace").strip()
    if token is not None and len(token) < _MIN_TOKEN_CHARS:
        raise ConfigError(field, f"must have at least {_MIN_TOKEN_CHARS} characters")
    return token
