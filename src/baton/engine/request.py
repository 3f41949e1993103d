"""A request inside an engine, and its states."""

from __future__ import annotations

import enum
import secrets
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.engine.request_times import RequestTimes
from baton.engine.sampling.sampling_state import SamplingState
from baton.errors import RequestError
from baton.kv.block_tables import BlockTables
from baton.kv.prefix import salted_root
from baton.sampling_params import SamplingParams
from baton.structured import Allowed, Matcher
from baton.wire import FinishReason, GenerateRequest, TokenChunk, TokenLogprobs

if TYPE_CHECKING:
    from baton.handoff.protocol.ticket import SignedTicket


class RequestStatus(enum.Enum):
    """What an engine does with a request. `Request.transition` checks the order."""

    WAITING = enum.auto()
    """Has no pages; also after preemption or a failed handoff."""
    RECEIVING = enum.auto()
    """Decode leg: waits for KV in its destination pages."""
    RUNNING = enum.auto()
    AWAITING_RELEASE = enum.auto()
    """Prefill leg: computed, or found in the prefix cache. The handoff still needs the pages."""
    FINISHED = enum.auto()
    """Ended for the client. The handoff agent may still hold the pages."""


FOLLOWS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset(
        {
            RequestStatus.WAITING,
            RequestStatus.RECEIVING,
            RequestStatus.RUNNING,
            RequestStatus.AWAITING_RELEASE,
            RequestStatus.FINISHED,
        }
    ),
    RequestStatus.RECEIVING: frozenset({RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.WAITING, RequestStatus.AWAITING_RELEASE, RequestStatus.FINISHED}),
    RequestStatus.AWAITING_RELEASE: frozenset({RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


class Request:
    """One sample of one prompt.

    `token_ids` holds prompt and output. Target KV is valid for [0, num_computed), drafter KV for [0, num_drafted).
    While decoding, `num_computed == len(token_ids) - 1`: the last token has no KV yet. For known output see
    docs/lifecycle.md ("Known tokens"). A handoff moves [0, prefill_len).
    """

    def __init__(
        self,
        wire: GenerateRequest,
        sampler: SamplingState,
        ticket: SignedTicket | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.request_id = wire.request_id
        self.params: SamplingParams = wire.sampling_params
        self.stop_token_ids = frozenset(self.params.stop_token_ids)
        self.sampler = sampler
        self.matcher = matcher

        # Tokens and results.
        self.token_ids: list[int] = list(wire.prompt_token_ids)
        self.num_prompt = wire.num_prompt_tokens or len(wire.prompt_token_ids)
        # Cached tokens get no logits, so a prompt with logprobs gets its own salt and no prefix hits.
        scores = self.params.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] = [None] * (self.num_prompt if scores else 0)
        self.first_logprobs: TokenLogprobs | None = None
        self.finish_reason: FinishReason | None = None
        self.handoff_error: str | None = None  # until it is sent
        self.seed: TokenChunk | None = None  # a handoff's first token, until the first step

        # Life in this engine.
        self._status = RequestStatus.WAITING
        self.times = RequestTimes(wire)
        self.priority = wire.priority
        self.arrival = 0  # the order of arrival at this engine
        self.started = False  # has had pages, or recomputes after a failed handoff
        self.max_prefill_tokens = wire.max_prefill_tokens

        # KV, in tokens.
        salt = secrets.token_hex(16) if scores else wire.cache_salt
        self.kv = BlockTables(salted_root(salt))
        self.is_salted = salt is not None
        self.num_cached = 0
        self.num_computed = 0
        self.set_prefill_length()

        # The drafter.
        self.draft_ids: list[int] = []
        self.num_drafted = 0
        # The position of the first entry in the drafter's pages: not 0 if a handoff lacked KV of a drafter that needs
        # features.
        self.first_drafted = 0
        # The local prefix hit of the drafter's groups, if a handoff brought no drafter KV.
        self.draft_prefix_len: int | None = None
        # For a drafter with several modules: tokens known at its last run, and rows float32 [K - 1, E] for its next
        # (`baton.drafters.chain`).
        self.num_known_drafted = 0
        self.mtp_hidden: npt.NDArray[np.float32] | None = None

        # The handoff. `prefix_len`: the request only moves this many cached tokens of its prompt.
        self.ticket = ticket
        self.role = wire.handoff.role if wire.handoff else None
        self.prefix_len = wire.handoff.prefix_len if wire.handoff else None
        self.window_start = wire.handoff.window_start if wire.handoff else 0
        self.prefix_multiple = wire.handoff.prefix_multiple if wire.handoff else 1

    @property
    def status(self) -> RequestStatus:
        return self._status

    def transition(self, status: RequestStatus) -> None:
        if status not in FOLLOWS[self._status]:
            raise RuntimeError(f"request {self.request_id!r} cannot be {status.name} after {self._status.name}")
        self._status = status

    def set_prefill_length(self) -> None:
        """The whole prompt, or all tokens but the last if there is output."""
        self.prefill_len = len(self.token_ids) if self.num_output == 0 else len(self.token_ids) - 1

    @property
    def queue_key(self) -> tuple[bool, int, float, int]:
        """Requests that have started first, then by `turn`."""
        return not self.started, *self.turn

    @property
    def turn(self) -> tuple[int, float, int]:
        """Sort key: priority, then when the first token is due."""
        return self.priority, self.times.due_at, self.arrival

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    def allowed(self) -> Allowed | None:
        """For the next position and after each draft; None: all. Raises `RequestError` if none are."""
        allowed = self._allowed(self.draft_ids)
        if allowed is not None and self.sampler.restricts and not allowed.bits.any(axis=1).all():
            field = "bad_words" if self.params.allowed_token_ids is None else "allowed_token_ids"
            raise RequestError("what the request allows leaves no token to choose", field)
        return allowed

    def drafted(self, draft_ids: list[int]) -> None:
        """Keep the leading drafts that are allowed and after which a token can be chosen."""
        if self.matcher is not None:
            draft_ids = draft_ids[: self.matcher.follows(self.output_ids, draft_ids)]
        if self.sampler.restricts:
            allowed = self._allowed(draft_ids)
            draft_ids = draft_ids[: allowed.num_followed(draft_ids)] if allowed is not None else draft_ids
        self.draft_ids = draft_ids

    def _allowed(self, draft_ids: list[int]) -> Allowed | None:
        grammar = self.matcher.allowed(self.output_ids, draft_ids) if self.matcher is not None else None
        return self.sampler.allowed(draft_ids, grammar)

    def is_first_step(self, drafts: bool) -> bool:
        """Whether its next tokens are the first here, and it is a leg or drafted for."""
        follows = drafts or self.role == "prefill"
        return self.times.committed_at is not None or (follows and self.num_output == 0)

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_len

    def logprob_positions(self, start: int, stop: int) -> range:
        """The prompt positions whose logprobs come from rows [start, stop): each row gives the next token's."""
        return range(start + 1, min(stop + 1, len(self.prompt_logprobs)))

    def forget_computed(self) -> None:
        self.num_computed = self.num_drafted = self.first_drafted = 0
        self.draft_prefix_len = None
        self.num_known_drafted, self.mtp_hidden = 0, None
        self.draft_ids = []
