"""The one mutable record of a request inside an engine."""

from __future__ import annotations

import enum
import secrets
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.engine.sampler import SamplerState
from baton.errors import RequestError
from baton.kv.prefix import salted_root
from baton.kv.tables import BlockTables
from baton.structured import Allowed, Matcher
from baton.wire import FinishReason, GenerateRequest, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from baton.handoff.protocol.ticket import SignedTicket


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """No pages; also after preemption, and after a handoff that failed."""
    RECEIVING = enum.auto()
    """Decode leg: destination pages are registered with the prefill side."""
    RUNNING = enum.auto()
    HELD = enum.auto()
    """Prefill leg: computed; pages stay until the handoff lets them go."""
    FINISHED = enum.auto()
    """Over for its client. The agent may still have its pages, and then lets them go."""


# Which state may follow which. None follows the end.
FOLLOWS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset(
        {RequestStatus.WAITING, RequestStatus.RECEIVING, RequestStatus.RUNNING, RequestStatus.FINISHED}
    ),
    RequestStatus.RECEIVING: frozenset({RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.WAITING, RequestStatus.HELD, RequestStatus.FINISHED}),
    RequestStatus.HELD: frozenset({RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


class Request:
    """One sample of one prompt.

    `token_ids` holds prompt and output. Target KV is valid for [0, num_computed), drafter KV for [0,
    num_drafted). While decoding, `num_computed == len(token_ids) - 1`: the last token has no KV yet. A
    request that resumes with known output (preemption, failover) prefills all tokens but the last, without
    sampling; its drafter then starts from the last token, so that draft rounds fall exactly where they
    would have fallen. The same tokens, `[0, prefill_len)`, are what a handoff moves.

    Where a handoff brought no drafter KV, `cold_from` is how much of it was here nevertheless. A drafter that needs the
    target's features then begins behind the prompt: `first_drafted` is the position whose entry is the first of its
    groups, and there is nothing before it.

    Its `matcher` knows its grammar, if it has one.

    A drafter of several modules has lately seen `num_known_drafted` tokens, and left `carried` float32 [K - 1, E] for
    its next rows (`baton.drafters.chain`).

    `arrival` numbers the requests of an engine as they come; `queued_at` is when it came (monotonic seconds), and
    `started_at` when its prompt was first computed here; a decode leg has none. One that has `started`, and lost its
    pages, goes before those that have not.
    """

    def __init__(
        self,
        wire: GenerateRequest,
        sampler: SamplerState,
        ticket: SignedTicket | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.request_id = wire.request_id
        self.params: SamplingParams = wire.sampling_params
        self.stop_token_ids = frozenset(self.params.stop_token_ids)
        self.token_ids: list[int] = list(wire.prompt_token_ids)
        self.num_prompt = wire.num_prompt_tokens or len(wire.prompt_token_ids)
        self.sampler = sampler
        self.matcher = matcher
        self.role = wire.handoff.role if wire.handoff else None
        self.ticket = ticket
        self.max_prefill_tokens = wire.max_prefill_tokens
        self._status = RequestStatus.WAITING
        self.arrival = 0
        self.started = False
        self.queued_at = 0.0
        self.started_at: float | None = None
        self.committed_at: float | None = None  # until its first step
        self.runs_since: float | None = None  # its first step, or its handoff's commit; until it has ended
        self.finish_reason: FinishReason | None = None
        self.num_computed = 0
        self.num_drafted = 0
        self.first_drafted = 0
        self.cold_from: int | None = None
        self.num_known_drafted = 0
        self.carried: npt.NDArray[np.float32] | None = None
        self.num_cached = 0
        self.draft_ids: list[int] = []
        # What is not computed has no logits: a prompt that is scored finds nothing of others in the prefix cache.
        scores = self.params.prompt_logprobs is not None
        self.prompt_scores: list[TokenLogprobs | None] = [None] * (self.num_prompt if scores else 0)
        salt = secrets.token_hex(16) if scores else wire.cache_salt
        self.kv = BlockTables(salted_root(salt))
        self.is_salted = salt is not None
        self.first_logprobs: TokenLogprobs | None = None
        self.set_prefill_length()

    @property
    def status(self) -> RequestStatus:
        return self._status

    def become(self, status: RequestStatus) -> None:
        """Enter a state of its life. Raises RuntimeError for one that cannot follow the state it is in."""
        if status not in FOLLOWS[self._status]:
            raise RuntimeError(f"request {self.request_id!r} cannot be {status.name} after {self._status.name}")
        self._status = status

    def set_prefill_length(self) -> None:
        """Fix how far prefill goes from here: to the prompt's end, or to the last known token but one."""
        self.prefill_len = len(self.token_ids) if self.num_output == 0 else len(self.token_ids) - 1

    @property
    def queued_s(self) -> float | None:
        """How long its prompt waited to be computed; None until then, and of a decode leg."""
        return None if self.started_at is None else self.started_at - self.queued_at

    @property
    def place(self) -> tuple[bool, int]:
        """Where it stands in queues: the least goes first."""
        return not self.started, self.arrival

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    def allowed(self) -> Allowed | None:
        """What may be chosen for the next token and behind its drafts; None: anything. Raises `RequestError` where
        nothing may be."""
        allowed = self._allowed(self.draft_ids)
        if allowed is not None and self.sampler.restricts and not allowed.bits.any(axis=1).all():
            field = "bad_words" if self.params.allowed_token_ids is None else "allowed_token_ids"
            raise RequestError("what the request allows leaves no token to choose", field)
        return allowed

    def drafted(self, draft_ids: list[int]) -> None:
        """Take drafts, as far as its grammar and the request itself allow them, and a token behind them."""
        if self.matcher is not None:
            draft_ids = draft_ids[: self.matcher.follows(self.output_ids, draft_ids)]
        if self.sampler.restricts:
            allowed = self._allowed(draft_ids)
            draft_ids = draft_ids[: allowed.num_followed(draft_ids)] if allowed is not None else draft_ids
        self.draft_ids = draft_ids

    def _allowed(self, draft_ids: list[int]) -> Allowed | None:
        grammar = self.matcher.allowed(self.output_ids, draft_ids) if self.matcher is not None else None
        return self.sampler.allowed(draft_ids, grammar)

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_len

    def to_score(self, start: int, stop: int) -> range:
        """The positions of the prompt whose tokens are scored by rows [start, stop): those behind them."""
        return range(start + 1, min(stop + 1, len(self.prompt_scores)))

    def forget_computed(self) -> None:
        """The request's pages are gone, and with them everything computed."""
        self.num_computed = self.num_drafted = self.first_drafted = 0
        self.cold_from = None
        self.num_known_drafted, self.carried = 0, None
        self.draft_ids = []
