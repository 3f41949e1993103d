"""Identifies the server at a URL: a Baton engine, a router, vLLM or SGLang. Only named fields are read: `/server_info`
also holds secrets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import msgspec

from baton.doctor.ask_vllm import ask_identity, ask_vllm, read_cache
from baton.doctor.checkup import BOTH, RANK, Problem, Reading, RouterEntry, RouterFacts, Server
from baton.doctor.servers import dialled_addresses
from baton.errors import BatonError, EngineLostError, EngineUnavailableError, OverloadedError, ProtocolError
from baton.event_loop import timeout
from baton.openai.answers import Model, decode_answer, printable_line
from baton.openai.client import OpenAIClient, connected_client
from baton.wire import EngineInfo, LegRole, Role

T = TypeVar("T")
# Words in the errors of a server that is about to end.
_ENDING = ("draining", "shutting down")
# Settings that must be equal on SGLang's prefill and decode servers.
_SGLANG = (
    "version",
    "model_path",
    "dtype",
    "kv_cache_dtype",
    "page_size",
    "context_length",
    "disaggregation_transfer_backend",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
_MODES: Mapping[str, tuple[LegRole, ...]] = {"prefill": ("prefill",), "decode": ("decode",), "null": ()}


class _Version(msgspec.Struct, frozen=True):
    version: str


class _EntryInfo(msgspec.Struct, frozen=True):
    engine_id: str


class _Entry(msgspec.Struct, frozen=True):
    url: str
    role: Role
    problem: str | None = None
    draining: bool = False
    info: _EntryInfo | None = None


class _Status(msgspec.Struct, frozen=True):
    ready: bool
    engines: list[_Entry]


async def ask_server(url: str, timeout_s: float, api_key: str | None = None) -> Server | RouterFacts:
    """Never raises a Baton error: a failure is the result's `problem`."""
    async with _connected(url, timeout_s, api_key) as client:
        try:
            server = await _ask(client, client.url)
            if isinstance(server, RouterFacts):
                return server
            return await _dialled(dataclasses.replace(server, url=url), timeout_s)
        except BatonError as error:
            return Server(url=url, problem=_problem(error))


async def read_clock(server: Server, timeout_s: float, api_key: str | None = None) -> Reading | None:
    """None for an engine that does not report its clock."""
    if not server.clocks:
        return None
    with contextlib.suppress(BatonError):
        async with _connected(server.url, timeout_s, api_key) as client:
            if server.kind == "baton":
                return (await _identify(client))[1]
            return (await ask_identity(client, await client.model()))[1]
    return None


def _connected(url: str, timeout_s: float, api_key: str | None) -> AbstractAsyncContextManager[OpenAIClient]:
    """`url` may name a data-parallel rank of a vLLM server: `#dp_rank=N`."""
    base, _, rank = url.partition(RANK)
    return connected_client(base, timeout_s, api_key, rank or None)


async def _ask(client: OpenAIClient, url: str) -> Server | RouterFacts:
    with contextlib.suppress(_MissingError):
        return await _ask_baton(client)
    with contextlib.suppress(_MissingError):
        status = await _get(client, "/status", _Status)
        return RouterFacts(
            url=url,
            version=await _version(client),
            ready=status.ready,
            engines=tuple(
                RouterEntry(
                    url=one.url,
                    role=one.role,
                    engine_id=None if one.info is None else one.info.engine_id,
                    problem=None if one.problem is None else printable_line(one.problem),
                    draining=one.draining,
                )
                for one in status.engines
            ),
        )
    try:
        model = await client.model()
    except ProtocolError as error:
        raise _NotAnEngineError(str(error)) from None
    if model.owned_by == "sglang":
        return await _ask_sglang(client, model)
    if model.owned_by != "vllm":
        with contextlib.suppress(_MissingError, ProtocolError):
            await _get(client, "/version", _Version)
            return await ask_vllm(client, model)
        raise _NotAnEngineError(f"its model is owned by {model.owned_by!r}")
    return await ask_vllm(client, model)


async def _identify(client: OpenAIClient) -> tuple[EngineInfo, Reading]:
    began = time.monotonic()
    info = await _get(client, "/inference/v1/info", EngineInfo)
    return info, Reading.of(began, info.clock)


async def _ask_baton(client: OpenAIClient) -> Server:
    info, reading = await _identify(client)
    version = await _version(client)
    cache = await read_cache(client)
    roles: tuple[LegRole, ...] = BOTH if info.role == "both" else (info.role,)
    settings = {
        "served_model_name": info.model,
        "max_model_len": str(info.max_model_len),
        "seed": str(info.default_seed),
        "cache_dtype": cache.get("cache_dtype"),
        "version": version,
        "kv_transport": info.kv_transport or None,
    }
    return Server(
        url=client.url,
        kind="baton",
        version=version,
        model=info.model,
        max_model_len=info.max_model_len,
        identity=info,
        roles=roles,
        connector="Baton",
        token_api=info.token_api,
        max_num_seqs=info.max_num_seqs,
        settings={name: value for name, value in settings.items() if value is not None},
        clocks=(reading,),
        page_size=cache.get("block_size"),
    )


async def _ask_sglang(client: OpenAIClient, model: Model) -> Server:
    info: dict[str, Any] = {}
    for path in ("/server_info", "/get_server_info"):
        with contextlib.suppress(_MissingError):
            info = await _get(client, path, dict[str, Any])
            break
    return Server(
        url=client.url,
        kind="sglang",
        version=None if info.get("version") is None else printable_line(str(info["version"])),
        model=model.id,
        max_model_len=model.max_model_len,
        roles=_MODES.get(str(info.get("disaggregation_mode", "null")), ()),
        connector=str(info.get("disaggregation_transfer_backend")),
        settings={name: printable_line(str(info[name])) for name in _SGLANG if name in info},
        page_size=None if info.get("page_size") is None else printable_line(str(info["page_size"])),
    )


async def _dialled(server: Server, timeout_s: float) -> Server:
    """Adds the control addresses that nothing listens on."""

    dialled = dialled_addresses(server)
    listening = await asyncio.gather(*(is_open(host, port, timeout_s) for host, port, _ in dialled))
    silent = [address for (_, _, address), found in zip(dialled, listening, strict=True) if not found]
    return dataclasses.replace(server, unreached=tuple(silent))


async def is_open(host: str, port: int, timeout_s: float) -> bool:
    """Whether a port takes connections. Engines do not count resets."""
    try:
        async with timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    return True


async def _version(client: OpenAIClient) -> str | None:
    try:
        return printable_line((await _get(client, "/version", _Version)).version)
    except (_MissingError, ProtocolError):
        return None


class _MissingError(EngineUnavailableError):
    """The server lacks the route, or has another server's."""


class _NotAnEngineError(ProtocolError):
    """The server serves no models."""


async def _get(client: OpenAIClient, path: str, kind: type[T]) -> T:
    try:
        body = await client.fetch("GET", client.url + path)
    except EngineLostError:
        raise
    except EngineUnavailableError as error:
        if error.status in (400, 404, 405):
            raise _MissingError(str(error), error.status) from None
        raise
    try:
        return decode_answer(body, kind)
    except ProtocolError as error:  # some servers answer every path
        raise _MissingError(str(error)) from None


def _problem(error: BatonError) -> Problem:
    text = printable_line(str(error))
    status = error.status if isinstance(error, EngineUnavailableError) else None
    if status in (401, 403):
        return Problem("api_key", text)
    if isinstance(error, ProtocolError) or status == 404:
        return Problem("not_an_engine", text)
    if status == 503 and any(word in text for word in _ENDING):
        return Problem("draining", text)
    answered = status is not None or isinstance(error, OverloadedError)
    return Problem("unhealthy" if answered else "unreachable", text)
