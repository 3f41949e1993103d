"""Versions of vLLM: known ones are accepted, others are refused before any of their modules is imported."""

from __future__ import annotations

import queue
import sys
from types import ModuleType
from typing import Any

import pytest

import baton.vllm
from baton.errors import ConfigError
from baton.vllm import compat, support


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A vLLM of which only the version can be imported."""
    module = ModuleType("vllm")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.delitem(sys.modules, "baton.vllm.connector", raising=False)


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.32.0", "0.3", "dev", "0.x.1"])
def test_another_version_is_refused_in_one_line(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version)
    with pytest.raises(ConfigError) as caught:
        baton.vllm.BatonConnector  # noqa: B018
    assert str(caught.value) == f"vllm: BatonConnector supports vLLM 0.30, 0.31, 0.32, 0.33, this is {version}"


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0", "0.32.1rc1", "0.32.0+cpu", "0.33.0"])
def test_known_versions_are_let_in(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version)
    assert support.check_version() == version[:4]


class EngineCoreProc:
    """Makes its worker as vLLM's does: after its queue."""

    def __init__(self, own: Any) -> None:
        self.input_queue = own
        self.found = Worker().found


class Worker:
    """Not the engine core, whatever it has."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.found = compat.request_queue()


def test_the_queue_of_requests_is_that_of_the_engine_core_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.32.0")
    core = ModuleType("vllm.v1.engine.core")
    core.EngineCoreProc = EngineCoreProc  # type: ignore[attr-defined]
    for name in ("vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, core.__name__, core)
    own: queue.Queue[Any] = queue.Queue()
    assert EngineCoreProc(own).found is own
    assert EngineCoreProc(None).found is None, "vLLM has another kind of queue"
    assert Worker().found is None, "the engine core is in another process"
