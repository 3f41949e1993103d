"""Joins the legs of a request by token position: no token is lost, repeated or changed (docs/lifecycle.md,
"A handed-over request").
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import msgspec

from baton.errors import BatonError, EngineLostError, HandoffError, ProtocolError, is_refusal
from baton.router.leg_tasks import Chunks, LegItems, LegSource, LegWatch, rest_of_leg, start_legs
from baton.wire import MAX_WAITED_S, GenerateRequest, LegRole, TokenChunk

LegChunks = AsyncGenerator[tuple[TokenChunk, LegRole], None]


class LegFailed(Exception):
    """A leg failed with `error`. `reported`: its engine is alive and sent the reason."""

    def __init__(self, leg: LegRole, error: BatonError, reported: bool = False) -> None:
        super().__init__(str(error))
        self.leg = leg
        self.error = error
        self.reported = reported


class TokenMismatch(HandoffError):
    """Engines disagree on output token `position`: the client has `sent`, another engine chose `said`."""

    def __init__(self, position: int, sent: int, said: int) -> None:
        super().__init__("token_mismatch", f"output token {position} was {sent}, now it is {said}")
        self.position, self.sent, self.said = position, sent, said


class Joined:
    """A request as its client sees it, over all attempts."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self._queued_s: float | None = None

    def push(self, chunk: TokenChunk) -> TokenChunk | None:
        """The part of a leg's chunk that is new to the client, or None.

        Raises `TokenMismatch`, or `ProtocolError` for missing or too many tokens.
        """
        # Only the prefill leg reports `queued_s`, and its chunk may be dropped, so the last chunk repeats it.
        if chunk.queued_s is not None:
            self._queued_s = chunk.queued_s
        elif chunk.finish_reason is not None:
            chunk = msgspec.structs.replace(chunk, queued_s=self._queued_s)
        scores, num_prompt = chunk.prompt_logprobs, len(self.request.prompt_token_ids)
        if scores is not None and len(scores) != num_prompt:
            raise ProtocolError(f"{len(scores)} logprobs came for a prompt of {num_prompt} tokens")
        if not chunk.token_ids:
            return chunk if chunk.finish_reason is not None else None
        if chunk.logprobs is not None and len(chunk.logprobs) != len(chunk.token_ids):
            raise ProtocolError(f"{len(chunk.logprobs)} logprobs came with {len(chunk.token_ids)} tokens")
        start, known = chunk.position, len(self.token_ids)
        if start is None or not 0 <= start <= known:
            raise ProtocolError(f"tokens came for position {start}, but position {known} is next")
        if start + len(chunk.token_ids) > self.request.sampling_params.max_tokens:
            raise ProtocolError("more tokens came than were asked for")
        num_known = known - start
        if num_known:
            for position, (sent, said) in enumerate(zip(self.token_ids[start:], chunk.token_ids, strict=False), start):
                if sent != said:
                    raise TokenMismatch(position, sent, said)
        if num_known >= len(chunk.token_ids):
            if chunk.finish_reason is None:
                return None
            chunk = msgspec.structs.replace(chunk, prompt_logprobs=None)
            return msgspec.structs.replace(chunk, token_ids=[], position=None, logprobs=None, accepted=[], drafted=[])
        if num_known:
            logprobs = None if chunk.logprobs is None else chunk.logprobs[num_known:]
            tokens = chunk.token_ids[num_known:]
            chunk = msgspec.structs.replace(chunk, token_ids=tokens, position=known, logprobs=logprobs)
        self.token_ids += chunk.token_ids
        return chunk

    def rest(self, attempt: int, waited_s: float = 0.0, trusted: int | None = None) -> GenerateRequest:
        """The request for the tokens after the first `trusted`. Each attempt has its own id: engines may still
        hold earlier attempts."""
        if attempt == 0:
            return self.request
        return msgspec.structs.replace(
            self.request,
            request_id=f"{self.request.request_id}.{attempt}",
            prompt_token_ids=self.request.prompt_token_ids + self.token_ids[:trusted],
            num_prompt_tokens=len(self.request.prompt_token_ids),
            waited_s=min(waited_s, MAX_WAITED_S),
        )


async def join_legs(
    legs: Mapping[LegRole, LegSource],
    items: LegItems,
    drain: Callable[[Chunks], None],
    notices: bool = True,
    first_token_wait_s: float | None = None,
    watches: Mapping[LegRole, Sequence[LegWatch]] | None = None,
) -> LegChunks:
    """Yield (chunk, its leg) until a chunk with `finish_reason`. A single leg, of either kind, must send all tokens.

    Closing the generator closes the legs. A leg that its engine will end is handed to `drain` instead: the decode leg,
    if the prefill leg ended the request (P tells D), and the prefill leg, if the decode leg ended it well (P then waits
    for its pages to be free). If P refuses the request, its error ends the stream.

    Raises `LegFailed` if the decode leg, or the only one, is lost, or if no engine took the prefill leg. A later loss
    of the prefill leg raises it too, unless the decode engine `notices` (it recovers, or reports what it misses) or has
    sent tokens.
    """
    alone = len(legs) == 1
    tasks = start_legs(legs, items, watches or {}, first_token_wait_s)
    ended: set[LegRole] = set()
    drained: LegRole | None = None
    decoding = False
    try:
        while True:
            leg, item = await items.get()
            if leg == "prefill" and not alone:
                if isinstance(item, TokenChunk):
                    if item.finish_reason in ("stop", "length"):
                        drained = "decode"
                    refused = is_refusal(item.error)
                    if refused or item.finish_reason in (None, "stop", "length"):
                        yield item, leg
                    if refused or drained is not None:
                        return
                elif (failure := _prefill_failure(item, decoding, notices)) is not None:
                    raise failure
                else:
                    ended.add(leg)
            elif isinstance(item, TokenChunk):
                decoding = True
                if item.finish_reason == "abort":
                    raise LegFailed(leg, EngineLostError("the engine gave the request up"))
                if item.finish_reason in ("stop", "length") and not alone:
                    drained = "prefill"
                yield item, leg
                if item.finish_reason is not None:
                    return
            else:
                raise _failure(leg, item)
    finally:
        items.direct = None
        running = {leg: task for leg, task in tasks.items() if not task.done()}
        if drained is not None and (rest := running.pop(drained, None)) is not None:
            drain(rest_of_leg(drained, rest, items, drained in ended))
        for task in running.values():
            task.cancel()
        if running:
            await asyncio.gather(*running.values(), return_exceptions=True)


def _prefill_failure(error: BaseException | None, decoding: bool, notices: bool) -> BaseException | None:
    """The error to raise when a prefill leg ends while its decode leg runs. `error` None: it ended well."""
    if error is None or (isinstance(error, BatonError) and decoding):
        return None
    if notices and isinstance(error, EngineLostError):
        return None
    return LegFailed("prefill", error) if isinstance(error, BatonError) else error


def _failure(leg: LegRole, error: BaseException | None) -> BaseException:
    if error is None:
        return LegFailed(leg, EngineLostError("the leg ended before the request did"))
    if isinstance(error, BatonError):
        return LegFailed(leg, error, reported=isinstance(error, HandoffError))
    return error
