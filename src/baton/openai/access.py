"""Who may use the API, and by which id a request is known outside."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence

from aiohttp import web

from baton.errors import ConfigError, InvalidApiKeyError

REQUEST_ID = "X-Request-Id"
_MAX_ID_CHARS = 128
# Health, metrics and what routers and administrators send have no API keys, as at vLLM.
_GUARDED = ("/v1/", "/tokenize", "/detokenize")


class ApiKeys:
    """The keys of which a client must bring one. Without any, everybody may use the API.

    Raises `ConfigError` for an empty key.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        if not all(key.strip() for key in keys):
            raise ConfigError("api_key", "must not be empty")
        self._digests = [_digest(key) for key in keys]

    def check(self, request: web.Request) -> None:
        """Raise `InvalidApiKeyError` for a request of the API that brings no key."""
        if not self._digests or not request.path.startswith(_GUARDED):
            return
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = _digest(key.strip())
        # All are compared, so that the time tells nothing of the keys.
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            raise InvalidApiKeyError("this server needs an API key: Authorization: Bearer KEY")


async def name_response(request: web.Request, response: web.StreamResponse) -> None:
    """Give an answer the request's `X-Request-Id`, or one of its own."""
    asked = request.headers.get(REQUEST_ID, "")
    usable = 0 < len(asked) <= _MAX_ID_CHARS and asked.isascii() and asked.isprintable()
    response.headers[REQUEST_ID] = asked if usable else secrets.token_hex(16)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
