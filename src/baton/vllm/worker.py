"""The worker's side of the connector.

All methods but `post` run on vLLM's worker thread. The agent's events are queued until vLLM asks.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.errors import HandoffError, reason_label
from baton.handoff.agent.layers import WrittenLayers
from baton.handoff.agent.leg_events import Agent, GiveUp, LegEvent
from baton.handoff.plan.tables import copy_tables
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import AttemptKey, Seeds
from baton.kv.interval import Interval
from baton.log_limit import LogLimit
from baton.vllm.handoff_span import OnDecodeEnd
from baton.vllm.layer_stream import StreamedPrompt, VllmLayerStream
from baton.vllm.legs import BlocksPhase, EndPhase, ReceivePhase, WorkerDecode, WorkerPrefill
from baton.vllm.memory.geometry import CacheLayout
from baton.vllm.steps import ClosePrefill, ComputedTokens, OpenDecode, OpenPrefill, StepNews
from baton.wire import KVStream

log = logging.getLogger(__name__)
log.addFilter(LogLimit())
# An agent accepts an abort without waiting for a peer. After this time it hangs and may still commit the leg, so the
# engine must end.
ABORT_TIMEOUT_S = 60.0
# While legs wait for their peers, vLLM steps each millisecond without work. Waiting frees the cores.
IDLE_WAIT_S = 0.004
# The wait if only an event or a new request can change anything.
PARKED_WAIT_S = 0.1


@dataclass(slots=True)
class Results:
    """Request ids. `sent`: their blocks may be freed. `received`: their receive has ended. `failed`: those of
    `received` that got no KV."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerSide:
    """The attempts of one worker. `counts`: handoffs by outcome, and the `bytes` and `runs` of committed ones.

    `commit_at_end`: finish a prefill leg when vLLM finishes its request, not when its prompt is computed, since the
    runner writes to a preempted leg's blocks before it reports that. `on_decode_end`: called on vLLM's thread. `alone`:
    see `support.steps_in_turn`. `requests`: see `compat.request_queue`.
    """

    def __init__(
        self,
        layout: CacheLayout,
        commit_at_end: bool = False,
        abort_timeout: float = ABORT_TIMEOUT_S,
        kv_stream: KVStream = "chunk",
        on_decode_end: OnDecodeEnd | None = None,
        alone: bool = False,
        requests: queue.Queue[Any] | None = None,
    ) -> None:
        self._on_decode_end = on_decode_end
        self.counts: Counter[str] = Counter()
        self._commit_at_end = commit_at_end
        self._kv_stream = kv_stream
        self._layers: VllmLayerStream | None = None
        self._alone, self._requests = alone, requests
        self._num_idle = 0
        self._late: list[tuple[AttemptKey, LegEvent]] = []
        self._layout = layout
        self._abort_timeout = abort_timeout
        self._tiles = {name: rank.geometry.tile for name, rank in layout.geometries.items()}
        self._truncated = any(group.kind == "state" for group in layout.groups)
        self._events: queue.SimpleQueue[ev.HandoffEvent] = queue.SimpleQueue()
        self._prefills: dict[AttemptKey, WorkerPrefill] = {}
        self._decodes: dict[AttemptKey, WorkerDecode] = {}
        self._results = Results()
        self._admitted: set[str] = set()
        self._first_tokens: dict[str, int] = {}
        self._agent: Agent | None = None

    def bind(self, agent: Agent) -> None:
        """The agent's events go to `post`."""
        self._agent = agent
        self._layers = VllmLayerStream(self._layout) if self._kv_stream == "layer" else None

    def post(self, event: ev.HandoffEvent) -> None:
        """Called on the agent's thread."""
        self._events.put(event)
        if self._requests is not None:
            with self._requests.not_empty:
                self._requests.not_empty.notify()

    @property
    def agent(self) -> Agent:
        assert self._agent is not None
        return self._agent

    def release_preempted(self, keys: Sequence[AttemptKey]) -> None:
        """Give up prefill legs whose blocks are about to be overwritten. Returns once the agent has accepted.

        Copies that read the blocks may still run, but their data is never committed. Raises `HandoffError`.
        """
        self._post_rest()
        lost = [key for key in keys if key in self._prefills and not self._prefills[key].is_preempted]
        answers: queue.SimpleQueue[None] = queue.SimpleQueue()
        for key in lost:
            self._prefills[key].blocks_step("preempted")
            self.agent.abort(key, "preempted", lambda: answers.put(None))
        until = time.monotonic() + self._abort_timeout
        for _ in lost:
            try:
                answers.get(timeout=max(until - time.monotonic(), 0))
            except queue.Empty:
                raise HandoffError("not_answering", "the handoff agent does not give up preempted requests") from None

    def begin(self, step: StepNews, drafts_once: bool = False) -> None:
        for opened in step.opened:
            self._open_prefill(opened)
        for ticket in step.turned_away:
            self.agent.open_prefill(ticket)
            self.agent.abort(ticket.key, "refused")
        for key in step.admitted:
            self.agent.admit_prefill(key)
        for closed in step.closed:
            self._close_prefill(closed)
        self._post_rest()
        placed = {receive.ticket.key for receive in step.receives}
        for announced in step.announced:
            ticket = announced.ticket
            decode = WorkerDecode(announced.request_id, announced.next_token, ticket.mode, announced.traceparent)
            decode.mark("announced")
            self._decodes[ticket.key] = decode
            if ticket.key not in placed:
                self.agent.announce_decode(ticket)
        for receive in step.receives:
            self._receive(receive)
        for key in step.aborted:
            if key in self._decodes:
                self.agent.abort(key, "aborted")
        for reason, keys in (("cancelled", step.cancelled), ("prefix_missing", step.missing)):
            for key in keys:
                if key in self._prefills:
                    self.agent.abort(key, reason)
        if self._layers is not None:
            self._layers.begin(list(self._pushed(step.computed)), drafts_once)

    def _pushed(self, computed: Sequence[ComputedTokens]) -> Iterator[StreamedPrompt]:
        for entry in computed:
            leg = self._prefills.get(entry.key)
            if leg is None or leg.blocks is not BlocksPhase.COMPUTING:
                continue
            if leg.mode == "push" and not leg.is_released:
                pages, final = self._layout.kernel_tables(entry.tables), self._final(leg, entry)
                layers = WrittenLayers(self.agent, entry.key, leg.num_tokens, pages, final)
                yield StreamedPrompt(layers, leg.final)

    def layer_written(self, layer: str) -> None:
        if self._layers is not None:
            self._layers.written(layer)

    def finalise(self, computed: Sequence[ComputedTokens]) -> None:
        """After the forwards of target and drafter."""
        if self._layers is not None:
            self._layers.end()
        for entry in computed:
            leg = self._prefills.get(entry.key)
            if leg is None or leg.blocks is not BlocksPhase.COMPUTING:
                continue
            if self._kv_stream == "off" and entry.num_computed < leg.num_tokens:
                continue
            leg.final = self._final(leg, entry)
            tables = copy_tables(self._layout.kernel_tables(entry.tables))
            self._post_late(entry.key, ev.Declared(leg.num_tokens, tables, leg.final))
            if entry.num_computed >= leg.num_tokens:
                leg.blocks_step("computed")
                if not leg.seeded and not self._commit_at_end:
                    self._finish_prefill(entry.key, leg.next_token)

    def _post_late(self, key: AttemptKey, event: LegEvent) -> None:
        """With the next step, if possible: the agent would delay vLLM's token."""
        if self._alone:
            self._late.append((key, event))
        else:
            self.agent.post(key, event)

    def _post_rest(self) -> None:
        late, self._late = self._late, []
        for key, event in late:
            self.agent.post(key, event)

    def _final(self, leg: WorkerPrefill, entry: ComputedTokens) -> dict[str, int]:
        return {
            group.name: group.final(leg.num_tokens, entry.num_computed, self._tiles[group.name])
            for group in self._layout.groups
        }

    def _finish_prefill(self, key: AttemptKey, token: int | None, sampled: int | None = None) -> None:
        # For the protocol, the prompt ends before the token that D computes: all is final, and the first token is a
        # draft.
        drafts = [] if sampled is None else [sampled]
        seeds = Seeds(first_token=token or 0, draft_token_ids=drafts)
        self._post_late(key, ev.Sampled(seeds, False, {}))

    def results(self, idle: bool = False, parked: bool = False) -> Results:
        """Handoffs that ended since the last call. Waits in an `idle` step, unless vLLM may hold tokens of the last."""
        self._take_events()
        waiting = self._decodes or self._prefills
        waits = idle and (self._alone or self._num_idle > 0)
        self._num_idle = self._num_idle + 1 if idle else 0
        if waits and waiting and self._results == Results() and not self._admitted:
            self._wait(parked)
        out, self._results = self._results, Results()
        return out

    def _wait(self, parked: bool) -> None:
        requests = self._requests
        if requests is None:
            with contextlib.suppress(queue.Empty):
                self._on_event(self._events.get(timeout=IDLE_WAIT_S))
        else:
            with requests.not_empty:
                requests.not_empty.wait_for(
                    lambda: requests.queue or not self._events.empty(), PARKED_WAIT_S if parked else IDLE_WAIT_S
                )
        self._take_events()

    def take_admitted(self) -> set[str]:
        """Decode legs that were admitted, or failed before they had blocks."""
        out, self._admitted = self._admitted, set()
        return out

    def take_first_tokens(self) -> dict[str, int]:
        out, self._first_tokens = self._first_tokens, {}
        return out

    def _take_events(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._on_event(self._events.get_nowait())

    def _open_prefill(self, opened: OpenPrefill) -> None:
        key = opened.ticket.key
        self._prefills[key] = WorkerPrefill(
            opened.request_id, opened.num_tokens, opened.next_token, opened.ticket.mode, opened.seeded
        )
        self.agent.open_prefill(opened.ticket)

    def _close_prefill(self, closed: ClosePrefill) -> None:
        leg = self._prefills[closed.key]
        leg.end_step("finished")
        leg.held = closed.held
        if closed.failed and not leg.is_preempted:
            self._post_late(closed.key, GiveUp("aborted"))
        elif (leg.seeded or self._commit_at_end) and not (leg.is_preempted or leg.is_released):
            if leg.seeded and leg.next_token is None:
                self._finish_prefill(closed.key, closed.sampled)
            else:
                self._finish_prefill(closed.key, leg.next_token, closed.sampled)
        self._report_if_settled(closed.key, leg)

    def close_now(self, closed: ClosePrefill) -> bool:
        """Returns False, without changes, if the prompt is not final."""
        leg = self._prefills.get(closed.key)
        if leg is None or leg.blocks is not BlocksPhase.COMPUTED:
            return False
        self._close_prefill(closed)
        return True

    def _receive(self, receive: OpenDecode) -> None:
        decode = self._decodes.get(receive.ticket.key)
        if decode is None:
            # The leg failed before it had blocks; vLLM's `kv_load_failure_policy` decides.
            if receive.parked:
                self._results.received.add(receive.request_id)
                self._results.failed.add(receive.request_id)
            return
        decode.step("park" if receive.parked else "place")
        decode.mark("registered")
        wanted = dict.fromkeys((group.name for group in self._layout.groups), Interval(0, 0))
        if receive.parked:
            ask = (receive.num_tokens, receive.hit, receive.whole_blocks)
            wanted = {group.name: group.wanted(*ask) for group in self._layout.groups}
        tables = self._layout.kernel_tables(receive.tables)
        self.agent.open_decode(receive.ticket, receive.num_tokens, wanted, tables, receive.admitted)

    def _on_event(self, event: ev.HandoffEvent) -> None:
        if isinstance(event, ev.PrefillReleased):
            leg = self._prefills.get(event.key)
            if leg is not None:
                done = event.outcome in ("committed", "finished")
                self.counts[f"prefill_{event.outcome if done else reason_label(event.outcome)}"] += 1
                leg.end_step("released")
                self._report_if_settled(event.key, leg)
        elif isinstance(event, ev.DecodeAdmitted):
            if (waiting := self._decodes.get(event.key)) is not None:
                self._admitted.add(waiting.request_id)
                waiting.mark("admitted")
        elif isinstance(event, ev.DecodeFailed):
            self.counts[f"failed_{reason_label(event.reason)}"] += 1
            if (failed := self._decodes.get(event.key)) is not None:
                failed.failure = f"{event.reason}: {event.message}"
            log.warning("handoff %s failed: %s: %s", event.key, event.reason, event.message)
        elif isinstance(event, (ev.DecodeCommitted, ev.DecodeFinished, ev.DecodeReleased)):
            decode = self._decodes.pop(event.key, None)
            if decode is not None:
                if self._on_decode_end is not None:
                    self._on_decode_end(decode, event)
                self._received(decode, event)

    def _report_if_settled(self, key: AttemptKey, leg: WorkerPrefill) -> None:
        if leg.end is EndPhase.SETTLED:
            del self._prefills[key]
            if leg.held:
                self._results.sent.add(leg.request_id)

    def _received(
        self, decode: WorkerDecode, event: ev.DecodeCommitted | ev.DecodeFinished | ev.DecodeReleased
    ) -> None:
        good = isinstance(event, ev.DecodeCommitted)
        if isinstance(event, ev.DecodeCommitted):
            self.counts["bytes"] += event.num_bytes
            self.counts["runs"] += event.num_runs
            if not self._truncated and event.seeds.first_token != decode.next_token:
                good = False
                self.counts["failed_bad_seeds"] += 1
            elif decode.phase is ReceivePhase.PARKED and event.seeds.draft_token_ids:
                self._first_tokens[decode.request_id] = event.seeds.draft_token_ids[0]
        self.counts["committed" if good else "released"] += 1
        if decode.phase is ReceivePhase.ANNOUNCED:
            self._admitted.add(decode.request_id)
        if decode.phase is not ReceivePhase.PARKED:
            return
        self._results.received.add(decode.request_id)
        if not good:
            self._results.failed.add(decode.request_id)
