"""Settings of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from baton.errors import ConfigError
from baton.plugin_base.config import EngineSettings
from baton.vllm.geometry import Granularity
from baton.wire import KVStream

FIELD = "kv_connector_extra_config"
FirstStep = Literal["recompute", "verify"]


class PluginConfig(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `kv_connector_extra_config`, besides those of `EngineSettings`.

    `granularity`: the unit of copies, pages or tokens (`baton.vllm.geometry`); must be equal on both engines. With
    `integrity` it must be "token" if K is stored by dimension. `kv_stream`: the unit of streaming: a prompt ("off"), a
    chunk of it, or layers of a chunk (None: layers if possible, else chunks). `first_step`: whether D's
    first step verifies a greedy request's first token (None: if possible); equal on both engines.
    """

    field: ClassVar[str] = FIELD

    granularity: Granularity = "page"
    kv_stream: KVStream | None = None
    first_step: FirstStep | None = None


def read_config(extra: Mapping[str, Any]) -> PluginConfig:
    """Raises `ConfigError`."""
    try:
        config = msgspec.convert(dict(extra), PluginConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(FIELD, str(error)) from error
    config.check("vLLM")
    return config
