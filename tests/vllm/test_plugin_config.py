"""`kv_connector_extra_config`: what is wrong with it is told at start, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from baton.vllm.config import read_config

KEY = {"ticket_key_file": "ticket.key"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lease", 0),
        ("lease", float("nan")),
        ("lease", 1e9),
        ("max_retries", -1),
        ("max_retries", 1 << 70),
        ("max_retries", True),
        ("granularity", "block"),
        ("integrity", ["full"]),
        ("leases", 5.0),
    ],
)
def test_a_bad_setting_is_named(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        read_config(KEY | {setting: value})


@pytest.mark.parametrize("extra", [{}, KEY | {"keys": "keys"}])
def test_there_is_one_ticket_key(extra: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="either ticket_key_file or keys"):
        read_config(extra)


def test_another_host_needs_keys() -> None:
    with pytest.raises(ConfigError, match="can be reached from other hosts"):
        read_config(KEY | {"control_bind": "tcp://10.0.0.1:7100"})


def test_a_key_file_that_cannot_be_is_named(tmp_path: Path) -> None:
    for file in (tmp_path / "missing" / "ticket.key", tmp_path):
        with pytest.raises(ConfigError, match=f"ticket_key_file.*{file}"):
            read_config({"ticket_key_file": str(file)}).ticket_key()
    made = read_config({"ticket_key_file": str(tmp_path / "ticket.key")})
    assert made.ticket_key() == made.ticket_key()
