"""Makes the bytes that a stranger sends to an HTTP port: valid, broken, truncated and damaged requests, and bytes of
other protocols.

No request asks for tokens: all bodies are refused before a model computes.
"""

from __future__ import annotations

import gzip
import json
import random

from simulation.fuzz.pool import Kinds, Pool, Step, Steps
from simulation.fuzz.wire import damaged, greeting

_PATHS = (
    b"/",
    b"/health",
    b"/metrics",
    b"/docs",
    b"/v1/models",
    b"/v1/completions",
    b"/v1/chat/completions",
    b"/v1/messages",
    b"/v1/responses",
    b"/tokenize",
    b"/inference/v1/info",
    b"/inference/v1/generate",
    b"/instances/rebind",
    b"/../../etc/passwd",
    b"/%00%ff%c0%ae",
    b"*",
    b"",
)
_METHODS = (b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"CONNECT", b"TRACE", b"get", b"G\0T", b"PRI")
_HEADERS = (
    b"Content-Type: application/json",
    b"Content-Type: multipart/form-data; boundary=" + b"x" * 200,
    b"Content-Encoding: gzip",
    b"Content-Encoding: deflate",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: chunked, gzip",
    b"Transfer-Encoding : chunked",
    b"Content-Length: 5",
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: 5, 5",
    b"Expect: 100-continue",
    b"Upgrade: websocket\r\nConnection: Upgrade",
    b"Upgrade: h2c",
    b"Connection: close",
    b"Authorization: Bearer x",
    b"X-Request-Id: \xff\xfe\r\n folded",
    b"no colon",
    b": no name",
    b"X-Long: " + b"a" * 9000,
    b"Range: bytes=0-18446744073709551615",
)
_TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(190)
_HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)


# Weights of the kinds of connections. "awaited" ones wait for an answer.
_KINDS = {"other protocol": 0.1, "damaged requests": 0.3, "requests": 0.3, "awaited requests": 0.3}


class HttpMaker:
    """An endless source of connections, reproducible for the same `rng`."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._requests = Pool(rng, self._request)
        self.kinds = Kinds(rng, _KINDS)

    def steps(self) -> Steps:
        """One connection's steps. Each request, or part of one, counts as a frame."""
        rng, kind = self.rng, self.kinds.choose()
        if kind == "other protocol":
            yield Step(rng.choice((_TLS_HELLO, _HTTP_2, greeting(), rng.randbytes(rng.choice((1, 64, 4000))))), 1)
            return
        requests = self._requests.draw(rng.choice((1, 1, 4, 30)))
        if kind == "damaged requests":
            requests = [damaged(rng, one) for one in requests]
        yield Step(b"".join(requests), len(requests), wait=kind == "awaited requests")

    def _request(self) -> bytes:
        rng = self.rng
        version = rng.choice((b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b""))
        line = b" ".join((rng.choice(_METHODS), rng.choice(_PATHS), version))
        headers = [b"Host: a", *rng.choices(_HEADERS, k=rng.choice((0, 1, 2, 5)))]
        body = self._body()
        if rng.random() < 0.6:
            headers.append(b"Content-Length: %d" % len(body))
        elif rng.random() < 0.5:
            headers.append(b"Transfer-Encoding: chunked")
            size = rng.choice((b"%x" % len(body), b"ffffffffffffffff", b"-1", b"5;" + b"a" * 300, b""))
            body = size + b"\r\n" + body + b"\r\n0\r\n\r\n"
        return b"\r\n".join((line, *headers, b"", b"")) + body

    def _body(self) -> bytes:
        rng = self.rng
        kind = rng.randrange(6)
        if kind == 0:
            return b""
        if kind == 1:
            return rng.randbytes(rng.choice((1, 30, 3000)))
        if kind == 2:
            return b"[" * rng.choice((10, 3000))
        if kind == 3:
            return gzip.compress(bytes(rng.choice((10, 100_000))), 1, mtime=0)
        if kind == 4:
            return b'{"model": "x", "prompt": "\\ud800", "max_tokens": 1e400}'
        # With types that no field has, so that nothing is computed.
        fields: dict[str, object] = {
            "model": rng.choice((None, 3, "nobody's")),
            "prompt": rng.choice(({}, None, [[]], -1)),
            "n": "x",
        }
        return json.dumps(fields).encode()
