"""Sends spans to an OpenTelemetry collector in batches, from a thread (OTLP over HTTP with protobuf).

Needs no package of OpenTelemetry (docs/traces.md says why).
"""

from __future__ import annotations

import gzip
import http
import http.client
import logging
import random
import ssl
import threading
import time
import urllib.parse
import zlib
from collections import deque

from baton.errors import ConfigError
from baton.observe.tracing.otlp_encoding import encode_request, encode_resource
from baton.observe.tracing.otlp_settings import OtlpSettings
from baton.observe.tracing.span import Span

logger = logging.getLogger(__name__)

# Retryable, by the OTLP specification.
_RETRIED = {
    http.HTTPStatus.TOO_MANY_REQUESTS,
    http.HTTPStatus.BAD_GATEWAY,
    http.HTTPStatus.SERVICE_UNAVAILABLE,
    http.HTTPStatus.GATEWAY_TIMEOUT,
}
_CLOSE_S = 5.0
# The rest of a longer answer is not read.
_MAX_ANSWER_BYTES = 1 << 16


class OtlpSink:
    """Sends spans from a thread. If the collector does not answer, or is too slow, spans are dropped.

    Raises `ConfigError`.
    """

    def __init__(self, settings: OtlpSettings) -> None:
        self._settings = settings
        self._resource = encode_resource(settings.resource)
        self._collector = _Collector(settings)
        self._queue: deque[Span] = deque()
        self._num_dropped = 0
        self._wake, self._closed, self._given_up = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-otlp", daemon=True)
        self._thread.start()

    def export(self, span: Span) -> None:
        # Appending needs no lock. Only the thread removes spans, so the bound is exact enough.
        if len(self._queue) >= self._settings.max_queued:
            self._num_dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) >= self._settings.max_batch:
            self._wake.set()

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        self._closed.set()
        self._wake.set()
        self._thread.join(_CLOSE_S)
        self._given_up.set()
        self._thread.join(_CLOSE_S)
        self._collector.close()

    def _run(self) -> None:
        last = False
        while not last:
            self._wake.wait(self._settings.delay_s)
            self._wake.clear()
            last = self._closed.is_set()
            while self._queue and not self._given_up.is_set():
                count = min(len(self._queue), self._settings.max_batch)
                try:
                    self._send([self._queue.popleft() for _ in range(count)])
                except Exception:  # a trace must not fail a request or end the thread
                    logger.exception("%d spans could not be exported", count)
            if self._num_dropped:
                dropped, self._num_dropped = self._num_dropped, 0
                logger.warning("%d spans were dropped: the queue for %s was full", dropped, self._settings.endpoint)

    def _send(self, spans: list[Span]) -> None:
        body = _compressed(encode_request(spans, self._resource), self._settings)
        until, backoff = time.monotonic() + self._settings.timeout_s, 1.0
        while True:
            wait = backoff * random.uniform(0.8, 1.2)
            try:
                status, after = self._collector.post(body, max(until - time.monotonic(), 0.1))
                if status < 300:
                    return
                why, retried = f"HTTP {status}", status in _RETRIED
                wait = float(after) if after.isdecimal() else wait
            except (OSError, http.client.HTTPException) as error:
                why, retried = str(error) or type(error).__name__, True
            if not retried or time.monotonic() + wait > until or self._given_up.wait(wait):
                logger.error("%d spans were dropped: %s: %s", len(spans), self._settings.endpoint, why)
                return
            backoff *= 2.0


class _Collector:
    """A connection to a collector, kept between batches. Used by one thread."""

    def __init__(self, settings: OtlpSettings) -> None:
        """Raises `ConfigError`."""
        parts = urllib.parse.urlsplit(settings.endpoint)
        assert parts.hostname is not None
        self._target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        self._headers = {"Content-Type": "application/x-protobuf", **settings.headers}
        if settings.compression != "none":
            self._headers["Content-Encoding"] = settings.compression
        if parts.scheme == "https":
            context = _ssl_context(settings)
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, context=context
            )
        else:
            self._connection = http.client.HTTPConnection(parts.hostname, parts.port)

    def post(self, body: bytes, timeout_s: float) -> tuple[int, str]:
        """The answer's status and `Retry-After`. Raises `OSError` or `HTTPException`."""
        connection = self._connection
        kept = connection.sock is not None
        connection.timeout = timeout_s
        if kept:
            connection.sock.settimeout(timeout_s)
        try:
            connection.request("POST", self._target, body, self._headers)
            answer = connection.getresponse()
            answer.read(_MAX_ANSWER_BYTES)
            if not answer.isclosed():
                connection.close()
        except (OSError, http.client.HTTPException):
            connection.close()
            if kept:  # the collector may have closed it between two batches
                return self.post(body, timeout_s)
            raise
        return answer.status, answer.headers.get("Retry-After", "")

    def close(self) -> None:
        self._connection.close()


def _ssl_context(settings: OtlpSettings) -> ssl.SSLContext:
    """With the system's certificates, unless the settings name others."""
    try:
        context = ssl.create_default_context(cafile=settings.certificate)
        if settings.client_certificate is not None:
            context.load_cert_chain(settings.client_certificate, settings.client_key)
    except OSError as error:
        raise ConfigError("OTEL_EXPORTER_OTLP_CERTIFICATE", f"certificates cannot be read: {error}") from None
    return context


def _compressed(body: bytes, settings: OtlpSettings) -> bytes:
    match settings.compression:
        case "gzip":
            return gzip.compress(body)
        case "deflate":
            return zlib.compress(body)
        case "none":
            return body
