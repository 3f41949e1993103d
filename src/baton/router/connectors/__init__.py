"""The router's connectors, one per kind of handoff."""

from __future__ import annotations

from baton.errors import ConfigError
from baton.router.connectors.base import Connector, ConnectorConfig
from baton.router.connectors.baton import EngineConnector
from baton.router.connectors.sglang import SglangConnector
from baton.router.connectors.vllm_baton import VllmBatonConnector
from baton.router.connectors.vllm_nixl import NixlPullConnector, NixlPushConnector

# vLLM's connectors have vLLM's names.
BATON_ENGINES, SGLANG = "baton", "sglang"
CONNECTORS: dict[str, type[Connector]] = {
    BATON_ENGINES: EngineConnector,
    SGLANG: SglangConnector,
    "BatonConnector": VllmBatonConnector,
    "NixlConnector": NixlPullConnector,
    "NixlPushConnector": NixlPushConnector,
}
VLLM_CONNECTORS = tuple(name for name in CONNECTORS if name not in (BATON_ENGINES, SGLANG))


def create_connector(name: str, config: ConnectorConfig) -> Connector:
    """Raises `ConfigError` for an unknown `name` or an unsupported `config`."""
    if name not in CONNECTORS:
        raise ConfigError("kv_connector", f"must be one of {', '.join(VLLM_CONNECTORS)}, got {name!r}")
    return CONNECTORS[name](config)
