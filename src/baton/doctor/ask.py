"""Asks a URL what it is: a Baton engine, a router, vLLM or SGLang. Only documented routes are used, and only named
fields are read: `/server_info` of other servers holds secrets too."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from baton.doctor.ask_vllm import ask_vllm, read_cache
from baton.doctor.facts import BOTH, Problem, Reading, RouterEntry, RouterFacts, Server
from baton.doctor.servers import dialled_addresses
from baton.errors import BatonError, EngineLostError, EngineUnavailableError, ProtocolError
from baton.openai.answers import decode, printable
from baton.openai.client import OpenAIClient, connected
from baton.timeouts import timeout
from baton.wire import EngineIdentity, EngineInfo, LegRole, Role

T = TypeVar("T")
# In the text of a server that ends.
_ENDING = ("draining", "shutting down")
_STATUS = re.compile(r": HTTP (\d{3}):")
# What must be equal on SGLang's prefill and decode servers, by its names.
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


async def ask(url: str, timeout_s: float, api_key: str | None = None) -> Server | RouterFacts:
    """What answers at a base URL. Never raises a Baton error: a failure is the result's `problem`."""
    base, _, rank = url.partition("#")
    async with connected(base, timeout_s, api_key) as client:
        try:
            found = await _ask(client, base)
            if isinstance(found, RouterFacts):
                return found
            if rank:
                why = f"{rank} is a data-parallel rank, which only the router is asked about"
                return Server(url=url, kind=found.kind, problem=Problem("rank_unknown", why))
            return await _dialled(found, timeout_s)
        except BatonError as error:
            return Server(url=url, problem=_problem(error))


async def read_clock(server: Server, timeout_s: float, api_key: str | None = None) -> Reading | None:
    """Another reading of an engine's clock. None for one that does not tell it."""
    if not server.clocks:
        return None
    with contextlib.suppress(BatonError):
        async with connected(server.url, timeout_s, api_key) as client:
            found = await (_ask_baton(client) if server.kind == "baton" else ask_vllm(client))
            return found.clocks[0] if found.clocks else None
    return None


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
                    problem=None if one.problem is None else printable(one.problem),
                    draining=one.draining,
                )
                for one in status.engines
            ),
        )
    try:
        owner = (await client.model()).owned_by
    except ProtocolError as error:
        raise _NotAnEngineError(str(error)) from None
    if owner == "sglang":
        return await _ask_sglang(client)
    if owner != "vllm":
        with contextlib.suppress(_MissingError, ProtocolError):
            await _get(client, "/version", _Version)
            return await ask_vllm(client)
        raise _NotAnEngineError(f"its model is owned by {owner!r}")
    return await ask_vllm(client)


async def _ask_baton(client: OpenAIClient) -> Server:
    before = time.monotonic()
    info = await _get(client, "/inference/v1/info", EngineInfo)
    reading = _reading(before, info)
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


async def _ask_sglang(client: OpenAIClient) -> Server:
    told: dict[str, Any] = {}
    for path in ("/server_info", "/get_server_info"):
        with contextlib.suppress(_MissingError):
            told = await _get(client, path, dict[str, Any])
            break
    model = await client.model()
    return Server(
        url=client.url,
        kind="sglang",
        version=None if told.get("version") is None else printable(str(told["version"])),
        model=model.id,
        max_model_len=model.max_model_len,
        roles=_MODES.get(str(told.get("disaggregation_mode", "null")), ()),
        connector=str(told.get("disaggregation_transfer_backend")),
        settings={name: printable(str(told[name])) for name in _SGLANG if name in told},
        page_size=None if told.get("page_size") is None else printable(str(told["page_size"])),
    )


async def _dialled(server: Server, timeout_s: float) -> Server:
    """The server with those of its control addresses on which nothing listens."""

    async def dial(host: str, port: int, address: str) -> str | None:
        try:
            async with timeout(timeout_s):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, asyncio.TimeoutError):
            return address
        writer.close()
        return None

    found = await asyncio.gather(*(dial(*address) for address in dialled_addresses(server)))
    return dataclasses.replace(server, unreached=tuple(one for one in found if one))


def _reading(before: float, identity: EngineIdentity) -> Reading:
    now = time.monotonic()
    return Reading((before + now) / 2, identity.clock, (now - before) / 2)


async def _version(client: OpenAIClient) -> str | None:
    try:
        return printable((await _get(client, "/version", _Version)).version)
    except (_MissingError, ProtocolError):
        return None


class _MissingError(EngineUnavailableError):
    """The server has no such route, or another's answer is there."""


class _NotAnEngineError(ProtocolError):
    """What answers serves no models that could be asked for."""


async def _get(client: OpenAIClient, path: str, kind: type[T]) -> T:
    try:
        body = await client.fetch("GET", client.url + path)
    except EngineLostError:
        raise
    except EngineUnavailableError as error:
        if status_of(error) in (400, 404, 405):
            raise _MissingError(str(error)) from None
        raise
    try:
        return decode(body, kind)
    except ProtocolError as error:  # some servers answer every path
        raise _MissingError(str(error)) from None


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of `OpenAIClient` names."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _problem(error: BatonError) -> Problem:
    text, status = printable(str(error)), status_of(error)
    if status in (401, 403):
        return Problem("api_key", text)
    if isinstance(error, ProtocolError) or status == 404:
        return Problem("not_an_engine", text)
    if status == 503 and any(word in text for word in _ENDING):
        return Problem("draining", text)
    return Problem("unhealthy" if status is not None else "unreachable", text)
