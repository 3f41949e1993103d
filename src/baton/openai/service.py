"""The OpenAI API without HTTP: turns request bodies into response bodies or streams."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TypeVar

import msgspec

from baton.errors import EngineUnavailableError, RequestError
from baton.openai import format as fmt
from baton.openai.backend import Backend, ServedModel
from baton.openai.http.api_errors import to_api_error
from baton.openai.http.metrics import FrontMetrics
from baton.openai.http.waiting import AdmissionLimit
from baton.openai.output import ChoiceOutput, Delta
from baton.openai.plan import Plan, check_model
from baton.openai.records import SequenceRecord
from baton.openai.request_metrics import NO_METRICS, PerRequestMetrics
from baton.openai.streams import ChoiceSequence, LastEvents, ShortCut, StartedStream
from baton.openai.structured import with_field_name
from baton.openai.tokens import detokenize, tokenize
from baton.openai.tools import NO_PARSING, Parsing

# Longer bodies go to a worker thread, so that tokenising does not block streams.
_MAX_INLINE_BYTES = 4096
_NUM_WORKERS = 2

T = TypeVar("T")


class OpenAIService:
    """`http.api_errors.to_api_error` maps all its errors."""

    def __init__(
        self,
        backend: Backend,
        metrics: FrontMetrics,
        max_queued_requests: int | None = None,
        parsing: Parsing = NO_PARSING,
        per_request: PerRequestMetrics = NO_METRICS,
    ) -> None:
        """`max_queued_requests`: of choices; None: the backend has its own limit."""
        self.queue = AdmissionLimit(max_queued_requests)
        self._backend = backend
        self._parsing, self._per_request = parsing, per_request
        self._metrics = metrics
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="baton-plan")
        self._free_workers = asyncio.Semaphore(_NUM_WORKERS)

    def served_model(self) -> ServedModel:
        """Raises `EngineUnavailableError` without a model, `RequestError` if only a router may use it."""
        return self._backend.model()

    def models(self) -> dict[str, object]:
        names = self._backend.model().adapters
        return {"object": "list", "data": [self.model_card(None), *map(self.model_card, names)]}

    def model_card(self, name: str | None) -> dict[str, object]:
        """Raises `UnknownModelError` for another name."""
        served = self._backend.model()
        model = check_model(name, served)
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "baton",
            "root": model.root,
            "parent": None if model.adapter is None else served.name,
            "max_model_len": model.max_model_len,
        }

    async def plan(self, body: bytes, make: Callable[[bytes, ServedModel, Parsing], T]) -> T:
        """Raises `OverloadedError`."""
        self.queue.check()
        return await self.understand(make, body, self._parsing)

    async def tokenize(self, body: bytes) -> dict[str, object]:
        return await self.understand(tokenize, body)

    async def detokenize(self, body: bytes) -> dict[str, object]:
        return await self.understand(detokenize, body)

    async def understand(self, read: Callable[..., T], body: bytes, *more: object) -> T:
        model = self._backend.model()
        if len(body) <= _MAX_INLINE_BYTES:
            return read(body, model, *more)
        # Wait here, not in the pool's queue, so that a disconnected client's body is dropped.
        await self._free_workers.acquire()
        return await self._submit(read, body, model, *more)

    def _submit(self, read: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """A future in the frames of its own refusal would keep the body."""
        loop = asyncio.get_running_loop()
        work = self._workers.submit(contextvars.copy_context().run, read, *arguments)
        work.add_done_callback(lambda _: _call_on(loop, self._free_workers.release))
        return asyncio.wrap_future(work)

    def begin(self, plan: Plan) -> list[ChoiceOutput]:
        """Raises `RequestError`."""
        if plan.kv_mode is not None and not self._backend.allows_kv_mode:
            raise RequestError("kv_mode cannot be chosen by a request here", "kv_mode")
        self._backend.check(plan.asked)
        return [
            ChoiceOutput(
                plan.model.tokenizer, request, plan.asked.stop, plan.reader() if plan.reader else None, plan.spelt
            )
            for request in plan.requests
        ]

    async def answer(self, plan: Plan) -> bytes | AsyncGenerator[bytes, None]:
        """A body, or server-sent events."""
        outputs = self.begin(plan)
        if plan.stream:
            short_cut = ShortCut() if len(outputs) == 1 else None
            # A refusal must set the HTTP status.
            return await StartedStream.of(self._events(plan, outputs, short_cut), short_cut)
        async with self.running(plan, outputs) as deltas:
            async for _ in deltas:
                pass
        return msgspec.json.encode(self._with_metrics(fmt.response_body(plan, outputs), plan, outputs))

    async def _events(
        self, plan: Plan, outputs: Sequence[ChoiceOutput], short_cut: ShortCut | None
    ) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        plain: dict[int, fmt.PlainEvents] = {}
        counts, num_running = [0] * len(outputs), len(outputs)
        last = b""
        wants_tokens = plan.return_token_ids or plan.requests[0].sampling_params.logprobs is not None
        is_plain = not wants_tokens and plan.reader is None and not plan.continuous_usage
        try:
            async with self.running(plan, outputs, short_cut) as deltas:
                async for index, delta in deltas:
                    counts[index] += len(delta.token_ids)
                    if not (fmt.is_visible(plan, delta) or (wants_tokens and delta.token_ids)):
                        continue  # all of its text is held back
                    if index in plain and delta.finish_reason is None:
                        yield plain[index].event(delta.text)
                        continue
                    is_first = index not in begun
                    begun.add(index)
                    event = fmt.stream_event(plan, index, delta, outputs[index], is_first)
                    if plan.continuous_usage:
                        event["usage"] = fmt.usage_so_far(plan, index, counts[index])
                    num_running -= delta.finish_reason is not None
                    if not num_running:
                        last = fmt.encode_event(event)
                        continue
                    yield fmt.encode_event(event)
                    if is_plain and is_first:
                        plain[index] = fmt.PlainEvents(plan, index, outputs[index])
                        if short_cut is not None:
                            short_cut.plain = plain[index]
        except Exception as error:
            if not begun:
                raise
            last += b"data: " + to_api_error(error).body() + b"\n\n"
        else:
            if plan.include_usage:
                last += fmt.encode_event(self._with_metrics(fmt.streamed_usage(plan, outputs), plan, outputs))
        yield LastEvents(last + b"data: [DONE]\n\n")

    def _with_metrics(self, body: dict[str, object], plan: Plan, outputs: Sequence[ChoiceOutput]) -> dict[str, object]:
        metrics = self._per_request.of(plan, outputs)
        return body if metrics is None else body | {"metrics": metrics}

    def running(
        self, plan: Plan, outputs: Sequence[ChoiceOutput], short_cut: ShortCut | None = None
    ) -> AbstractAsyncContextManager[AsyncGenerator[tuple[int, Delta], None]]:
        """(choice, delta) of all choices, except for what takes the `short_cut`. At the end, choices that still run are
        aborted."""

        def begin(served: Callable[[], None]) -> AsyncGenerator[tuple[int, Delta], None]:
            samples = [self._sample(plan, index, output, served, short_cut) for index, output in enumerate(outputs)]
            return samples[0] if len(samples) == 1 else _merge(samples)

        def end() -> None:
            most = max([len(output.token_ids) for output in outputs])
            self._metrics.of_model(plan.model.name).observe("request_max_num_generation_tokens", most)

        return _Running(self.queue.waiting(len(outputs)), begin, end)

    async def _sample(
        self, plan: Plan, index: int, output: ChoiceOutput, served: Callable[[], None], short_cut: ShortCut | None
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        request = plan.requests[index]
        record = SequenceRecord(self._metrics, request.request_id, plan.model.name, len(request.prompt_token_ids))
        sequence = ChoiceSequence(output, record, short_cut)
        take = None if short_cut is None else sequence.take
        try:
            chunks = self._backend.generate(request, plan.kv_mode, record.on_route, take)
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    if chunk.token_ids and not output.token_ids:
                        served()
                    delta = sequence.push(chunk)
                    if delta.finish_reason is not None:
                        output.times = record.times
                        output.route = record.route if record.engines else None
                        record.end(delta.finish_reason)
                    yield index, delta
                    if delta.finish_reason is not None:
                        return
            raise EngineUnavailableError("the engine's stream ended before the request did")
        except RequestError as error:
            record.end("error", str(error))
            raise with_field_name(error, plan.grammar_field) from None
        except Exception as error:
            record.end("error", str(error) or type(error).__name__)
            raise
        finally:
            record.end("abort")  # the client has left


class _Running:
    __slots__ = ("_begin", "_deltas", "_end", "_waiting")

    def __init__(
        self,
        waiting: AbstractContextManager[Callable[[], None]],
        begin: Callable[[Callable[[], None]], AsyncGenerator[tuple[int, Delta], None]],
        end: Callable[[], None],
    ) -> None:
        self._waiting, self._begin, self._end = waiting, begin, end

    async def __aenter__(self) -> AsyncGenerator[tuple[int, Delta], None]:
        self._deltas = self._begin(self._waiting.__enter__())
        return self._deltas

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._deltas.aclose()
        finally:
            self._waiting.__exit__(None, None, None)
            self._end()


def _call_on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)


async def _merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The first error, or closing, ends all sources."""
    queue: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue()

    async def pump(source: AsyncGenerator[T, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for item in source:
                    queue.put_nowait((item,))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        open_sources = len(tasks)
        while open_sources:
            item = await queue.get()
            if item is None:
                open_sources -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
