from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlencode

import msgspec

from baton.errors import ConfigError
from baton.handoff.session.config import DEFAULT_HANDOFF_TIMEOUT_S
from baton.kvstore.store import StoreOptions
from baton.setting import json_object, refuse_unknown
from baton.transports.registry import parse_uri, read_options


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """`--kv-transfer-config`: docs/transports.md explains each field."""

    kv_transport: str = "shm"
    control_bind: str = "tcp://127.0.0.1:*"
    handoff_timeout_s: float = DEFAULT_HANDOFF_TIMEOUT_S
    prefix_store: StoreOptions | None = None

    @classmethod
    def parse(cls, value: str | dict[str, Any] | None, kv_transport: str | None = None) -> KVTransferConfig:
        """`kv_transport` overrides `value`. Raises `ConfigError` naming the key."""
        data = json_object("kv_transfer_config", value) or {}
        refuse_unknown("kv_transfer_config", data, {f.name for f in fields(cls)})
        for key in ("kv_transport", "control_bind", "prefix_store"):
            if key in data and not isinstance(data[key], str):
                raise ConfigError(f"kv_transfer_config.{key}", "must be a string")
        timeout = data.get("handoff_timeout_s", DEFAULT_HANDOFF_TIMEOUT_S)
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout <= 3600:
            raise ConfigError("kv_transfer_config.handoff_timeout_s", f"must be in (0, 3600], got {timeout!r}")
        given = {} if kv_transport is None else {"kv_transport": kv_transport}
        store = _store_options(data.get("prefix_store"))
        return cls(**{**data, "handoff_timeout_s": float(timeout), "prefix_store": store, **given})

    def to_json(self) -> dict[str, Any]:
        """Fields that `parse` reads."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.prefix_store is not None:
            values["prefix_store"] = f"file://?{urlencode(msgspec.structs.asdict(self.prefix_store))}"
        return values


def _store_options(uri: str | None) -> StoreOptions | None:
    """Raises `ConfigError`."""
    if uri is None:
        return None
    field = "kv_transfer_config.prefix_store"
    try:
        scheme, query = parse_uri(uri)
    except ConfigError:
        scheme = ""
    if scheme != "file":
        raise ConfigError(field, f"must be file:///DIRECTORY, got {uri!r}")
    try:
        return read_options(scheme, query, StoreOptions)
    except ConfigError as error:
        raise ConfigError(field, error.message) from None
