"""The scheduler's side: legs and their blocks (docs/reference/vllm-design.md, "The life of a request")."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from baton.errors import ProtocolError
from baton.handoff.protocol.ticket import Redeemer, SignedTicket, adapter_digest, request_digest, verify_ticket
from baton.log_limit import LogLimit
from baton.sampling_params import SamplingParams
from baton.vllm.adapters import Adapters, VllmRequest, beside_tokens
from baton.vllm.first_step import FirstTokens
from baton.vllm.legs import SchedulerDecode, SchedulerPrefill
from baton.vllm.memory.groups import BlockPool, CacheTable, EarlyBlocks, PartialBlocks, without_passed_blocks
from baton.vllm.steps import AnnounceDecode, ClosePrefill, ComputedTokens, OpenDecode, OpenPrefill, StepNews, Tables
from baton.wire import BATON_PARAM, LegParams, VllmIdentity, VllmPrefix

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

CloseNow = Callable[[ClosePrefill], bool]


def handoff_digest(tokens: Sequence[int], adapter: str = "") -> bytes:
    """A ticket's request digest for vLLM engines, over the handed-over tokens and the LoRA adapter as in
    `VllmIdentity.adapter`, if any."""
    digest = request_digest(tokens, SamplingParams())
    return adapter_digest(digest, adapter) if adapter else digest


def _why_not(request: VllmRequest, params: LegParams, adapter: str | None) -> str | None:
    """None: the leg may be taken."""
    beside = beside_tokens(request)
    if adapter is None:
        beside = "a LoRA adapter without a directory here, or with files that have changed"
    if beside is not None:
        return f"its KV depends on {beside}, not on token ids alone"
    if params.role == "prefill" and request.max_tokens != 1:
        # Further decoding would overwrite the leg's states, and free blocks that its window has left.
        return "a prefill leg samples one token"
    return None


class SchedulerSide:
    """The legs in vLLM's scheduler, by request id. `refused` counts refused legs by reason; their requests are served
    without a handoff. `early`: without it, decode legs wait for P's admission. `verify_first`: see
    `PluginConfig.first_step`. `close_now`: the worker's, if it is in this process. `window_tile`: see `OpenCache`.
    """

    def __init__(
        self,
        identity: VllmIdentity,
        ticket_key: bytes,
        cache_tables: Sequence[CacheTable],
        pool: BlockPool,
        clock: Callable[[], float] = time.monotonic,
        verify_first: bool = False,
        close_now: CloseNow | None = None,
        window_tile: int = 1,
    ) -> None:
        self.identity = identity
        self.refused: Counter[str] = Counter()
        self.first_tokens = FirstTokens()
        self.early: EarlyBlocks | None = None
        self._verify_first = verify_first
        self._close_now = close_now
        self._ticket_key = ticket_key
        self._redeemer = Redeemer(ticket_key, identity.engine_id, identity.incarnation)
        self._cache_tables = cache_tables
        self._pool = pool
        self._clock = clock
        self._requests: set[str] = set()
        self._prefills: dict[str, SchedulerPrefill] = {}
        self._held: dict[str, SchedulerPrefill] = {}  # finished requests whose blocks are kept
        self._decodes: dict[str, SchedulerDecode] = {}
        self._prefixes: dict[str, int] = {}  # tokens that were not computed, of decode legs of hand-backs
        self._partial = PartialBlocks(cache_tables, pool, window_tile)
        self._most_missing = 2 * math.lcm(*(cache.block_size for cache in cache_tables))
        self._asked: dict[str, str] = {}  # requests that ask for this engine's identity, with their adapters
        self._adapters = Adapters()
        self._step = StepNews()

    def on_new_request(self, request: VllmRequest) -> None:
        """Redeem a leg's ticket at once: messages of the other engine may already arrive."""
        self._requests.add(request.request_id)
        params = self._params(request)
        if params is None:
            return
        adapter = "" if request.lora_request is None else self._adapters.describe(request.lora_request)
        if params.role == "identify":
            self._asked[request.request_id] = adapter or ""
        elif params.role == "cancel":
            self._cancel(request, params.ticket)
        elif (why := _why_not(request, params, adapter)) is not None:
            self._refuse_leg(request, params, why)
        else:
            self._open_leg(request, params, adapter or "")

    def _open_leg(self, request: VllmRequest, params: LegParams, adapter: str) -> None:
        assert request.prompt_token_ids is not None
        tokens, role = request.prompt_token_ids, params.role
        assert role == "prefill" or role == "decode"
        whole = role == "prefill" and (self.identity.truncate_prefill or params.seed_first_token)
        num_tokens = len(tokens) if whole else self.identity.handed_over(len(tokens))
        if role == "decode" and params.num_tokens:
            num_tokens = min(num_tokens, params.num_tokens)
        if num_tokens < 1:
            return
        if role not in self.identity.roles:
            self._refuse(request, f"this engine takes no {role} legs")
            return
        try:
            digest = handoff_digest(tokens[:num_tokens], adapter)
            ticket = self._redeemer.redeem(params.ticket, role, digest, self._clock())
        except ProtocolError as error:
            self._refuse(request, str(error))
            return
        if role == "prefill":
            self._open_prefill(request, params, ticket, num_tokens, None if whole else tokens[num_tokens])
        else:
            self._open_decode(request, params, ticket, num_tokens, tokens[num_tokens])

    def _open_prefill(
        self, request: VllmRequest, params: LegParams, ticket: SignedTicket, num_tokens: int, next_token: int | None
    ) -> None:
        # Nobody verifies the token of a hand-back.
        seeded = params.seed_first_token or (self._verifies(request) and not params.prefix)
        self._prefills[request.request_id] = SchedulerPrefill(ticket, num_tokens, seeded, params.prefix)
        self._step.opened.append(OpenPrefill(request.request_id, ticket, num_tokens, next_token, seeded))

    def _open_decode(
        self, request: VllmRequest, params: LegParams, ticket: SignedTicket, num_tokens: int, next_token: int
    ) -> None:
        self._decodes[request.request_id] = SchedulerDecode(ticket, num_tokens, params.prefix, params.whole_blocks)
        traceparent = (getattr(request, "trace_headers", None) or {}).get("traceparent")
        self._step.announced.append(AnnounceDecode(request.request_id, ticket, next_token, traceparent))

    def _verifies(self, request: VllmRequest) -> bool:
        return self._verify_first and request.sampling_params.temperature == 0

    def _refuse_leg(self, request: VllmRequest, params: LegParams, why: str) -> None:
        """D is notified at once of a refused prefill leg, unless its ticket is invalid here or was redeemed before."""
        self._refuse(request, why)
        if params.role == "prefill":
            with contextlib.suppress(ProtocolError):
                ticket = self._redeemer.redeem(params.ticket, "prefill", None, self._clock())
                self._step.turned_away.append(ticket)

    def _cancel(self, request: VllmRequest, text: str) -> None:
        """Give up a ticket's prefill leg: no decode engine will fetch its KV."""
        try:
            key = verify_ticket(self._ticket_key, text, "prefill", self._clock()).key
        except ProtocolError as error:
            self._refuse(request, str(error))
            return
        for leg in self._prefills.values():
            leg.cancelled |= leg.ticket.key == key
        self._step.cancelled += [leg.ticket.key for leg in self._held.values() if leg.ticket.key == key]

    def _params(self, request: VllmRequest) -> LegParams | None:
        given = request.kv_transfer_params
        if not given:
            return None
        if not isinstance(given, dict) or BATON_PARAM not in given:
            self._refuse(request, "kv_transfer_params are another connector's")
            return None
        try:
            return msgspec.convert(given[BATON_PARAM], LegParams)
        except msgspec.ValidationError as error:
            self._refuse(request, "kv_transfer_params are malformed", str(error))
            return None

    def _refuse(self, request: VllmRequest, why: str, detail: str = "") -> None:
        self.refused[why] += 1
        # It may contain a client's text.
        log.warning("request %s is served without a handoff: %s %s", request.request_id, why, detail[:200])

    # ------------------------------------------------------------ decode leg

    def num_matched(self, request_id: str, num_computed: int) -> int | None:
        """How many tokens come from P, if the first `num_computed` are here. Idempotent. None without P's
        admission or room for early legs, while a partial block is in the prefix cache, and for a hand-back that lacks
        its prefix.
        """
        if self._partial.waiting or self._lacks_prefix(request_id, num_computed):
            return None
        leg = self._decodes.get(request_id)
        if leg is None or leg.receiving or leg.num_tokens <= num_computed:
            return 0
        may = self._is_admitted(leg) or (self.early is not None and self.early.fits(leg.num_tokens))
        return leg.num_tokens - num_computed if may else None

    def _is_admitted(self, leg: SchedulerDecode) -> bool:
        return len(leg.admitted) == len(self.identity.control_addresses)

    def _lacks_prefix(self, request_id: str, num_computed: int) -> bool:
        """Whether this is a prefill leg of a hand-back whose KV is not in the prefix cache. The other engine computes
        it; this one decodes."""
        leg = self._prefills.get(request_id)
        if leg is None or not leg.is_prefix or leg.tables:
            return False
        if not leg.cancelled and leg.num_tokens - num_computed > self._most_missing:
            leg.cancelled = True
            self._step.missing.append(leg.ticket.key)
        return leg.cancelled

    def on_admitted(self, news: Iterable[tuple[int, str]]) -> None:
        """(rank, request id) of decode legs that were admitted, or failed: vLLM handles a failure once the leg has
        blocks."""
        for rank, request_id in news:
            if (leg := self._decodes.get(request_id)) is not None:
                leg.admitted.add(rank)
                if self.early is not None and self._is_admitted(leg):
                    self.early.ended(request_id)

    def on_allocated(self, request_id: str, tables: Tables, num_external: int) -> None:
        """`num_external`: tokens that come from P."""
        leg = self._decodes.get(request_id)
        if leg is None or leg.receiving:
            return
        leg.receiving = num_external > 0
        leg.hit, admitted = leg.num_tokens - num_external, self._is_admitted(leg)
        if leg.receiving and not admitted and self.early is not None:
            self.early.allocated(request_id, leg.num_tokens)
        ask = (leg.num_tokens, leg.hit, tables, leg.receiving, leg.whole_blocks, admitted)
        self._step.receives.append(OpenDecode(request_id, leg.ticket, *ask))
        if not leg.receiving:
            self.on_received(request_id)
        elif not leg.whole_blocks:
            self._partial.allocated(request_id, leg.num_tokens, leg.hit, tables)

    def on_received(self, request_id: str, failed: bool = False) -> None:
        self._partial.received(request_id, failed)
        if self.early is not None:
            self.early.ended(request_id)
        leg = self._decodes.pop(request_id, None)
        if leg is not None and leg.is_prefix:
            self._prefixes[request_id] = leg.hit if failed else leg.num_tokens

    def on_first_tokens(self, tokens: Mapping[str, int]) -> None:
        """Called before `on_received`."""
        for request_id, token in tokens.items():
            if request_id in self._decodes:
                self.first_tokens.add(request_id, token)

    # ------------------------------------------------------------ prefill leg

    def on_scheduled(self, request_id: str, num_computed: int, new: Tables | None, replace: bool) -> None:
        """This step computes a request's tokens up to `num_computed`. The `new` blocks are appended to its block
        tables, or `replace` them."""
        self._partial.evict(request_id)
        leg = self._prefills.get(request_id)
        if leg is None or leg.lost:
            return
        if not leg.tables:
            # From here the request is computed, or preempted and given up: D does not hold blocks forever.
            self._step.admitted.append(leg.ticket.key)
        if replace or not leg.tables:
            leg.tables = new or ()
        elif new is not None:
            leg.tables = tuple(old + added for old, added in zip(leg.tables, new, strict=True))
        leg.tables = without_passed_blocks(leg.tables, self._cache_tables, leg.num_computed)
        done = leg.num_computed >= leg.num_tokens
        leg.num_computed = num_computed
        if not done and num_computed >= leg.num_tokens:
            self._pin(leg)
        if not done:
            self._step.computed.append(ComputedTokens(leg.ticket.key, num_computed, leg.tables))

    def only_prefills(self, request_ids: Collection[str]) -> bool:
        return bool(request_ids) and self._prefills.keys() >= set(request_ids)

    def _pin(self, leg: SchedulerPrefill) -> None:
        """Hold a reference to the first block of each window. This engine computes one token more than it hands over,
        so vLLM's window is one token ahead, and vLLM may free that block when the request ends."""
        for cache in self._cache_tables:
            if cache.window is not None:
                block = leg.tables[cache.table][cache.first_block(leg.num_tokens)]
                leg.pinned.append(self._pool.blocks[block])
        self._pool.touch(leg.pinned)

    def _unpin(self, leg: SchedulerPrefill) -> None:
        self._pool.free_blocks(leg.pinned)
        leg.pinned = []

    def on_sent(self, request_id: str) -> None:
        if (leg := self._held.pop(request_id, None)) is not None:
            self._unpin(leg)

    def on_preempted(self, request_ids: set[str]) -> None:
        """vLLM took these requests' blocks, which ends their handoffs, and will compute them again."""
        for request_id in request_ids:
            # `reset_prefix_cache` preempts outside of a step, so the request may already have ended.
            leg = self._prefills.get(request_id) or self._held.get(request_id)
            if leg is not None and not leg.lost:
                leg.lost = True
                self._unpin(leg)
                self._step.preempted.append(leg.ticket.key)

    def on_finished(self, request: VllmRequest) -> tuple[bool, dict[str, Any] | None]:
        self._requests.discard(request.request_id)
        self.first_tokens.discard(request.request_id)
        self._partial.evict(request.request_id)
        adapter = self._asked.pop(request.request_id, None)
        if adapter is not None:
            identity = msgspec.structs.replace(self.identity, clock=self._clock(), adapter=adapter)
            return False, {BATON_PARAM: msgspec.to_builtins(identity)}
        if (prefill := self._prefills.pop(request.request_id, None)) is not None:
            failed = prefill.num_computed < prefill.num_tokens or prefill.lost or prefill.cancelled
            sampled = request.output_token_ids[0] if prefill.seeded and request.output_token_ids else None
            failed |= prefill.seeded and sampled is None
            held = not prefill.lost and bool(prefill.tables)
            if held:
                self._held[request.request_id] = prefill
            closed = ClosePrefill(prefill.ticket.key, held, failed, sampled)
            if failed or self._close_now is None or not self._close_now(closed):
                self._step.closed.append(closed)
            return held, None
        if (decode := self._decodes.pop(request.request_id, None)) is not None:
            self._step.aborted.append(decode.ticket.key)
        num_found = self._prefixes.pop(request.request_id, None)
        return False, None if num_found is None else {BATON_PARAM: msgspec.to_builtins(VllmPrefix(num_found))}

    def is_parked(self) -> bool:
        """Whether each request waits for KV."""
        return all((leg := self._decodes.get(each)) is not None and leg.receiving for each in self._requests)

    def take_step(self) -> StepNews:
        step, self._step = self._step, StepNews()
        return step

    def has_news(self) -> bool:
        return bool(self._step)
