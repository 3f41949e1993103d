"""Control addresses: the engine, endpoint and key of each."""

from __future__ import annotations

from typing import NamedTuple

from baton.errors import ConfigError, ProtocolError
from baton.handoff.session.keys import Keys, is_local


class ControlEndpoint(NamedTuple):
    """`engine` is None if all engines share one pair of keys. `address`: as ZeroMQ takes it."""

    engine: str | None
    address: str
    public_key: bytes


def endpoint_of(address: str, keys: Keys) -> ControlEndpoint:
    """Raises `ProtocolError` if this side may not dial the address."""
    named = address.removeprefix("curve://")
    if keys.engine_id is None:
        if named != address:
            raise ProtocolError(f"the engine at {address!r} asks for keys, and this one has none: start it with --keys")
        if not is_local(address):
            raise ProtocolError(f"{address!r} is on another host: start both engines with --keys")
        return ControlEndpoint(None, address, keys.public)
    engine, at, host = named.partition("@")
    if named == address or not at:
        raise ProtocolError(f"the engine at {address!r} has no keys, and this one has: start both with --keys")
    try:
        key = keys.public_of(engine)
    except ConfigError as error:
        raise ProtocolError(str(error)) from error
    if key is None:
        raise ProtocolError(
            f"engine {engine!r} is not among the authorised keys: copy its .pub file into the key directory here"
        )
    return ControlEndpoint(engine, f"tcp://{host}", key)
