"""Addresses beside the HTTP port."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import zmq

from baton.engine.config import EngineConfig
from baton.errors import ConfigError
from baton.handoff.session.config import own_bind
from baton.handoff.session.keys import CONTROL_BIND, is_local
from baton.transports.registry import parse_uri, transport_host

log = logging.getLogger(__name__)

_PATH = "ipc://"


def check_ports(config: EngineConfig, num_engines: int = 1) -> None:
    """Raise `ConfigError` if an address is taken, or `num_engines` would share it."""
    for field, address in _addresses(config, num_engines > 1 or config.ticket_key_path is not None):
        if address.rpartition(":")[2] in ("*", "0"):
            continue
        if num_engines > 1:
            raise ConfigError(field, f"{address} is for one engine, but {num_engines} start: let its port be *")
        if (why := _taken(address)) is not None:
            raise ConfigError(field, f"cannot listen at {address}: {why}")


def warn_if_loopback(config: EngineConfig, host: str) -> None:
    """Warn if other hosts can reach the API but not the control socket, or not the transport."""
    bind, uri = config.kv_transfer_config.control_bind, config.kv_transfer_config.kv_transport
    if config.role == "both" or is_local(f"tcp://[{host}]:1"):
        return
    transport = transport_host(uri)
    if transport is not None and is_local(f"tcp://[{transport}]:1"):
        log.warning(
            "--host %s can be reached from other hosts, but the transport %s is on loopback: their handoffs fail. "
            "With engines on several hosts, name an address of this one: %s://?host=ADDRESS",
            host,
            uri,
            parse_uri(uri)[0],
        )
    if is_local(bind):
        log.warning(
            "--host %s can be reached from other hosts, but %s %s cannot: their handoffs fail as unreachable_peer. "
            "With engines on several hosts, set control_bind in --kv-transfer-config",
            host,
            CONTROL_BIND,
            bind,
        )


def _addresses(config: EngineConfig, hands_over: bool) -> Iterator[tuple[str, str]]:
    first = config.data_parallel_rank
    for rank in range(first, first + config.num_ranks if hands_over else first):
        yield CONTROL_BIND, own_bind(config.kv_transfer_config.control_bind, rank)
    if config.kv_events_config.enabled:
        events = config.kv_events_config.of_rank(first)
        yield "kv_events_config.endpoint", events.endpoint
        if events.replay_endpoint is not None:
            yield "kv_events_config.replay_endpoint", events.replay_endpoint


def _taken(address: str) -> str | None:
    if address.startswith(_PATH):
        # ZeroMQ would take the path from its owner.
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(address.removeprefix(_PATH))
            return "another process does"
        return None
    with zmq.Context() as context, context.socket(zmq.PULL) as listener:
        try:
            listener.bind(address)
        except zmq.ZMQError as error:
            return str(error)
    return None
