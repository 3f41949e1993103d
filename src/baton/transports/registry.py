"""Transports by name or URI: `shm`, `nixl://?host=10.0.0.5`, `file:///mnt/kv`, `faulty+shm://?fault=shift-page`.

Another package adds a transport by an entry point in the group `baton.transports`, named after the scheme: a factory
that takes the URI's query as a dict of strings and raises `ConfigError` for an unknown option.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import msgspec

from baton.errors import ConfigError
from baton.transports.base import Transport
from baton.wire import Integrity

NewTransport = Callable[[dict[str, str]], Transport]
OptionsT = TypeVar("OptionsT")
_GROUP = "baton.transports"
_NAME = re.compile(r"[a-z][a-z0-9_+.-]*")
# By scheme; each module has a factory `create`.
_BUILT_IN = {
    "local": "mapped.local",
    "shm": "mapped.shm",
    "cuda_ipc": "mapped.cuda_ipc",
    "nixl": "remote.nixl",
    "mooncake": "remote.mooncake",
    "file": "remote.file",
}
# For memory of a CUDA device, and for host memory.
_OF_DEVICES = ("cuda_ipc", "nixl")
_OF_HOSTS = ("local", "shm", "nixl", "mooncake", "file")
# They move bytes through memory that only processes of one user can open.
_OF_ONE_USER = ("local", "shm", "cuda_ipc")


def read_options(scheme: str, query: dict[str, str], kind: type[OptionsT]) -> OptionsT:
    """Raises `ConfigError`."""
    try:
        return msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError("transport", f"{scheme}: {error}") from error


def refuse_options(scheme: str, query: dict[str, str]) -> None:
    if query:
        raise ConfigError("transport", f"{scheme} has no option {sorted(query)[0]!r}")


def parse_uri(text: str) -> tuple[str, dict[str, str]]:
    """Scheme and options of a name (`nixl`) or URI (`scheme://?option=value`; a path is the option `path`).

    Raises `ConfigError`.
    """
    known = _factories()
    expected = f"expected a name or scheme://?option=value, got {text!r}; known: {', '.join(sorted(known))}"
    name, _, rest = text.partition("://")
    name = name.lower()
    try:
        # A name may have an underscore, a scheme of RFC 3986 has none.
        parts = urlsplit(f"transport://{rest}")
    except ValueError:
        raise ConfigError("transport", expected) from None
    if not _NAME.fullmatch(name) or parts.netloc or parts.fragment or "//" in parts.path:
        raise ConfigError("transport", expected)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    if parts.path not in ("", "/"):
        pairs.append(("path", unquote(parts.path)))
    query = dict(pairs)
    if len(query) != len(pairs):
        raise ConfigError("transport", f"an option is given twice in {text!r}")
    outer, plus, inner = name.rpartition("+")
    if plus and outer != "faulty":
        raise ConfigError("transport", f"unknown wrapper {outer!r} in {text!r}; known: faulty")
    if inner not in known:
        raise ConfigError("transport", f"unknown transport {inner!r}; known: {', '.join(sorted(known))}")
    return name, query


def transport_name(text: str) -> str:
    """The public part of a URI: its scheme, and NIXL's back-end if named. Raises as `parse_uri`."""
    scheme, query = parse_uri(text)
    scheme = scheme.rpartition("+")[2]
    return f"{scheme} {query['backend']}" if "backend" in query else scheme


def with_path(text: str, path: str) -> str:
    """`text` as a URI; `file` without a path gets `path`. Raises as `parse_uri`."""
    found, query = parse_uri(text)
    if found.rpartition("+")[2] == "file":
        query = {"path": path, **query}
    return f"{found}://?{urlencode(query)}" if query else f"{found}://"


def require_keys(uri: str, has_keys: bool, field: str) -> None:
    """Without CURVE keys, refuse a transport whose KV leaves the processes of one user on one host.

    Raises `ConfigError` for `field`, and as `parse_uri`.
    """
    scheme = parse_uri(uri)[0].rpartition("+")[2]
    if not has_keys and scheme not in _OF_ONE_USER:
        raise ConfigError(field, f"{scheme} needs --keys DIR (see `baton keys`): others could read and write KV")


def check_device(uri: str, device: str, field: str) -> None:
    """Refuse a built-in transport that does not open memory of `device`: cpu, cuda or cuda:N.

    Raises `ConfigError` for `field`, and as `parse_uri`.
    """
    name = parse_uri(uri)[0]
    scheme = name.rpartition("+")[2]
    fits = _OF_HOSTS if device == "cpu" else _OF_DEVICES
    if device != "cpu" and name != scheme:
        raise ConfigError(field, f"{name} does not open memory of {device}; these do: {', '.join(fits)}")
    if scheme in _BUILT_IN and scheme not in fits:
        raise ConfigError(field, f"{scheme} does not open memory of {device}; these do: {', '.join(fits)}")


def default_integrity(uri: str) -> Integrity:
    """ "sampled" over a network or a disk: a damaged page in the prefix cache would affect other requests.

    Raises as `parse_uri`.
    """
    return "off" if parse_uri(uri)[0].rpartition("+")[2] in _OF_ONE_USER else "sampled"


def create_transport(uri: str) -> Transport:
    """`uri` may be a name. Raises `ConfigError`."""
    scheme, query = parse_uri(uri)
    _, plus, inner = scheme.rpartition("+")
    factory: NewTransport = _factories()[inner].load()
    if not plus:
        return factory(query)
    from baton.transports.faulty import FaultyTransport, parse_fault

    fault, rest = parse_fault(query)
    return FaultyTransport(factory(rest), fault)


def _factories() -> dict[str, EntryPoint]:
    built_in = {
        scheme: EntryPoint(scheme, f"{__package__}.{module}:create", _GROUP) for scheme, module in _BUILT_IN.items()
    }
    return {point.name: point for point in entry_points(group=_GROUP)} | built_in
