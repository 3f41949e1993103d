"""The two deployments for clients: Baton's own engines, and fake vLLM servers behind the router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

from baton.openai.tools import Parsing
from baton.router import RouterConfig, build_app
from benchmarks import smollm2
from testkit.clients.obedient_vllm import TEMPLATE, ObedientVllm
from testkit.processes.running import running_up
from testkit.servers.fake_serving import ADMIN_TOKEN, KEY, served, write_tokenizer
from testkit.servers.fake_vllm import Shared
from testkit.servers.fleets import QUICK

# The name in the recorded requests.
MODEL = "demo"
HEAD = "models/baton-smollm2-eagle3"
FLAGS = ["--batch-invariant", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--served-model-name", MODEL]


@contextmanager
def embedded(folder: Path) -> Iterator[str]:
    """`baton up` with one prefill and one decode engine, with drafts; every prompt is handed over. Raises
    `smollm2.NotAvailableError`.
    """
    spec = {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3}
    more = ["--max-local-prefill-length", "0", "--speculative-config", json.dumps(spec)]
    with running_up(str(smollm2.smollm2()), folder / "log", *FLAGS, *more) as up:
        yield up.url


@contextmanager
def before_vllm(folder: Path) -> Iterator[str]:
    """The router over a prefill and a decode `ObedientVllm`."""
    model = write_tokenizer(folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[str]:
        shared = Shared()
        async with contextlib.AsyncExitStack() as stack:
            urls = [
                await stack.enter_async_context(ObedientVllm(model, name, shared=shared, max_model_len=8192).serve())
                for name in ("P", "D")
            ]
            config = RouterConfig(
                prefill=(urls[0],),
                decode=(urls[1],),
                engine="vllm",
                ticket_key=KEY,
                admin_token=ADMIN_TOKEN,
                timers=QUICK,
                parsing=Parsing(True, "hermes", None),
            )
            yield await stack.enter_async_context(served(await build_app(config)))

    with in_thread(serve) as url:
        yield url


@contextmanager
def in_thread(serve: Callable[[], AbstractAsyncContextManager[str]]) -> Iterator[str]:
    """Run `serve` on its own event loop, for blocking clients."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    running = serve()
    try:
        url = asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result(60)
        try:
            yield url
        finally:
            asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
