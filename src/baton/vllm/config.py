"""Settings of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton.errors import ConfigError
from baton.handoff.config import DEFAULT_MAX_RETRIES, Timers
from baton.handoff.events import Integrity
from baton.handoff.keys import check_bind, ticket_key_file
from baton.handoff.messages import MAX_LEASE_S, MAX_ROUNDS
from baton.handoff.ticket import load_or_create_key
from baton.vllm.geometry import Granularity

FIELD = "kv_connector_extra_config"


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `kv_connector_extra_config` may hold.

    `kv_transport` is the URI of a transport, `control_bind` the address of Baton's own control channel. The
    ticket key is the router's: `ticket_key_file`, or a part of the key directory `keys` (see `baton keys`), without
    which the control channel stays on loopback. `max_retries` bounds the copies of one handoff that are issued again.

    `granularity` is what copies are made of (see `baton.vllm.geometry`) and must be equal on both engines; `integrity`
    is how much of the KV is digested, and needs granularity "token" where K is stored by dimension. A peer that is
    silent for `lease` seconds is given up.
    """

    kv_transport: str = "nixl://"
    control_bind: str = "tcp://127.0.0.1:*"
    ticket_key_file: str | None = None
    keys: str | None = None
    max_retries: Annotated[int, Meta(ge=0, le=MAX_ROUNDS)] = DEFAULT_MAX_RETRIES
    granularity: Granularity = "page"
    integrity: Integrity = "off"
    lease: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)] = 5.0

    @property
    def timers(self) -> Timers:
        """The agent's timers."""
        return Timers(renew=self.lease / 5, lease=self.lease)

    def ticket_key(self) -> bytes:
        """The key that tickets are signed with; `ticket_key_file` is made where there is none.

        Raises `ConfigError` when the file is unsafe, cannot be read or made, or is missing in `keys`.
        """
        file = self.ticket_key_file if self.keys is None else ticket_key_file(self.keys)
        assert file is not None
        try:
            return load_or_create_key(file)
        except OSError as error:
            raise ConfigError(FIELD, f"ticket_key_file {file}: {error.strerror}") from error


def read_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """Raises `ConfigError` for a setting that does not exist, has a bad value, or is missing."""
    try:
        config = msgspec.convert(dict(extra), ConnectorConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(FIELD, str(error)) from error
    if (config.keys is None) == (config.ticket_key_file is None):
        raise ConfigError(FIELD, "give either ticket_key_file or keys, so that the router's tickets can be checked")
    check_bind(config.control_bind, config.keys is not None)
    return config
