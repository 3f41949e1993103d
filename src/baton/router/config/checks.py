"""Checks of a router's configuration that need no engine."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import ConfigError, RequestError
from baton.observe.tracing.tracer import make_tracer
from baton.router.clients.address import checked_url
from baton.router.config.router_config import RouterConfig
from baton.router.connectors import create_connector
from baton.router.connectors.base import Connector, ConnectorConfig
from baton.router.discovery import Service, read_services
from baton.router.index.readers import read_sources
from baton.router.policies import create_policies


def check_routing(config: RouterConfig) -> None:
    """Raises the `ConfigError` of `app.build_app` for `RoutingSettings`."""
    create_policies(config.policy, config.prefill_policy, config.decode_policy, config.policy_config)
    tracer = make_tracer(config.otlp_traces_endpoint, config.trace, config.trace_sampling_ratio)
    if tracer is not None:
        tracer.close()
    elif config.trace_sampling_ratio is not None:
        ratio = config.trace_sampling_ratio
        raise ConfigError("trace_sampling_ratio", f"needs otlp_traces_endpoint or trace, got {ratio}")


def check_config(config: RouterConfig) -> None:
    """Raises the errors of `app.build_app` that depend on no engine."""
    connector = new_connector(config, read_services(config.discover))
    if config.ticket_key is not None and not connector.needs_ticket_key:
        raise ConfigError("ticket_key_file", f"is not for {config.kv_connector}, which has no tickets, nor is keys")
    if config.seed_first_token and config.near_tie is not None:
        raise ConfigError("near_tie", "is not for seed_first_token, with which no token is sampled twice")
    if config.policy_config.hand_back and not connector.moves_prefixes:
        raise ConfigError("policy_config", f"hand_back is not for {config.kv_connector or config.engine}")
    if config.policy_config.hand_back and config.engine == "vllm" and not config.kv_event_source:
        raise ConfigError("policy_config", "hand_back needs kv_event_source, which tells what vLLM servers hold")
    urls: set[str] = set()
    for name in ("prefill", "decode", "both"):
        for url in getattr(config, name):
            try:
                known = checked_url(url)
            except RequestError as error:
                raise ConfigError(name, str(error)) from None
            if known in urls:
                raise ConfigError(name, f"{url} is given twice")
            urls.add(known)
    _check_sources(config, urls)
    check_routing(config)


def _check_sources(config: RouterConfig, urls: set[str]) -> None:
    events, replays = (
        read_sources(getattr(config, name), name) for name in ("kv_event_source", "kv_event_replay_source")
    )
    unread = set() if config.engine == "baton" else replays.keys() - events.keys()
    unknown = set() if config.discover or config.admin_token is not None else {*events, *replays} - urls
    for url in sorted(unread):
        raise ConfigError("kv_event_replay_source", f"{url} has no kv_event_source")
    for url in sorted(unknown):
        field = "kv_event_source" if url in events else "kv_event_replay_source"
        raise ConfigError(field, f"{url} is not an engine of this router")


def new_connector(config: RouterConfig, services: Sequence[Service]) -> Connector:
    named = config.kv_connector or "BatonConnector"
    settings = ConnectorConfig(config.ticket_key, config.seed_first_token, config.ticket_life)
    connector = create_connector(named if config.engine == "vllm" else config.engine, settings)
    pairs = config.prefill or config.decode or any(service.role != "both" for service in services)
    if connector.needs_ticket_key and config.ticket_key is None and pairs:
        raise ConfigError("ticket_key_file", "is required with prefill and decode engines")
    for name in ("kv_mode", "allow_mode_override"):
        if getattr(config, name) and not connector.has_modes:
            raise ConfigError(name, f"{named} has one mode")
    if not (pairs or config.both or services) and config.admin_token is None:
        why = "without engines, and without an admin token by which one could join, a router serves nobody"
        raise ConfigError("prefill", f"is needed, with --decode, or --both: {why}")
    return connector
