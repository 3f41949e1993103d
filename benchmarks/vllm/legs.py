"""Requests to vLLM deployments as a router would send them, one class per KV connector.

They are sent from here, so that every connector is measured without a router.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import msgspec

from baton.bench.timed_stream import stream_completion
from baton.errors import BatonError
from baton.handoff.protocol.ticket import TICKET_LIFE_S, Ticket, request_digest, sign_ticket
from baton.openai.client import OpenAIClient
from baton.sampling_params import SamplingParams
from baton.wire import EngineIdentity, Mode


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of one request, and when each arrived, in seconds from the start of the request.

    With a router that streams the prefill server's first token, `times_s[0]` is the time of that token.
    """

    token_ids: list[int]
    times_s: list[float]


class Legs(Protocol):
    """How to send requests to one deployment."""

    async def ask(self, session: aiohttp.ClientSession, prompt: Sequence[int], num: int) -> Answer:
        """A greedy completion of `num` tokens. Raises BatonError."""

    async def park(self, session: aiohttp.ClientSession, prompt: Sequence[int]) -> None:
        """Send only the leg that waits for the other: it waits until this is cancelled, or longer."""


def completion(prompt: Sequence[int], num: int, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": list(prompt), "max_tokens": num, "temperature": 0, "ignore_eos": True, **more}


async def _params_of(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The `kv_transfer_params` in the answer of a completion without streaming."""
    return (await OpenAIClient(session, url).complete(body)).kv_transfer_params or {}


@dataclass(frozen=True, slots=True)
class Single:
    """One server, without a handoff."""

    url: str

    async def ask(self, session: aiohttp.ClientSession, prompt: Sequence[int], num: int) -> Answer:
        streamed = await stream_completion(session, self.url, completion(prompt, num))
        return Answer(streamed.token_ids, streamed.times_s)

    async def park(self, session: aiohttp.ClientSession, prompt: Sequence[int]) -> None:
        """Nothing waits."""


@dataclass(slots=True)
class Baton:
    """BatonConnector: both legs at once; the client gets the prefill server's first token and the decode server's
    others.
    """

    prefill: str
    decode: str
    key: bytes
    mode: Mode
    _identities: list[EngineIdentity] | None = None
    _read: float = 0.0

    async def ask(self, session: aiohttp.ClientSession, prompt: Sequence[int], num: int) -> Answer:
        ticket = await self._ticket(session, prompt[:-1])
        first, rest = await asyncio.gather(
            stream_completion(session, self.prefill, self._leg(prompt, 1, "prefill", ticket)),
            stream_completion(session, self.decode, self._leg(prompt, num, "decode", ticket)),
        )
        if first.token_ids != rest.token_ids[:1]:
            raise BatonError(f"first tokens differ: {first.token_ids} and {rest.token_ids[:1]}")
        return Answer(rest.token_ids, [min(first.times_s[0], rest.times_s[0]), *rest.times_s[1:]])

    async def park(self, session: aiohttp.ClientSession, prompt: Sequence[int]) -> None:
        """A decode leg without its prefill leg."""
        ticket = await self._ticket(session, prompt[:-1])
        await stream_completion(session, self.decode, self._leg(prompt, 2, "decode", ticket))

    def _leg(self, prompt: Sequence[int], num: int, role: str, ticket: str, **more: Any) -> dict[str, Any]:
        return completion(prompt, num, kv_transfer_params={"baton": {"role": role, "ticket": ticket, **more}})

    async def _ticket(self, session: aiohttp.ClientSession, handed_over: Sequence[int]) -> str:
        if self._identities is None:
            probe = completion([5], 1, kv_transfer_params={"baton": {"role": "identify"}})
            answers = await asyncio.gather(*(_params_of(session, url, probe) for url in (self.prefill, self.decode)))
            said = [params["baton"] for params in answers]
            self._identities, self._read = msgspec.convert(said, list[EngineIdentity]), time.monotonic()
        p, d = self._identities
        digest = request_digest(handed_over, SamplingParams())
        life_s = time.monotonic() - self._read + TICKET_LIFE_S
        return sign_ticket(self.key, Ticket.between(p, d, self.mode, digest, (p.clock + life_s, d.clock + life_s)))


class BatonSeeded(Baton):
    """BatonConnector with the legs one after the other, as with `baton router --seed-first-token`: the decode server
    gets the prefill server's first token.
    """

    async def ask(self, session: aiohttp.ClientSession, prompt: Sequence[int], num: int) -> Answer:
        ticket = await self._ticket(session, prompt)
        started = time.perf_counter()
        leg = self._leg(prompt, 1, "prefill", ticket, seed_first_token=True)
        first = await stream_completion(session, self.prefill, leg)
        waited, known = time.perf_counter() - started, [*prompt, *first.token_ids]
        rest = await stream_completion(session, self.decode, self._leg(known, num - 1, "decode", ticket))
        times = [first.times_s[0], *(waited + at for at in rest.times_s)]
        return Answer(first.token_ids + rest.token_ids, times)


@dataclass(frozen=True, slots=True)
class NixlPull:
    """vLLM's NixlConnector: the prefill leg, then the decode leg, which reads the prefill leg's blocks and streams."""

    prefill: str
    decode: str

    async def ask(self, session: aiohttp.ClientSession, prompt: Sequence[int], num: int) -> Answer:
        started = time.perf_counter()
        params = await self._prefill(session, prompt)
        waited = time.perf_counter() - started
        rest = await stream_completion(session, self.decode, completion(prompt, num, kv_transfer_params=params))
        return Answer(rest.token_ids, [waited + at for at in rest.times_s])

    async def park(self, session: aiohttp.ClientSession, prompt: Sequence[int]) -> None:
        """A prefill leg whose blocks are never fetched."""
        await self._prefill(session, prompt)

    async def _prefill(self, session: aiohttp.ClientSession, prompt: Sequence[int]) -> dict[str, Any]:
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
        asked |= {"remote_block_ids": None, "remote_host": None, "remote_port": None}
        return await _params_of(session, self.prefill, completion(prompt, 1, kv_transfer_params=asked))


@dataclass(frozen=True, slots=True)
class NixlPush:
    """vLLM's NixlPushConnector: both legs at once with one request id; the decode server's stream is the answer."""

    prefill: str
    decode: str
    prefill_engine_id: str
    side_channel_port: int

    async def ask(self, session: aiohttp.ClientSession, prompt: Sequence[int], num: int) -> Answer:
        request_id = secrets.token_hex(8)
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        first = completion(prompt, 1, request_id=request_id, kv_transfer_params=asked)
        decode = self._decode(session, prompt, num, request_id)
        answer: Answer
        answer, _ = await asyncio.gather(decode, _params_of(session, self.prefill, first))
        return answer

    async def park(self, session: aiohttp.ClientSession, prompt: Sequence[int]) -> None:
        """A decode leg without its prefill leg."""
        await self._decode(session, prompt, 2, secrets.token_hex(8))

    async def _decode(self, session: aiohttp.ClientSession, prompt: Sequence[int], num: int, request_id: str) -> Answer:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.prefill_engine_id,
            "remote_request_id": f"cmpl-{request_id}-0",
            "remote_host": "127.0.0.1",
            "remote_port": self.side_channel_port,
            "tp_size": 1,
        }
        body = completion(prompt, num, request_id=request_id, kv_transfer_params=params)
        streamed = await stream_completion(session, self.decode, body)
        return Answer(streamed.token_ids, streamed.times_s)
