"""Settings of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from baton.errors import ConfigError
from baton.plugin_base.config import EngineSettings
from baton.setting import struct_of
from baton.vllm.memory.geometry import Granularity
from baton.wire import KVStream

FIELD = "kv_connector_extra_config"
FirstStep = Literal["recompute", "verify"]
# Fields that vLLM reads, or this plug-in.
_READ = {"kv_connector", "kv_connector_module_path", FIELD, "kv_role", "engine_id", "kv_load_failure_policy"}


class PluginConfig(EngineSettings, frozen=True, kw_only=True):
    """`kv_stream`, `first_step` None: the best that is possible."""

    field: ClassVar[str] = FIELD

    granularity: Granularity = "page"
    kv_stream: KVStream | None = None
    first_step: FirstStep | None = None


def read_config(extra: Mapping[str, Any]) -> PluginConfig:
    """Raises `ConfigError`."""
    config = struct_of(FIELD, dict(extra), PluginConfig)
    config.check("vLLM")
    return config


def check_transfer(transfer: Any) -> None:
    """Raises `ConfigError` for a field that would be ignored."""
    for name, default in vars(type(transfer)()).items():
        if name not in _READ and (value := getattr(transfer, name)) != default:
            raise ConfigError(name, f"BatonConnector has its own settings, in {FIELD}: leave this out, got {value!r}")
