"""Runs an engine core on its own thread, for callers on an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from baton.engine.build import build_engine
from baton.engine.config import EngineConfig, block_sizes
from baton.engine.metrics import EngineMetrics
from baton.engine.request_checks import make_request
from baton.errors import EngineStalledError, EngineUnavailableError, RequestError
from baton.handoff.agent.agent import HandoffAgent
from baton.kernels.cpu.affinity import bind_team, end_team
from baton.openai.http.waiting import AdmissionLimit
from baton.sampling_params import SamplingParams, StructuredOutputsParams
from baton.text import Tokenizer
from baton.wire import EngineInfo, EngineLoad, GenerateRequest, TokenChunk

logger = logging.getLogger(__name__)

# A chunk, and whether it is the request's last; None if the engine has died.
_Delivery = tuple[TokenChunk, bool] | None


class _Stream:
    """One request's chunks, from the engine thread to its event loop.

    Chunks before `begun` belong to a previous request with the same id.
    """

    def __init__(self) -> None:
        self.begun = False
        self.queue: asyncio.Queue[_Delivery] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, delivery: _Delivery) -> None:
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, delivery)
        except RuntimeError:
            logger.debug("a chunk came after its event loop closed")


def _cache_config(config: EngineConfig, num_tokens: int) -> dict[str, str]:
    size = block_sizes(config.block_size)[""]
    return {
        "block_size": str(size),
        "num_gpu_blocks": str(num_tokens // size),
        "kv_cache_size_tokens": str(num_tokens),
        "kv_cache_memory_bytes": str(config.kv_cache_memory),
        "cache_dtype": config.dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "mamba_block_size": str(config.mamba_block_size),
    }


class AsyncEngine:
    """Loads the model at construction (seconds), serves from `start` to `close`. Raises what `build_engine` raises."""

    # The engine thread waits at most so long for its loop to send first tokens.
    send_wait_s = 1e-3

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None] = lambda text: None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._streams: dict[str, _Stream] = {}
        self._queue = AdmissionLimit(config.max_queued_requests)
        self._engine = build_engine(config, self._emit, progress, tokenizer)
        self._sent = threading.Event()
        self._engine.core.steps.after_first = self._let_the_loop_send
        self._cache_config = _cache_config(config, self._engine.info.kv_tokens)
        progress("running a first request, which compiles kernels at their first use")
        self._warm_up()
        self._thread = threading.Thread(target=self._run, name="baton-engine", daemon=True)
        self._stall_timeout_s = config.stall_timeout_s
        self._compiling = ThreadPoolExecutor(2, thread_name_prefix="baton-grammars")
        self._dead: str | None = None
        self._failure: str | None = None
        self._on_failure: Callable[[str], None] | None = None
        self._lock = threading.Lock()

    @property
    def info(self) -> EngineInfo:
        return msgspec.structs.replace(self._engine.info, clock=time.monotonic())

    def start(self) -> None:
        end_team()  # made by this thread while it loaded
        self._thread.start()

    def close(self) -> None:
        """Stop after the step in flight. Open streams end with an error. Idempotent."""
        if self._dead is None:
            self._dead = "the engine was closed"
        self._engine.core.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._engine.close()
        self._fail_streams()

    def on_failure(self, call: Callable[[str], None]) -> None:
        """`call` gets the cause when the engine thread dies, or at once if it has. Thread-safe."""
        with self._lock:
            self._on_failure = call
            failure = self._failure
        if failure is not None:
            call(failure)

    def load(self) -> EngineLoad:
        """Raises `EngineUnavailableError` if the engine thread has ended, `EngineStalledError` while it seems to
        hang.
        """
        self._check_alive()
        return self._engine.core.load()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineUnavailableError(self._dead)
        busy_s = self._engine.core.mailbox.busy_s()
        if busy_s > self._stall_timeout_s:
            raise EngineStalledError(f"the engine thread has been at one step for {busy_s:.0f} s")

    def metrics(self) -> EngineMetrics:
        metrics = self._engine.core.metrics
        metrics.load = self._engine.core.load()
        metrics.num_preemptions = self._engine.core.scheduler.num_preemptions
        metrics.cache_config = self._cache_config
        agents, redeemer = self._engine.agents, self._engine.redeemer
        if agents:
            metrics.agent = agents[0].stats().over_ranks([agent.stats() for agent in agents[1:]])
            metrics.recoveries["retry"] = metrics.agent.retries + metrics.agent.repairs
            metrics.refused_tickets = redeemer.refused if redeemer is not None else None
        return metrics

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Closing the generator early aborts the request.

        Raises `RequestError` (refused), `EngineUnavailableError` (down or hanging), `OverloadedError` (too many
        requests wait for their first token), `ProtocolError` (a ticket or identity of another engine).
        """
        self._check_alive()
        if not self._thread.is_alive():
            raise EngineUnavailableError("the engine is not running")
        core = self._engine.core
        with self._queue.waiting(1, bounded=request.num_known == 0) as served:
            await self._compile(request.sampling_params.structured_outputs)
            if request.request_id in self._streams:
                raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
            record = make_request(self._engine, request)
            stream = self._streams[request.request_id] = _Stream()

            def begin() -> None:
                stream.begun = True
                core.add(record)

            core.post(begin)
            ended, waiting = False, True
            try:
                if self._dead is not None:  # died after the check above
                    raise EngineUnavailableError(self._dead)
                while not ended:
                    delivery = await stream.queue.get()
                    if delivery is None:
                        ended = True
                        raise EngineUnavailableError(self._dead or "the engine stopped")
                    chunk, ended = delivery
                    first, waiting = waiting, False
                    if first:
                        served()
                    if chunk.token_ids or chunk.finish_reason is not None or not ended:
                        yield chunk  # an empty last chunk only ends the stream of a prefill leg
                    if first:
                        self._sent.set()
            finally:
                self._streams.pop(request.request_id, None)
                if not ended:
                    core.post(lambda: core.abort(request.request_id))

    async def _compile(self, asked: StructuredOutputsParams | None) -> None:
        """On another thread, since compilation may take seconds."""
        grammars = self._engine.grammars
        if asked is None or grammars is None:
            return
        asked.check()
        await asyncio.get_running_loop().run_in_executor(self._compiling, grammars.check, asked)
        self._check_alive()

    def _warm_up(self) -> None:
        """Run a small request, so that no client and no peer's lease waits for compilation."""
        core = self._engine.core
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        wire = GenerateRequest(request_id="warm-up", prompt_token_ids=[0], sampling_params=params)
        if not core.cache.fits(3):
            return
        request = make_request(self._engine, wire)
        core.add(request)
        while core.requests:
            core.step()
        if request.finish_reason == "error":
            self._engine.close()
            raise EngineUnavailableError("the engine's first request failed; the log has the cause")
        core.forget_metrics()

    def _let_the_loop_send(self) -> None:
        """Otherwise first tokens wait for the GIL, or for a core: up to 13 ms, while D's first step has them all."""
        self._sent.wait(self.send_wait_s)
        self._sent.clear()

    def _emit(self, chunk: TokenChunk, last: bool) -> None:
        stream = self._streams.get(chunk.request_id)
        if stream is not None and stream.begun:
            stream.put((chunk, last))

    def _run(self) -> None:
        try:
            bind_team()
            self._engine.core.run()
        except BaseException as error:
            logger.exception("the engine thread died")
            # Clients learn only the error's type.
            self._dead = f"the engine failed: {type(error).__name__}"
            self._fail_streams()
            # Otherwise the agents' threads would keep peers' leases alive.
            HandoffAgent.close_all(self._engine.agents)
            with self._lock:
                self._failure, call = f"the engine failed: {error!r}", self._on_failure
            if call is not None:
                call(self._failure)

    def _fail_streams(self) -> None:
        for stream in list(self._streams.values()):
            stream.put(None)
