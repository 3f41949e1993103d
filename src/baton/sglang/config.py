"""Settings of the plug-in: a JSON object in the environment variable `BATON_SGLANG_CONFIG`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from baton.errors import ConfigError
from baton.plugin_base.config import EngineSettings
from baton.setting import struct_of

VARIABLE = "BATON_SGLANG_CONFIG"


class SglangConfig(EngineSettings, frozen=True, kw_only=True):
    """The fields of `BATON_SGLANG_CONFIG`, besides those of `EngineSettings`. `engine_id`: this server's name in the
    key directory."""

    field: ClassVar[str] = VARIABLE

    engine_id: Annotated[str, Meta(min_length=1, max_length=128)]


def read_config(environment: Mapping[str, str]) -> SglangConfig:
    """Raises `ConfigError`."""
    if VARIABLE not in environment:
        raise ConfigError(VARIABLE, 'is not set; it needs at least {"engine_id": NAME, "keys": DIRECTORY}')
    config = struct_of(VARIABLE, environment[VARIABLE], SglangConfig)
    config.check("SGLang")
    return config
