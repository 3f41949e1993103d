"""Where and how spans are sent: OpenTelemetry's environment variables, as its Python SDK reads them."""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from baton import __version__
from baton.errors import ConfigError
from baton.urls import split_http_url

Compression = Literal["none", "gzip", "deflate"]
_COMPRESSIONS: tuple[Compression, ...] = ("none", "gzip", "deflate")
_HEADER_NAME, _HEADER_VALUE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
_TIMEOUT_S, _DELAY_MS, _MAX_QUEUED, _MAX_BATCH = 10.0, 5000.0, 2048.0, 512.0


def endpoint_is_set(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether OpenTelemetry's own variables configure a collector, and do not disable it.

    Raises `ConfigError`.
    """
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return False
    if exporter not in ("otlp", ""):
        raise ConfigError("OTEL_TRACES_EXPORTER", f"must be otlp or none for the router, got {exporter!r}")
    return exporter == "otlp" or bool(_of_traces(environment, "ENDPOINT"))


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """`delay_s`: how long spans wait for a full batch. `certificate`: of the authority that signed the collector's.
    `client_certificate`, `client_key`: files for mutual TLS."""

    endpoint: str
    headers: Mapping[str, str]
    resource: Mapping[str, str]
    timeout_s: float = _TIMEOUT_S
    compression: Compression = "none"
    certificate: str | None = None
    client_certificate: str | None = None
    client_key: str | None = None
    delay_s: float = _DELAY_MS / 1e3
    max_queued: int = int(_MAX_QUEUED)
    max_batch: int = int(_MAX_BATCH)

    @classmethod
    def from_environment(cls, endpoint: str | None, environment: Mapping[str, str] = os.environ) -> OtlpSettings:
        """`endpoint` None: from the variables. Raises `ConfigError`."""
        protocol = _of_traces(environment, "PROTOCOL") or "http/protobuf"
        if protocol != "http/protobuf":
            name = _name_of(environment, "PROTOCOL")
            raise ConfigError(name, f"must be http/protobuf for the router, got {protocol!r}")
        propagators = environment.get("OTEL_PROPAGATORS", "").strip() or "tracecontext"
        if "tracecontext" not in [one.strip() for one in propagators.split(",")]:
            raise ConfigError("OTEL_PROPAGATORS", f"must contain tracecontext for the router, got {propagators!r}")
        compression = _of_traces(environment, "COMPRESSION").strip().lower() or "none"
        supported = next((known for known in _COMPRESSIONS if known == compression), None)
        if supported is None:
            known = ", ".join(_COMPRESSIONS)
            raise ConfigError(_name_of(environment, "COMPRESSION"), f"must be one of {known}, got {compression!r}")
        named = {"service.name": environment.get("OTEL_SERVICE_NAME"), "service.version": __version__}
        resource = {"service.name": "baton-router", **_pairs(environment.get("OTEL_RESOURCE_ATTRIBUTES", ""))}
        return cls(
            endpoint=_checked_url(endpoint) if endpoint is not None else _endpoint(environment),
            headers={"User-Agent": f"baton/{__version__}", **_headers(environment)},
            resource=resource | {name: value for name, value in named.items() if value},
            timeout_s=_number(environment, _name_of(environment, "TIMEOUT"), _TIMEOUT_S),
            compression=supported,
            certificate=_of_traces(environment, "CERTIFICATE") or None,
            client_certificate=_of_traces(environment, "CLIENT_CERTIFICATE") or None,
            client_key=_of_traces(environment, "CLIENT_KEY") or None,
            delay_s=_number(environment, "OTEL_BSP_SCHEDULE_DELAY", _DELAY_MS) / 1e3,
            max_queued=int(_number(environment, "OTEL_BSP_MAX_QUEUE_SIZE", _MAX_QUEUED, least=1.0)),
            max_batch=int(_number(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _MAX_BATCH, least=1.0)),
        )


def _endpoint(environment: Mapping[str, str]) -> str:
    """The traces' variable is a whole URL, the general one the base of `/v1/traces`."""
    if own := environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return _checked_url(own, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4318"
    return _checked_url(base.rstrip("/") + "/v1/traces", "OTEL_EXPORTER_OTLP_ENDPOINT")


def _checked_url(url: str, name: str = "otlp_traces_endpoint") -> str:
    parts = split_http_url(url)
    if parts is None or not url.isascii():
        raise ConfigError(name, f"must be like http://HOST:4318/v1/traces, got {url!r}")
    if parts.username is not None:
        raise ConfigError(name, "must not contain a user: put it into OTEL_EXPORTER_OTLP_HEADERS")
    return url


def _name_of(environment: Mapping[str, str], name: str) -> str:
    own = f"OTEL_EXPORTER_OTLP_TRACES_{name}"
    return own if environment.get(own) else f"OTEL_EXPORTER_OTLP_{name}"


def _of_traces(environment: Mapping[str, str], name: str) -> str:
    return environment.get(_name_of(environment, name), "")


def _pairs(text: str) -> dict[str, str]:
    """`key=value,key=value`, percent-encoded. Malformed pairs are ignored, as by the SDK."""
    split = [part.partition("=") for part in text.split(",") if "=" in part]
    return {urllib.parse.unquote(key.strip()): urllib.parse.unquote(value.strip()) for key, _, value in split}


def _headers(environment: Mapping[str, str]) -> dict[str, str]:
    headers = _pairs(_of_traces(environment, "HEADERS"))
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigError(_name_of(environment, "HEADERS"), f"has the header {name!r}, which HTTP does not allow")
    return headers


def _number(environment: Mapping[str, str], name: str, default: float, least: float = 0.0) -> float:
    text = environment.get(name, "")
    try:
        number = float(text) if text else default
    except ValueError:
        number = 0.0
    if not 0.0 < number < 1e9 or number < least:
        raise ConfigError(name, f"must be a positive number{' of at least 1' if least else ''}, got {text!r}")
    return number
