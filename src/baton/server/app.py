"""The aiohttp app of one engine.

`POST /inference/v1/generate` takes a `GenerateRequest` and answers with one `TokenChunk` per line, sent as its step
ends. A stop string may span two engines: only the router sees both outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from baton.errors import EngineUnavailableError, RequestError
from baton.openai import FrontMetrics, OpenAIService, ServedModel
from baton.openai.api_routes import add_health, add_openai_routes
from baton.openai.backend import OnRoute, Take
from baton.openai.http.accepting import max_connections
from baton.openai.http.access import OPEN, Access
from baton.openai.http.api_errors import to_api_error
from baton.openai.http.app import BODIES, LIMITS, beside, json_response, new_app
from baton.openai.http.connections import Stream
from baton.openai.http.limits import HttpLimits
from baton.openai.http.metrics import RowCollector, with_vllm_names
from baton.openai.records import SequenceRecord, report_throughput
from baton.openai.request_metrics import NO_METRICS, PerRequestMetrics
from baton.openai.tools import NO_PARSING, Parsing
from baton.sampling_params import SamplingParams
from baton.server.orca import reports_load
from baton.text import Tokenizer
from baton.wire import EngineInfo, GenerateRequest, Mode, TokenChunk

if TYPE_CHECKING:
    from baton.engine.async_engine import AsyncEngine

NDJSON = "application/x-ndjson"
_CONNECTIONS_TO_ASK = 4


class EngineBackend:
    allows_kv_mode = False

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._model = ServedModel.of(engine.info, tokenizer)

    def model(self) -> ServedModel:
        """Raises `RequestError` if the engine only serves legs."""
        role = self._engine.info.role
        if role != "both":
            raise RequestError(f"this engine's role is {role!r}: send API requests to the router")
        return self._model

    def check(self, params: SamplingParams) -> None:
        """Nothing: an engine supports all parameters of a plan."""

    def generate(
        self,
        request: GenerateRequest,
        kv_mode: Mode | None = None,
        on_route: OnRoute | None = None,
        take: Take | None = None,
    ) -> AsyncGenerator[TokenChunk, None]:
        """Ignores all but the request."""
        return self._engine.generate(request)


def build_app(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    limits: HttpLimits | None = None,
    access: Access = OPEN,
    parsing: Parsing = NO_PARSING,
    per_request: PerRequestMetrics = NO_METRICS,
) -> web.Application:
    """The caller starts and closes the engine. Raises the errors of `new_app`."""
    metrics = FrontMetrics()
    model = engine.info.model
    metrics.registry.register(RowCollector(lambda: with_vllm_names(engine.metrics().collect_rows(), model)))
    app = new_app(metrics, limits, access)
    app.on_response_prepare.append(reports_load(engine.load))
    app.cleanup_ctx.append(beside(lambda: report_throughput(metrics, lambda: _load_text(engine))))
    legs = max(1, max_connections(app[LIMITS]) - _CONNECTIONS_TO_ASK)
    backend = EngineBackend(engine, tokenizer)
    add_openai_routes(app, OpenAIService(backend, metrics, parsing=parsing, per_request=per_request))

    async def generate(request: web.Request) -> web.StreamResponse:
        """A router's requests, in token ids."""
        return await _generate(engine, metrics, request)

    async def info(request: web.Request) -> web.StreamResponse:
        """The engine's identity and limits."""
        engine.load()  # raises if the engine is down, so that a router sends it nothing
        return json_response(msgspec.structs.replace(engine.info, max_num_seqs=min(engine.info.max_num_seqs, legs)))

    async def load(request: web.Request) -> web.StreamResponse:
        """The engine's load."""
        return json_response(engine.load())

    async def health(request: web.Request) -> web.StreamResponse:
        """Whether the engine serves requests."""
        engine.load()  # raises if the engine is down
        return web.Response()

    if engine.info.token_api:
        app.router.add_post("/inference/v1/generate", generate)
    app.router.add_get("/inference/v1/info", info)
    app.router.add_get("/inference/v1/load", load)
    add_health(app, health)
    return app


async def _generate(engine: AsyncEngine, metrics: FrontMetrics, request: web.Request) -> web.StreamResponse:
    try:
        async with request.app[BODIES].read(request) as body:
            wire = msgspec.json.decode(body, type=GenerateRequest)
        del body
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not a GenerateRequest: {error}") from None
    _check_leg(wire, engine.info)
    response: Stream | None = None
    record = SequenceRecord(metrics, wire.request_id, engine.info.model, len(wire.prompt_token_ids))
    reason = "abort"
    try:
        async with contextlib.aclosing(engine.generate(wire)) as chunks:
            async for chunk in chunks:
                if response is None:
                    # A refusal must still set the HTTP status.
                    response = Stream(headers={"Content-Type": NDJSON})
                record.tokens(len(chunk.token_ids), chunk.accepted)
                reason = chunk.finish_reason or reason
                await response.send(request, msgspec.json.encode(chunk) + b"\n")
    except ConnectionResetError:
        raise
    except EngineUnavailableError as error:
        if response is None:
            raise
        # So that the router continues elsewhere.
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(str(error)) from None
    except Exception as error:
        if response is None:
            raise
        api_error = to_api_error(error)
        # Only `refusal` makes texts that begin with `invalid_request`.
        code = "engine_error" if isinstance(error, RequestError) else api_error.code
        chunk = TokenChunk(request_id=wire.request_id, finish_reason="error", error=f"{code}: {api_error.message}")
        await response.send(request, msgspec.json.encode(chunk) + b"\n")
        reason = "error"
    finally:
        record.end(reason, log=False)  # the router logs it
    if response is None:
        response = Stream(headers={"Content-Type": NDJSON})
        await response.prepare(request)
    await response.write_eof()
    return response


def _load_text(engine: AsyncEngine) -> str:
    try:
        load = engine.load()
    except EngineUnavailableError:
        return ""
    return f", waiting {load.num_waiting}, KV in use {load.kv_usage:.0%}"


def _check_leg(wire: GenerateRequest, info: EngineInfo) -> None:
    """Raises `RequestError`. The engine checks the rest."""
    if wire.sampling_params.n != 1:
        raise RequestError("n must be 1 here: the router fans out", "n")
    if wire.sampling_params.stop:
        raise RequestError("stop strings are not for legs: the router applies them", "stop")
    role = wire.handoff.role if wire.handoff is not None else None
    moves_prefix = wire.handoff is not None and wire.handoff.prefix_len is not None
    if info.role != "both" and role not in (info.role, "alone") and not moves_prefix:
        raise RequestError(f"this engine's role is {info.role!r}, the request's is {role!r}", "handoff")
