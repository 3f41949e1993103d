"""`kv_connector_extra_config`: errors in it are reported at start, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from baton.errors import ConfigError
from baton.handoff.session.keys import make_keys
from baton.vllm.config import FIELD, check_transfer, read_config

KEY = {"keys": "keys"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lease", 0),
        ("lease", float("nan")),
        ("lease", 1e9),
        ("handoff_timeout_s", 0),
        ("max_retries", -1),
        ("max_retries", 1 << 70),
        ("max_retries", True),
        ("granularity", "block"),
        ("integrity", ["full"]),
        ("leases", 5.0),
    ],
)
def test_a_bad_setting_is_named(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{FIELD}\.{setting}: "):
        read_config(KEY | {setting: value})


@pytest.mark.parametrize("extra", [{}, {"kv_transport": "mooncake://"}])
def test_settings_without_a_key_directory_are_refused(extra: dict[str, str]) -> None:
    """Any process that may use NIXL can read and write the whole KV cache."""
    with pytest.raises(ConfigError, match="missing required field `keys`"):
        read_config(extra)


@pytest.mark.parametrize("uri", ["local://", "shm", "faulty+shm://?fault=fail"])
def test_a_transport_that_cannot_open_vllms_memory(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_transport: (local|shm):// cannot move vLLM's memory"):
        read_config(KEY | {"kv_transport": uri})
    assert read_config(KEY | {"kv_transport": "file:///mnt/kv"}).kv_transport == "file:///mnt/kv"


def test_an_address_that_no_engine_could_dial() -> None:
    with pytest.raises(ConfigError, match="names no interface"):
        read_config(KEY | {"control_bind": "tcp://0.0.0.0:7100"})


def test_keys_that_are_not_there_are_named(tmp_path: Path) -> None:
    config = read_config({"keys": str(tmp_path / "keys")})
    with pytest.raises(ConfigError, match=f"keys: {tmp_path}/keys/ticket.key does not exist"):
        config.ticket_key()
    make_keys(tmp_path / "keys", ["P"])
    assert config.ticket_key() == config.ticket_key()


@dataclass
class Transfer:
    """Fields of vLLM's `KVTransferConfig`."""

    engine_id: str = field(default_factory=lambda: uuid4().hex)
    kv_role: str | None = None
    kv_buffer_device: str = "cuda"
    kv_port: int = 14579
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(("name", "value"), [("kv_port", 7100), ("kv_buffer_device", "cpu")])
def test_a_setting_of_other_connectors_is_not_ignored(name: str, value: Any) -> None:
    check_transfer(own := Transfer(kv_role="kv_both", kv_connector_extra_config=KEY))
    setattr(own, name, value)
    with pytest.raises(ConfigError, match=f"{name}: BatonConnector has its own settings, in kv_connector_extra_config"):
        check_transfer(own)
