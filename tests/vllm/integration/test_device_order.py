"""Copies and a GPU that vLLM does not wait for: no copy before the kernels that it could meet have ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.errors import ConfigError
from baton.transports.base import DeviceMemory
from baton.vllm import compat
from baton.vllm.config import ConnectorConfig
from baton.vllm.connector import BatonConnector, BatonMetadata, _digester
from baton.vllm.geometry import CacheLayout
from baton.vllm.steps import Step


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(compat, "wait_for_device", lambda config: made.append("wait"))
    return made


def connector(calls: list[str]) -> BatonConnector:
    """The worker's half, with a worker that says when it is called."""
    half = BatonConnector.__new__(BatonConnector)
    half._vllm_config = SimpleNamespace()
    begin, finalise = (lambda step: calls.append("begin")), (lambda computed: calls.append("finalise"))
    worker: Any = SimpleNamespace(begin=begin, finalise=finalise)
    half._worker = worker
    return half


def test_the_device_is_waited_for_before_copies_and_only_then(calls: list[str]) -> None:
    half, anything = connector(calls), cast("Any", object())
    for step in (Step(), Step(receives=[anything]), Step(computed=[anything])):
        half.bind_connector_metadata(BatonMetadata(step, idle=False))
        half.wait_for_save()
        calls.append("|")
    assert " ".join(calls) == "begin finalise | wait begin finalise | begin wait finalise |"


def test_digests_of_a_gpus_memory_are_refused() -> None:
    layout = CacheLayout([DeviceMemory(4096, 64, 0, enter=lambda: None)], [], {}, {})
    key = {"ticket_key_file": "ticket.key"}
    assert _digester(ConnectorConfig(**key), layout) is None
    with pytest.raises(ConfigError, match="integrity"):
        _digester(ConnectorConfig(**key, integrity="sampled"), layout)
