"""Hand-back between vLLM servers: a handoff of a prompt's beginning, whose two legs end with one token each.

The source finds the KV in its prefix cache, and the destination leaves it in its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.errors import BatonError, HandoffError, ProtocolError
from baton.router.clients.vllm_client import VllmClient
from baton.router.connectors.base import read_to_end
from baton.router.leg_tasks import Chunks, end_task
from baton.sampling_params import SamplingParams
from baton.wire import BATON_PARAM, GenerateRequest, LegParams, LegRole, TokenChunk, VllmPrefix

# Greedy, as all of the router's own requests to vLLM (`VllmClient.send_params`).
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def prefix_request(request: GenerateRequest, num_tokens: int) -> GenerateRequest:
    """Both legs' request: the first `num_tokens` tokens of the prompt."""
    return msgspec.structs.replace(
        request,
        request_id=f"{request.request_id}.prefix"[-256:],
        prompt_token_ids=request.prompt_token_ids[:num_tokens],
        num_prompt_tokens=None,
        sampling_params=_ONE_TOKEN,
    )


def leg_params(leg: LegParams) -> dict[str, object]:
    return {BATON_PARAM: msgspec.to_builtins(leg)}


@dataclass(slots=True)
class VllmPrefixMove:
    """One hand-back. `request` and `longer`: the source's and the destination's, from `prefix_request`. `handed_over`:
    how many of their tokens the source hands over."""

    source: VllmClient
    destination: VllmClient
    request: GenerateRequest
    longer: GenerateRequest
    ticket: str
    handed_over: int
    _sending: asyncio.Future[None] | None = field(default=None, init=False)
    _received: bool = field(default=False, init=False)

    def leg(self, role: LegRole, prefix_len: int, window_start: int, most_missing: int | None) -> Chunks:
        """A `PrefixLeg`. The decode leg begins after the prefill leg's first chunk, which comes at once. Raises
        `HandoffError` for too few tokens."""
        if role == "decode":
            return self._receive()
        enough = most_missing is None or prefix_len - self.handed_over <= most_missing
        if not enough or self.handed_over < 1:
            raise HandoffError("too_short", f"{self.handed_over} tokens can be handed back to {self.destination.url}")
        return self._send()

    async def _send(self) -> Chunks:
        """Raises the errors of `VllmClient.leg`."""
        params = LegParams(role="prefill", ticket=self.ticket, prefix=True)
        leg = self.source.leg(self.request, leg_params(params))
        self._sending = asyncio.ensure_future(read_to_end(leg))
        try:
            yield TokenChunk(request_id=self.request.request_id, num_cached_tokens=self.handed_over)
            await self._sending
        finally:
            await end_task(self._sending)
            if not self._received:
                with contextlib.suppress(BatonError):
                    await self.source.send_params(leg_params(LegParams(role="cancel", ticket=self.ticket)))

    async def _receive(self) -> Chunks:
        """Raises the errors of `VllmClient.first_token`, those of the source's leg if it fails first, and
        `HandoffError` if the destination did not get all.
        """
        assert self._sending is not None
        params = LegParams(
            role="decode", ticket=self.ticket, prefix=True, num_tokens=self.handed_over, whole_blocks=True
        )
        answer = self.destination.first_token(self.longer, leg_params(params))
        receiving = asyncio.ensure_future(answer)
        both: list[asyncio.Future[Any]] = [receiving, self._sending]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                self._sending.result()  # raises its error
            chunk, response = await receiving
        finally:
            await end_task(receiving)
        num_tokens = _found(response)
        if num_tokens < self.handed_over:
            # A source that lacks some of it does not answer.
            reason = "not_received" if self._sending.done() else "prefix_missing"
            raise HandoffError(reason, f"{num_tokens} of {self.handed_over} tokens are at {self.destination.url}")
        self._received = True
        yield msgspec.structs.replace(chunk, token_ids=[], position=None, num_cached_tokens=num_tokens)


def _found(told: Mapping[str, object]) -> int:
    """0 without an answer of the connector, as from a server that has refused the leg."""
    if BATON_PARAM not in told:
        return 0
    try:
        return msgspec.convert(told[BATON_PARAM], VllmPrefix).num_tokens
    except msgspec.ValidationError as error:
        raise ProtocolError(f"a vLLM server's answer about a prefix: {error}") from None
