"""`--kv-events-config`, as vLLM's."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from baton.errors import ConfigError
from baton.setting import json_object, struct_of


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an engine publishes its KV events. Names and defaults are vLLM's, but `endpoint` is on loopback: the events
    contain the prompts' tokens. See docs/router.md ("KV events").
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def parse(cls, value: str | dict[str, Any] | None) -> KVEventsConfig:
        """Raises `ConfigError`."""
        given = json_object("kv_events_config", value) or {}
        if given and "enable_kv_cache_events" not in given:
            raise ConfigError("kv_events_config", f"has no enable_kv_cache_events: {', '.join(given)} would do nothing")
        config = struct_of("kv_events_config", given, cls)
        for name in ("endpoint", "replay_endpoint"):
            endpoint = getattr(config, name)
            if endpoint is not None:
                check_endpoint(endpoint, f"kv_events_config.{name}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(config, name) < 1:
                raise ConfigError(f"kv_events_config.{name}", f"must be at least 1, got {getattr(config, name)}")
        return config

    @property
    def enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    def of_rank(self, rank: int) -> KVEventsConfig:
        return msgspec.structs.replace(
            self, endpoint=_moved(self.endpoint, rank), replay_endpoint=_moved(self.replay_endpoint, rank)
        )


def check_endpoint(endpoint: str, field: str) -> None:
    """Raises `ConfigError` unless it is `tcp://HOST:PORT`, with `*` for a free port, or `ipc://PATH`."""
    scheme, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    free = port == "*" or (port.isascii() and port.isdigit() and int(port) < 1 << 16)
    if not (scheme == "ipc" and place) and not (scheme == "tcp" and host and free):
        raise ConfigError(field, f"must be tcp://HOST:PORT or ipc://PATH, got {endpoint!r}")


def _moved(endpoint: str | None, rank: int) -> str | None:
    if endpoint is None or not rank:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}" if port not in ("*", "0") else endpoint
