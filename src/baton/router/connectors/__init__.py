"""The kinds of handoff that a router knows: a module and an entry of `CONNECTORS` each."""

from __future__ import annotations

from baton.errors import ConfigError
from baton.router.connectors.base import Connector, ConnectorConfig
from baton.router.connectors.baton import EngineConnector
from baton.router.connectors.vllm_baton import VllmBatonConnector
from baton.router.connectors.vllm_nixl import NixlPullConnector, NixlPushConnector

# Engines of Baton's own have one kind. vLLM's are called as vLLM calls them.
BATON_ENGINES = "baton"
CONNECTORS: dict[str, type[Connector]] = {
    BATON_ENGINES: EngineConnector,
    "BatonConnector": VllmBatonConnector,
    "NixlConnector": NixlPullConnector,
    "NixlPushConnector": NixlPushConnector,
}
VLLM_CONNECTORS = tuple(name for name in CONNECTORS if name != BATON_ENGINES)


def create_connector(name: str, config: ConnectorConfig) -> Connector:
    """Return the connector called `name`. Raises `ConfigError`: there is none, or it cannot do what is asked."""
    if name not in CONNECTORS:
        raise ConfigError("kv_connector", f"must be one of {', '.join(VLLM_CONNECTORS)}, got {name!r}")
    return CONNECTORS[name](config)
