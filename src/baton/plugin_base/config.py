"""Settings that every plug-in has."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from baton.errors import ConfigError
from baton.handoff.protocol.messages import MAX_LEASE_S, MAX_ROUNDS
from baton.handoff.protocol.ticket import load_or_create_key
from baton.handoff.session.config import DEFAULT_HANDOFF_TIMEOUT_S, DEFAULT_MAX_RETRIES, Timers
from baton.handoff.session.keys import check_bind, ticket_key_file
from baton.transports.registry import parse_uri
from baton.wire import Integrity

# Transports that cannot open another engine's memory, and why.
_OUT_OF_REACH = {"local": "it joins engines of one process", "shm": "it moves memory that it has allocated itself"}


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """docs/vllm.md ("Settings") explains each."""

    # Where a plug-in's user writes the settings, for errors.
    field: ClassVar[str] = "settings"

    keys: str
    kv_transport: str = "nixl://"
    control_bind: str = "tcp://127.0.0.1:*"
    max_retries: Annotated[int, Meta(ge=0, le=MAX_ROUNDS)] = DEFAULT_MAX_RETRIES
    integrity: Integrity = "off"
    lease: Annotated[float, Meta(gt=0, le=MAX_LEASE_S)] = 5.0
    handoff_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = DEFAULT_HANDOFF_TIMEOUT_S

    @property
    def timers(self) -> Timers:
        return Timers(renew=self.lease / 5, lease=self.lease, handoff=self.handoff_timeout_s)

    def ticket_key(self) -> bytes:
        """Signs tickets. Raises `ConfigError` if its file in `keys` is unsafe, unreadable or missing."""
        file = ticket_key_file(self.keys)
        try:
            return load_or_create_key(file)
        except OSError as error:
            raise ConfigError(self.field, f"keys: {file}: {error.strerror}") from error

    def check(self, engine: str) -> None:
        """Raises `ConfigError` for a transport that cannot open the memory of `engine`, or an unsafe address."""
        scheme = parse_uri(self.kv_transport)[0].rpartition("+")[2]
        if why := _OUT_OF_REACH.get(scheme):
            raise ConfigError(self.field, f"kv_transport: {scheme}:// cannot move {engine}'s memory: {why}")
        check_bind(self.control_bind, has_keys=True)
