"""Transports by URI: `local://`, `shm://`, `faulty+shm://?fault=shift-page`. Each is imported when it is
asked for.

A transport of another package is found by an entry point of the group `baton.transports`, named after its
scheme. It loads to a factory that takes the URI's query as a dict of strings, and raises `ConfigError` for
keys it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from urllib.parse import parse_qsl, urlsplit

from baton.errors import ConfigError
from baton.transports.base import Transport

Factory = Callable[[dict[str, str]], Transport]


def _local(query: dict[str, str]) -> Transport:
    from baton.transports.local import LocalTransport

    _refuse("local", query)
    return LocalTransport()


def _shm(query: dict[str, str]) -> Transport:
    from baton.transports.shm import ShmTransport

    _refuse("shm", query)
    return ShmTransport()


def _nixl(query: dict[str, str]) -> Transport:
    from baton.transports.nixl import create

    return create(query)


def _mooncake(query: dict[str, str]) -> Transport:
    from baton.transports.mooncake import create

    return create(query)


def _file(query: dict[str, str]) -> Transport:
    from baton.transports.file import create

    return create(query)


_BUILT_IN: dict[str, Factory] = {
    "local": _local,
    "shm": _shm,
    "nixl": _nixl,
    "mooncake": _mooncake,
    "file": _file,
}


def _refuse(scheme: str, query: dict[str, str]) -> None:
    if query:
        raise ConfigError("transport", f"{scheme} has no option {sorted(query)[0]!r}")


def create_transport(uri: str) -> Transport:
    """Build the transport of `uri`, `scheme://?option=value`. `faulty+` before a scheme wraps it.

    Raises `ConfigError` for a malformed URI, an unknown scheme or option, or a value out of range.
    """
    parts = urlsplit(uri)
    if not parts.scheme or parts.netloc or parts.path not in ("", "/") or parts.fragment or "://" not in uri:
        raise ConfigError("transport", f"expected scheme://?option=value, got {uri!r}")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query = dict(pairs)
    if len(query) != len(pairs):
        raise ConfigError("transport", f"an option is given twice in {uri!r}")
    outer, plus, inner = parts.scheme.rpartition("+")
    if not plus:
        return _factory(parts.scheme)(query)
    if outer != "faulty":
        raise ConfigError("transport", f"unknown wrapper {outer!r} in {uri!r}; known: faulty")
    from baton.transports.faulty import FaultyTransport, parse_fault

    fault, rest = parse_fault(query)
    return FaultyTransport(_factory(inner)(rest), fault)


def _factory(scheme: str) -> Factory:
    if scheme in _BUILT_IN:
        return _BUILT_IN[scheme]
    found = {point.name: point for point in entry_points(group="baton.transports")}
    if scheme not in found:
        known = ", ".join(sorted({*_BUILT_IN, *found}))
        raise ConfigError("transport", f"unknown transport {scheme!r}; known: {known}")
    factory: Factory = found[scheme].load()
    return factory
