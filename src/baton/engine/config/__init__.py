"""Settings of an engine, each declared once, and its start arguments."""

from baton.engine.config.engine_config import EngineConfig
from baton.engine.config.kv_transfer import KVTransferConfig
from baton.engine.config.settings import DTYPES, MAX_ENGINES, RANKS, ServingSettings, StepSettings
from baton.engine.config.speculative import SpeculativeConfig
from baton.engine.config.values import block_sizes, parse_size
from baton.setting import declared_settings

__all__ = [
    "DTYPES",
    "MAX_ENGINES",
    "RANKS",
    "EngineConfig",
    "KVTransferConfig",
    "ServingSettings",
    "SpeculativeConfig",
    "StepSettings",
    "block_sizes",
    "declared_settings",
    "parse_size",
]
