"""An engine's process ends on SIGTERM whenever it comes."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from baton.server.run import run_engine


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def swallowed() -> None:
    """As when Numba compiles: LLVM calls Python, and an exception does not come back."""
    ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGTERM))()


def failing() -> None:
    swallowed()
    raise RuntimeError("no compiled object yet")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("loading", "calls"), [(swallowed, ["close"]), (failing, [])])
def test_sigterm_is_not_lost_while_an_engine_loads(loading: Callable[[], None], calls: list[str]) -> None:
    called: list[str] = []

    def make_engine() -> Any:
        loading()
        info = SimpleNamespace(data_parallel_rank=None)
        return SimpleNamespace(info=info, start=lambda: called.append("start"), close=lambda: called.append("close"))

    with socket.socket() as listener, pytest.raises(SystemExit) as ended:
        run_engine(make_engine, lambda engine: pytest.fail("it serves"), listener, lambda engine, url: None)
    assert (ended.value.code, called) == (128 + signal.SIGTERM, calls)
