"""Transports by name or URI: `shm`, `nixl://?host=10.0.0.5`, `file:///mnt/kv`, `faulty+shm://?fault=shift-page`.

Other packages add transports by entry points in the group `baton.transports`, named after the scheme: factories that
take the URI's query as a dict of strings and raise `ConfigError` for an unknown option.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import msgspec

from baton.errors import BatonError, ConfigError
from baton.transports.base import Transport, TransportOptions
from baton.wire import Integrity

NewTransport = Callable[[dict[str, str]], Transport]
OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)
_GROUP = "baton.transports"
_NAME = re.compile(r"[a-z][a-z0-9_+.-]*")


class _BuiltIn(NamedTuple):
    """`module` has a factory `create` of its options. `opens`: kinds of devices whose memory it opens. `one_user`: only
    processes of one user can open what it moves bytes through.
    """

    module: str
    options: str | None = None
    opens: tuple[str, ...] = ("cpu",)
    one_user: bool = False


_BUILT_IN = {
    "local": _BuiltIn("mapped.local", one_user=True),
    "shm": _BuiltIn("mapped.shm", one_user=True),
    "cuda_ipc": _BuiltIn("mapped.cuda_ipc", opens=("cuda",), one_user=True),
    "nixl": _BuiltIn("remote.nixl", "NixlOptions", opens=("cpu", "cuda")),
    "mooncake": _BuiltIn("remote.mooncake", "MooncakeOptions"),
    "file": _BuiltIn("remote.file", "FileOptions"),
}


def read_options(scheme: str, query: dict[str, str], kind: type[OptionsT]) -> OptionsT:
    """Raises `ConfigError`."""
    known = [field.name for field in msgspec.structs.fields(kind)]
    for name in query:
        if name not in known:
            others = f"; known: {', '.join(known)}" if known else ", nor any other"
            raise ConfigError("transport", f"{scheme} has no option {name!r}{others}")
    try:
        return msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError("transport", f"{scheme}: {error}") from error


def parse_uri(text: str) -> tuple[str, dict[str, str]]:
    """Scheme and options of a name (`nixl`) or URI (`scheme://?option=value`; a path is the option `path`).

    Raises `ConfigError`.
    """
    name, _, rest = text.partition("://")
    name = name.lower()
    try:
        # A name may have an underscore, a scheme of RFC 3986 has none.
        parts = urlsplit(f"transport://{rest}")
    except ValueError:
        raise _malformed(text) from None
    if not _NAME.fullmatch(name) or parts.netloc or parts.fragment or "//" in parts.path:
        raise _malformed(text)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    if parts.path not in ("", "/"):
        pairs.append(("path", unquote(parts.path)))
    query = dict(pairs)
    if len(query) != len(pairs):
        raise ConfigError("transport", f"an option is given twice in {text!r}")
    outer, plus, inner = name.rpartition("+")
    if plus and outer != "faulty":
        raise ConfigError("transport", f"unknown wrapper {outer!r} in {text!r}; known: faulty")
    if inner not in _BUILT_IN and inner not in _others():
        raise ConfigError("transport", f"unknown transport {inner!r}; known: {_known()}")
    return name, query


def _malformed(text: str) -> ConfigError:
    return ConfigError("transport", f"expected a name or scheme://?option=value, got {text!r}; known: {_known()}")


def _known() -> str:
    return ", ".join(sorted(_BUILT_IN.keys() | _others()))


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
    if not has_keys and not _is_of_one_user(scheme):
        raise ConfigError(field, f"{scheme} needs --keys DIR (see `baton keys`): others could read and write KV")


def built_in_transports(device: str) -> list[str]:
    """Schemes that open memory of `device`: cpu, cuda or cuda:N."""
    return [scheme for scheme, one in _BUILT_IN.items() if device.partition(":")[0] in one.opens]


def check_device(uri: str, device: str, field: str) -> None:
    """Refuse a built-in transport that does not open memory of `device`, and bad options.

    Raises `ConfigError` for `field`, and as `parse_uri`.
    """
    name, query = parse_uri(uri)
    scheme = name.rpartition("+")[2]
    if query and name in _BUILT_IN:
        _options(name, query)
    fits = built_in_transports(device)
    if device != "cpu" and name != scheme:
        raise ConfigError(field, f"{name} does not open memory of {device}; these do: {', '.join(fits)}")
    if scheme in _BUILT_IN and scheme not in fits:
        raise ConfigError(field, f"{scheme} does not open memory of {device}; these do: {', '.join(fits)}")


def transport_host(uri: str) -> str | None:
    """The address that peers dial; None within one host, or if unknown. Raises as `parse_uri`."""
    name, query = parse_uri(uri)
    return getattr(_options(name, query), "host", None) if name in _BUILT_IN else None


def default_integrity(uri: str) -> Integrity:
    """ "sampled" over a network or a disk: a damaged page in the prefix cache would affect other requests.

    Raises as `parse_uri`.
    """
    return "off" if _is_of_one_user(parse_uri(uri)[0].rpartition("+")[2]) else "sampled"


def create_transport(uri: str) -> Transport:
    """`uri` may be a name. Raises `ConfigError`."""
    scheme, query = parse_uri(uri)
    _, plus, inner = scheme.rpartition("+")
    if not plus:
        return _create(inner, query)
    from baton.transports.faulty import FaultyTransport, parse_fault

    fault, rest = parse_fault(query)
    return FaultyTransport(_create(inner, rest), fault)


def _is_of_one_user(scheme: str) -> bool:
    return scheme in _BUILT_IN and _BUILT_IN[scheme].one_user


def _create(scheme: str, query: dict[str, str]) -> Transport:
    if scheme in _BUILT_IN:
        transport: Transport = _module(scheme).create(_options(scheme, query))
        return transport
    point = _others()[scheme]
    try:
        factory: NewTransport = point.load()
        return factory(query)
    except BatonError:
        raise
    except Exception as error:  # another package may raise anything
        raise ConfigError("transport", f"{point.name}: {point.value}: {type(error).__name__}: {error}") from error


def _options(scheme: str, query: dict[str, str]) -> msgspec.Struct:
    name = _BUILT_IN[scheme].options
    kind: type[msgspec.Struct] = TransportOptions if name is None else getattr(_module(scheme), name)
    return read_options(scheme, query, kind)


def _module(scheme: str) -> Any:
    return import_module(f"{__package__}.{_BUILT_IN[scheme].module}")


def _others() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}
