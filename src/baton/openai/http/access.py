"""Access to the API: keys, TLS and CORS."""

from __future__ import annotations

import hashlib
import hmac
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from baton.errors import ConfigError, InvalidApiKeyError
from baton.openai.http.caller import CALLER, REQUEST_ID, request_id_of

# Other paths need no API key, as in vLLM.
_GUARDED = ("/v1/", "/tokenize", "/detokenize")


_CORS_MAX_AGE_S = 600


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use a server. `allowed_origins`: web pages from there ("*": all) may read responses. `ssl_cert_reqs` as
    in Python's `ssl`: 0 ignores client certificates, 2 requires one signed by `ssl_ca_certs`."""

    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0

    def tls(self) -> ssl.SSLContext | None:
        """None for plain HTTP. Raises `ConfigError`."""
        if self.ssl_certfile is None:
            for field in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
                if getattr(self, field):
                    raise ConfigError(field, f"needs ssl_certfile, got {getattr(self, field)!r}")
            return None
        if self.ssl_cert_reqs != ssl.CERT_NONE and self.ssl_ca_certs is None:
            raise ConfigError("ssl_cert_reqs", "needs ssl_ca_certs")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # Otherwise OpenSSL would ask for a password on the terminal.
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password=lambda: "")
        except (OSError, ValueError) as error:
            raise ConfigError("ssl_certfile", f"cannot be used with its key: {error}") from None
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except OSError as error:
                raise ConfigError("ssl_ca_certs", f"cannot be read: {error}") from None
        context.verify_mode = ssl.VerifyMode(self.ssl_cert_reqs)
        return context

    def origin_of(self, request: web.Request) -> str | None:
        origin = request.headers.get("Origin")
        allowed = origin is not None and not {origin, "*"}.isdisjoint(self.allowed_origins)
        return origin if allowed else None

    def check_page(self, request: web.Request) -> None:
        """Browsers let any web page post all but JSON. Raises `HTTPUnsupportedMediaType`."""
        origin = request.headers.get("Origin")
        if request.method != "POST" or origin is None or request.content_type == "application/json":
            return
        if origin != f"{request.scheme}://{request.host}" and self.origin_of(request) is None:
            raise web.HTTPUnsupportedMediaType(reason="a web page's content type must be application/json")

    def preflight(self, request: web.Request) -> web.Response | None:
        method = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or method is None or self.origin_of(request) is None:
            return None
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
            "Access-Control-Max-Age": str(_CORS_MAX_AGE_S),
        }
        return web.Response(status=204, headers=headers)

    def allow_origin(self, request: web.Request, response: web.StreamResponse) -> None:
        if self.allowed_origins:
            response.headers.add("Vary", "Origin")
        if (origin := self.origin_of(request)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = REQUEST_ID


OPEN = Access()


class ApiKeys:
    """A client must have one of these, if any. Raises `ConfigError` for an empty key."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        if not all(key.strip() for key in keys):
            raise ConfigError("api_key", "must not be empty")
        if len(set(keys)) < len(keys):
            raise ConfigError("api_key", "has one key twice")
        self._digests = [_digest(key) for key in keys]

    def check(self, request: web.Request) -> None:
        if request.path.startswith(_GUARDED) and not self.allow(request):
            raise InvalidApiKeyError("this server needs an API key: Authorization: Bearer KEY, or X-Api-Key: KEY")

    def allow(self, request: web.Request) -> bool:
        return not self._digests or self.number(request) is not None

    def number(self, request: web.Request) -> int | None:
        """The number of the request's key, from 1. Anthropic's clients send `X-Api-Key`."""
        if not self._digests:
            return None
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = [bearer] if scheme.lower() == "bearer" else []
        given.append(request.headers.get("X-Api-Key", ""))
        # Compare all keys: timing must reveal nothing.
        known = [hmac.compare_digest(_digest(key.strip()), digest) for key in given for digest in self._digests]
        return 1 + known.index(True) % len(self._digests) if any(known) else None


def name_response(request: web.Request, response: web.StreamResponse) -> None:
    caller = CALLER.get()
    response.headers[REQUEST_ID] = request_id_of(request.headers) if caller is None else caller.request_id


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
