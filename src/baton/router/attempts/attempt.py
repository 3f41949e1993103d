"""State shared by a request's attempts, and one running attempt."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from baton.errors import BatonError, is_refusal, reason_label
from baton.openai.backend import Take
from baton.openai.http.api_errors import error_of_chunk
from baton.router.attempts.join import Joined, LegChunks, LegFailed
from baton.router.attempts.observer import ObservedRequest
from baton.router.connectors.base import HandoffOutcome
from baton.router.pooled_engine import PooledEngine
from baton.router.routes import Route
from baton.wire import LegRole, TokenChunk

# Another pair may serve the request.
_ELSEWHERE = ("incompatible_peer:", "register_refused:")


@dataclass(slots=True)
class RequestProgress:
    joined: Joined
    hand_off: bool  # the next attempt must be a handoff
    tried: list[PooledEngine] = field(default_factory=list)  # engines that failed: a last choice
    refused: list[PooledEngine] = field(default_factory=list)  # engines that get this request no more
    attempt: int = 0
    trusted: int | None = None  # output tokens that the next attempt builds on, None: all; it must repeat later ones
    fruitless: int = 0  # attempts in a row without a new token
    decided: bool = False  # an engine has accepted the request
    route: Route | None = None  # if known already, of the next attempt
    # The error to raise. A local variable would form a cycle with its frame.
    ended: list[BatonError] = field(default_factory=list)


@dataclass(slots=True)
class RunningAttempt:
    """The chunks of one attempt; call `note` with each. `counted`: its legs. `prefilled`: called with the first
    chunk. `failures`: errors of handoffs by reason; None: no handoff. `on_failure`: called with this one's. `ended`:
    called after all legs.
    """

    chunks: LegChunks
    counted: Sequence[AbstractContextManager[Callable[[], None]]]
    prefilled: list[Callable[[], None]] = field(default_factory=list)
    failures: Counter[str] | None = None
    on_failure: Callable[[str], None] = lambda error: None
    outcome: HandoffOutcome = "aborted"
    ended: Callable[[HandoffOutcome, BaseException | None], None] | None = None
    _entered: ExitStack = field(default_factory=ExitStack)

    async def __aenter__(self) -> RunningAttempt:
        try:
            self.prefilled += [self._entered.enter_context(leg) for leg in self.counted]
        except BaseException as error:
            self._leave(error)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            await self.chunks.aclose()
        finally:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        try:
            self._entered.close()
        finally:
            if self.ended is not None:
                self.ended(self.outcome, error)

    def note(self, chunk: TokenChunk, leg: LegRole) -> None:
        """Raises `LegFailed` for an error that another attempt may recover from."""
        while self.prefilled:
            self.prefilled.pop()()
        if is_refusal(chunk.error):
            return
        if chunk.handoff_error is not None:
            self._failed(chunk.handoff_error)
        if chunk.finish_reason == "error":
            self._failed(chunk.error or "unknown")
        elif chunk.finish_reason is not None and self.outcome != "failed":
            self.outcome = "completed" if leg == "decode" else "finished_early"
        if chunk.recoverable or (chunk.error or "").startswith(_ELSEWHERE):
            raise LegFailed("decode", error_of_chunk(chunk.error), reported=True)

    def _failed(self, error: str) -> None:
        self.outcome = "failed"
        if self.failures is not None:
            self.failures[reason_label(error.partition(":")[0])] += 1
            self.on_failure(error)


def pass_on(take: Take, joined: Joined, observed: ObservedRequest, chunk: TokenChunk) -> bool:
    if not chunk.only_adds_tokens():
        return False
    known, num_new = len(joined.token_ids), len(chunk.token_ids)
    left = joined.request.sampling_params.max_tokens - known
    if chunk.position != known or not 0 < num_new <= left or not take(chunk):
        return False
    joined.token_ids += chunk.token_ids
    observed.timeline.on_tokens(time.monotonic(), num_new, chunk.accepted, chunk.drafted)
    return True
