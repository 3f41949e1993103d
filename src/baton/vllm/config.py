"""Settings of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton.errors import ConfigError
from baton.handoff.protocol.messages import MAX_LEASE_S, MAX_ROUNDS
from baton.handoff.protocol.ticket import load_or_create_key
from baton.handoff.session.config import DEFAULT_HANDOFF_TIMEOUT_S, DEFAULT_MAX_RETRIES, Timers
from baton.handoff.session.keys import check_bind, ticket_key_file
from baton.transports.registry import parse_uri
from baton.vllm.geometry import Granularity
from baton.wire import Integrity, KVStream

FIELD = "kv_connector_extra_config"
# Transports that cannot open the memory of a vLLM worker, and why.
_OUT_OF_REACH = {"local": "it joins engines of one process", "shm": "it moves memory that it has allocated itself"}


class PluginConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `kv_connector_extra_config`.

    `keys`: the key directory made by `baton keys`, with the router's ticket key and this engine's secret.
    `kv_transport`: the URI of a transport. `control_bind`: the address of Baton's control socket. `max_retries`: how
    many copies of one handoff may be repeated.

    `granularity`: the unit of copies, pages or tokens (`baton.vllm.geometry`); must be equal on both engines.
    `integrity`: the share of the KV that is digested; needs granularity "token" if K is stored by dimension.
    `kv_stream`: the unit of streaming: a prompt ("off"), a chunk of it, or layers of a chunk (None: layers if possible,
    else chunks). `lease`: seconds of silence after which a peer is given up. `handoff_timeout_s`: a handoff's limit,
    from when both engines have blocks for it.
    """

    keys: str
    kv_transport: str = "nixl://"
    control_bind: str = "tcp://127.0.0.1:*"
    max_retries: Annotated[int, Meta(ge=0, le=MAX_ROUNDS)] = DEFAULT_MAX_RETRIES
    granularity: Granularity = "page"
    integrity: Integrity = "off"
    kv_stream: KVStream | None = None
    lease: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)] = 5.0
    handoff_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = DEFAULT_HANDOFF_TIMEOUT_S

    @property
    def timers(self) -> Timers:
        return Timers(renew=self.lease / 5, lease=self.lease, handoff=self.handoff_timeout_s)

    def ticket_key(self) -> bytes:
        """The key that signs tickets. Raises `ConfigError` if its file in `keys` is unsafe, unreadable or missing."""
        file = ticket_key_file(self.keys)
        try:
            return load_or_create_key(file)
        except OSError as error:
            raise ConfigError(FIELD, f"keys: {file}: {error.strerror}") from error


def read_config(extra: Mapping[str, Any]) -> PluginConfig:
    """Parse `kv_connector_extra_config`. Raises `ConfigError` for an unknown, invalid or missing setting."""
    try:
        config = msgspec.convert(dict(extra), PluginConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(FIELD, str(error)) from error
    scheme = parse_uri(config.kv_transport)[0].rpartition("+")[2]
    if why := _OUT_OF_REACH.get(scheme):
        raise ConfigError(FIELD, f"kv_transport: {scheme}:// cannot move vLLM's memory: {why}")
    check_bind(config.control_bind, has_keys=True)
    return config
