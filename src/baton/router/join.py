"""Join the legs of a request to one stream by token position, so that no token is lost, repeated or changed.

Both legs of a handoff run at the same time. The prefill leg sends the first token. The decode leg sends it too, once
it has the KV, and then all others. The client gets whichever comes first. Later attempts continue the client's stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

import msgspec

from baton.errors import BatonError, EngineLostError, HandoffError, ProtocolError, is_refusal
from baton.timeouts import timeout
from baton.wire import MAX_WAITED_S, GenerateRequest, LegRole, TokenChunk

# After the first token, so that it is sent to the client before the decode leg's request.
_THEN_S = 0.001
Chunks = AsyncGenerator[TokenChunk, None]
LegChunks = AsyncGenerator[tuple[TokenChunk, LegRole], None]
LegItems = asyncio.Queue["tuple[LegRole, TokenChunk | BaseException | None]"]  # None: the leg has ended


class LegFailed(Exception):
    """An attempt fails because a leg failed with `error`. `reported`: its engine is alive and sent the reason."""

    def __init__(self, leg: LegRole, error: BatonError, reported: bool = False) -> None:
        super().__init__(str(error))
        self.leg = leg
        self.error = error
        self.reported = reported


class TokenMismatch(HandoffError):
    """Engines disagree on output token `position`: the client has `sent`, but another engine `said` its own."""

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
        """Return the part of a leg's chunk that is new to the client, or None.

        Raises `TokenMismatch` if it contradicts a token that was sent, `ProtocolError` if tokens before it are
        missing, or if there are too many.
        """
        # Only the prefill leg has `queued_s`, and its chunk is dropped if the decode leg's token came first: the last
        # chunk repeats it.
        if chunk.queued_s is not None:
            self._queued_s = chunk.queued_s
        elif chunk.finish_reason is not None:
            chunk = msgspec.structs.replace(chunk, queued_s=self._queued_s)
        if not chunk.token_ids:
            return chunk if chunk.finish_reason is not None else None
        if chunk.logprobs is not None and len(chunk.logprobs) != len(chunk.token_ids):
            raise ProtocolError(f"{len(chunk.logprobs)} logprobs came with {len(chunk.token_ids)} tokens")
        start, known = chunk.position, len(self.token_ids)
        if start is None or not 0 <= start <= known:
            raise ProtocolError(f"tokens came for position {start}, but position {known} is next")
        if start + len(chunk.token_ids) > self.request.sampling_params.max_tokens:
            raise ProtocolError("more tokens came than were asked for")
        for position, (sent, said) in enumerate(zip(self.token_ids[start:], chunk.token_ids, strict=False), start):
            if sent != said:
                raise TokenMismatch(position, sent, said)
        num_known = known - start
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

    def rest(self, attempt: int, waited_s: float = 0.0) -> GenerateRequest:
        """The request for the missing tokens, `waited_s` seconds after the first attempt began. Each attempt has its
        own id: engines may still hold earlier ones."""
        if attempt == 0:
            return self.request
        return msgspec.structs.replace(
            self.request,
            request_id=f"{self.request.request_id}.{attempt}",
            prompt_token_ids=self.request.prompt_token_ids + self.token_ids,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            waited_s=min(waited_s, MAX_WAITED_S),
        )


class _FirstToken:
    """When a decode leg begins: with the first chunk or the end of the prefill leg, or after `wait_s`."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s, self._came = wait_s, asyncio.Event()

    async def wait(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            async with timeout(self._wait_s):
                await self._came.wait()

    def came(self) -> None:
        asyncio.get_running_loop().call_later(_THEN_S, self._came.set)

    def ended(self) -> None:
        self._came.set()


async def join_legs(
    legs: Mapping[LegRole, Chunks],
    items: LegItems,
    drain: Callable[[Chunks], None],
    notices: bool = True,
    first_token_wait_s: float | None = None,
) -> LegChunks:
    """Yield (chunk, its leg) until a chunk with `finish_reason`. A single leg, of either kind, must send all tokens.

    Closing the generator closes the legs. Others report a lost leg by putting an error into `items`. A leg that its
    engine will end is handed to `drain` instead: the decode leg, if the prefill leg ended the request (P tells D), and
    the prefill leg, if the decode leg ended it well (P then waits for its pages to be free). If P refuses the request,
    no engine can compute it, and P's error ends the stream.

    Raises `LegFailed` if the decode leg, or the only one, is lost, or if no engine took the prefill leg. A prefill leg
    that is lost later is closed when the request ends, not drained, if the decode engine `notices` (it recovers, or
    reports what it misses) or has sent tokens; otherwise this raises `LegFailed`.
    """
    alone = len(legs) == 1
    tasks = _pumps(legs, items, first_token_wait_s)
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
                    ended.add(leg)  # nothing is left to drain after the request
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
        if drained is not None:
            drain(_rest(drained, tasks[drained], items, drained in ended))
        ending = [task for leg, task in tasks.items() if leg != drained]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


def _prefill_failure(error: BaseException | None, decoding: bool, notices: bool) -> BaseException | None:
    """What the end of a prefill leg raises while its decode leg runs. `error` None: it ended well."""
    if error is None or (isinstance(error, BatonError) and decoding):
        return None
    if notices and isinstance(error, EngineLostError):
        return None
    return LegFailed("prefill", error) if isinstance(error, BatonError) else error


def _failure(leg: LegRole, error: BaseException | None) -> BaseException:
    """What the end of the decode leg, or of the only one, raises before the request's end."""
    if error is None:
        return LegFailed(leg, EngineLostError("the leg ended before the request did"))
    if isinstance(error, BatonError):
        return LegFailed(leg, error, reported=isinstance(error, HandoffError))
    return error


def _pumps(
    legs: Mapping[LegRole, Chunks], items: LegItems, first_token_wait_s: float | None
) -> dict[LegRole, asyncio.Task[None]]:
    """Start a task for each leg. The first token depends on the prefill leg alone, so its request is sent first."""
    first = _FirstToken(first_token_wait_s) if first_token_wait_s is not None and len(legs) > 1 else None

    async def begin_second() -> None:
        await asyncio.sleep(0)
        if first is not None:
            await first.wait()

    tasks: dict[LegRole, asyncio.Task[None]] = {}
    for leg, chunks in legs.items():
        second = leg == "decode" and len(legs) > 1
        pump = _pump(leg, chunks, items, begin_second if second else None, None if second else first)
        tasks[leg] = asyncio.create_task(pump)
    return tasks


async def _pump(
    leg: LegRole,
    chunks: Chunks,
    items: LegItems,
    begin: Callable[[], Awaitable[None]] | None,
    first: _FirstToken | None,
) -> None:
    """Put a leg's chunks and its end into `items`, after `begin`. `first`: told of the chunks and of the end."""
    try:
        if begin is not None:
            await begin()
        try:
            async for chunk in chunks:
                items.put_nowait((leg, chunk))
                if first is not None:
                    first.came()
        finally:
            if first is not None:
                first.ended()
            await chunks.aclose()
        items.put_nowait((leg, None))
    except Exception as error:
        items.put_nowait((leg, error))


async def _rest(which: LegRole, task: asyncio.Task[None], items: LegItems, ended: bool) -> Chunks:
    """A leg's remaining chunks. Closing the generator closes the leg."""
    try:
        while not ended:
            leg, item = await items.get()
            if leg == which:
                if not isinstance(item, TokenChunk):
                    return
                yield item
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
