"""Metrics of one engine, with vLLM's names if vLLM has the metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from baton.engine.scheduler import Scheduler
from baton.handoff.agent.stats import AgentStats
from baton.histogram import SECONDS, Histogram
from baton.openai.http.metrics import Row, counter, gauge, histogram
from baton.wire import EngineLoad

# vLLM's label values.
PromptSource = Literal["local_compute", "local_cache_hit", "external_kv_transfer"]
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


@dataclass(slots=True)
class EngineMetrics:
    """Written by the engine thread only. Other threads may read single values, which may disagree."""

    num_requests: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    prefix_store_failures: Counter[str] = field(default_factory=Counter)
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_corrupted: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    num_handoffs: Counter[str] = field(default_factory=Counter)
    handoff_bytes: int = 0
    handoff_runs: int = 0
    num_received_prefixes: int = 0
    received_prefix_bytes: int = 0
    handoff_failures: Counter[str] = field(default_factory=Counter)
    prompt_sources: Counter[PromptSource] = field(default_factory=Counter)
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    cache_config: Mapping[str, str] = field(default_factory=dict)
    inference_time: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    prefill_time: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    register_to_commit: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    commit_to_first_step: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    recoveries: Counter[str] = field(default_factory=Counter)
    agent: AgentStats = field(default_factory=AgentStats)
    refused_tickets: int | None = None
    load: EngineLoad | None = None

    def verified(self, num_draft_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        while len(self.accepted_per_pos) < num_draft_tokens:
            self.accepted_per_pos.append(0)
        for position in range(num_accepted):
            self.accepted_per_pos[position] += 1

    def prompt_came(self, num_tokens: int, num_cached: int, rest: PromptSource) -> None:
        """`num_cached` are from the local cache, the others from `rest`."""
        self.prompt_sources["local_cache_hit"] += num_cached
        self.prompt_sources[rest] += num_tokens - num_cached

    def load_of(self, scheduler: Scheduler, num_handoffs: int) -> EngineLoad:
        pools = list(scheduler.cache.pools.values())
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.queued()),
            num_handoffs=num_handoffs,
            kv_usage=max(pool.num_referenced / (pool.num_pages - 1) for pool in pools),
            num_referenced_pages=sum(pool.num_referenced for pool in pools),
            num_quarantined_pages=sum(pool.num_quarantined for pool in pools),
            num_cached_pages=sum(pool.num_cached for pool in pools),
            num_prefix_queries=self.num_prompt_tokens,
            num_prefix_hits=self.num_cached_tokens,
        )

    def collect_rows(self) -> Iterator[Row]:
        for reason, count in sorted(self.num_requests.items()):
            yield counter("request_success", "Finished requests by reason.", count, finished_reason=reason)
        yield counter("prompt_tokens", "Prompt tokens of admitted requests.", self.num_prompt_tokens)
        yield counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", self.num_prompt_tokens)
        yield counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", self.num_cached_tokens)
        yield counter("prefix_store_tokens", "Prompt tokens loaded from the prefix store.", self.num_loaded_tokens)
        for operation, count in sorted(self.prefix_store_failures.items()):
            text = "Reads and writes of the prefix store that failed."
            yield counter("prefix_store_failures", text, count, operation=operation)
        yield counter("generation_tokens", "Tokens generated.", self.num_generation_tokens)
        yield counter("num_preemptions", "Requests preempted.", self.num_preemptions)
        text = "Requests that ended because the target's logits were not finite."
        yield counter("corrupted_requests", text, self.num_corrupted)
        for source in get_args(PromptSource):
            text = "Prompt tokens by where their KV came from."
            yield counter("prompt_tokens_by_source", text, self.prompt_sources[source], source=source)
        yield counter("engine_steps", "Engine steps run.", self.num_steps)
        yield histogram("iteration_tokens_total", "Tokens that a step computed.", self.step_tokens)
        yield counter("spec_decode_num_drafts", "Verification rounds.", self.num_drafts)
        yield counter("spec_decode_num_draft_tokens", "Draft tokens verified.", self.num_draft_tokens)
        yield counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", sum(self.accepted_per_pos))
        for position, count in enumerate(self.accepted_per_pos):
            text = "Draft tokens accepted per draft position."
            yield counter("spec_decode_num_accepted_tokens_per_pos", text, count, position=str(position))
        for outcome, count in sorted(self.num_handoffs.items()):
            yield counter("handoffs", "Handoffs ended, by outcome.", count, outcome=outcome)
        for reason, count in sorted(self.handoff_failures.items()):
            yield counter("handoff_failures", "Handoffs failed, by reason.", count, reason=reason)
        for rung, count in sorted(self.recoveries.items()):
            yield counter("recoveries", "Recoveries begun, by rung of the ladder.", count, rung=rung)
        for kind, count in self._refused():
            yield counter("handoff_refused", "Connections, messages and tickets refused, by kind.", count, kind=kind)
        yield counter("integrity_bad_pieces", "Pieces of KV that did not match their digest.", self.agent.bad_pieces)
        yield counter("lost_leases", "Peers that were silent for longer than their lease.", self.agent.lost_leases)
        yield counter("handoff_bytes", "KV bytes received.", self.handoff_bytes)
        yield counter("handoff_runs", "Contiguous copies that received KV took.", self.handoff_runs)
        yield counter("received_prefixes", "Prefixes that another engine's cache sent.", self.num_received_prefixes)
        yield counter("received_prefix_bytes", "KV bytes of these prefixes.", self.received_prefix_bytes)
        text = "Seconds from a request's arrival at an engine to its first step there."
        yield histogram("request_queue_time_seconds", text, self.queue_time)
        text = "Seconds from a request's first step, or from its handoff's commit, to its end here."
        yield histogram("request_inference_time_seconds", text, self.inference_time)
        if self.cache_config:
            text = "What the KV cache is like: the labels say."
            yield "vllm:cache_config_info", "gauge", text, {"engine": "0", **self.cache_config}, 1.0
        text = "Seconds from a request's first step to its first token."
        yield histogram("request_prefill_time_seconds", text, self.prefill_time)
        yield from self._handoff_times()
        for name, (figure, text) in _GAUGES.items() if self.load is not None else ():
            yield gauge(name, text, getattr(self.load, figure))

    def _handoff_times(self) -> Iterator[Row]:
        copies = self.agent.copies
        yield histogram("handoff_plan_seconds", "Seconds to plan a copy.", copies.plan)
        yield histogram("handoff_post_seconds", "Seconds to hand a copy to the transport.", copies.post)
        yield histogram("handoff_transfer_seconds", "Seconds from a copy's post to its end.", copies.transfer)
        yield histogram("handoff_copy_runs", "Contiguous runs of a copy.", copies.runs)
        for group, num in sorted(copies.bytes.items()):
            yield counter("handoff_copied_bytes", "Bytes of copies that this side issued.", num, group=group)
        text = "Bytes of committed handoffs that this side had copied before the prefill's end."
        yield counter("handoff_hidden_bytes", text, self.agent.hidden_bytes)
        text = "Seconds from the pages of a decode leg to its commit."
        yield histogram("handoff_register_to_commit_seconds", text, self.register_to_commit)
        text = "Seconds from a decode leg's commit to the tokens of its first step."
        yield histogram("handoff_commit_to_first_step_seconds", text, self.commit_to_first_step)

    def _refused(self) -> Iterator[tuple[str, int]]:
        if self.refused_tickets is not None:
            yield "connection", self.agent.refused
            yield "malformed", self.agent.malformed
            yield "message", self.agent.rejected
            yield "session", self.agent.evicted
            yield "ticket", self.refused_tickets


_GAUGES = {
    "num_requests_running": ("num_running", "Requests that hold pages and compute."),
    "num_requests_waiting": ("num_waiting", "Requests that wait for pages or slots."),
    "num_handoffs_open": ("num_handoffs", "Handoffs that have not ended."),
    "kv_cache_usage_perc": ("kv_usage", "Referenced share of the fullest group's pages, 0 to 1."),
    "num_referenced_pages": ("num_referenced_pages", "Pages referenced by requests, all groups."),
    "num_quarantined_pages": ("num_quarantined_pages", "Pages not yet proven quiet, all groups."),
    "num_cached_pages": ("num_cached_pages", "Unreferenced pages kept for prefix hits, all groups."),
}
