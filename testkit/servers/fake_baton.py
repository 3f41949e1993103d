"""`baton` with a fake engine: `Deployment` starts it in tests of processes."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

import msgspec

from baton import cli
from baton.deployment import processes
from baton.engine.config import EngineConfig
from baton.handoff.protocol import ticket as tickets
from testkit.servers import fake_serving
from testkit.servers.fake_serving import FakeEngine


def engine_of(config: EngineConfig, progress: Any, tokenizer: Any) -> FakeEngine:
    """Replaces `AsyncEngine`. The served model name selects a misbehaviour."""
    progress("loading nothing")
    if config.served_model_name == "crash":
        raise RuntimeError("boom at start")
    if config.served_model_name == "warns":
        logging.getLogger("baton.kvstore.prefix_store").warning("the prefix store takes nothing")
        warnings.warn("something of Python's is old", stacklevel=1)
        os.write(2, b"a library says this\n")
    if config.served_model_name == "slow":
        time.sleep(60)
    if config.ticket_key_path is not None:
        fake_serving.KEY = tickets.load_or_create_key(config.ticket_key_path)
    name = {"model": config.served_model_name} if config.served_model_name else {}
    engine = FakeEngine(Path(config.model), role=config.role, handed=Handed(), **name)
    engine.info = msgspec.structs.replace(engine.info, max_model_len=1024)
    if config.served_model_name == "stuck":
        engine.close = lambda: time.sleep(60)  # type: ignore[method-assign]
    if config.served_model_name == "fails":
        # A real engine's thread may call it at any time.
        engine.on_failure = lambda call: threading.Timer(0.1, call, ["the engine failed: out of luck"]).start()  # type: ignore[method-assign]
    if config.served_model_name == "exits":
        threading.Timer(0.1, os._exit, [0]).start()
    return engine


class Handed(dict[bytes, "asyncio.Future[str]"]):
    """The two engines are separate processes here, so for the decode leg every handoff arrives."""

    def setdefault(self, key: bytes, default: Any = None) -> Any:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        future.set_result("handed over")
        return _Settable(future)


class _Settable:
    def __init__(self, future: asyncio.Future[str]) -> None:
        self._future = future

    def __await__(self) -> Any:
        return self._future.__await__()

    def set_result(self, value: str) -> None:
        """The result is set already."""


if __name__ == "__main__":
    module = types.ModuleType("baton.engine.async_engine")
    module.AsyncEngine = engine_of  # type: ignore[attr-defined]
    sys.modules["baton.engine.async_engine"] = module
    processes.BATON = (sys.executable, "-m", "testkit.servers.fake_baton")
    cli.main()
