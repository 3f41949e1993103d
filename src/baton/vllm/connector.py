"""`BatonConnector`: vLLM's connector API, delegated to `SchedulerSide` and `WorkerSide`."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from baton.errors import ConfigError
from baton.plugin_base.ranks import joined_addresses
from baton.vllm import caches, compat, support
from baton.vllm.config import check_transfer, read_config
from baton.vllm.draft_slots import RememberedSlots
from baton.vllm.memory.groups import EarlyBlocks
from baton.vllm.metrics import TOTALS, BatonPromMetrics, BatonStats
from baton.vllm.open_cache import OpenCache, open_cache
from baton.vllm.scheduler import SchedulerSide
from baton.vllm.steps import StepNews
from baton.vllm.worker import WorkerSide
from baton.wire import VllmIdentity


@dataclass
class BatonMetadata(KVConnectorMetadata):
    """A step's messages from scheduler to worker. `idle`: the step computes nothing, and no other engine waits for
    it. `parked`: each request waits for its handoff. `drafts_once`: it proposes none."""

    step: StepNews
    idle: bool
    drafts_once: bool = False
    parked: bool = False


@dataclass
class BatonHandshake(KVConnectorHandshakeMetadata):
    """The engine's identity with this worker's agent address, for the scheduler. `window_tile`: see `OpenCache`."""

    rank: int
    identity: VllmIdentity
    window_tile: int


@dataclass
class BatonWorkerMetadata(KVConnectorWorkerMetadata):
    """A step's messages from workers to scheduler: (worker rank, request id) of decode legs that P admitted, and first
    tokens by request."""

    admitted: set[tuple[int, str]]
    first_tokens: dict[str, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> BatonWorkerMetadata:
        assert isinstance(other, BatonWorkerMetadata)
        return BatonWorkerMetadata(self.admitted | other.admitted, self.first_tokens | other.first_tokens)


_BY_INCARNATION: weakref.WeakValueDictionary[str, WorkerSide] = weakref.WeakValueDictionary()


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's entry to the plug-in: one in the scheduler's process, and one in each worker, where an agent runs."""

    _draft_slots: RememberedSlots | None = None
    _idle_step: Any = None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        version = support.check_version()
        _log_with_vllm()
        super().__init__(vllm_config, role, kv_cache_config)
        support.check_config(vllm_config)
        self._transfer = vllm_config.kv_transfer_config
        check_transfer(self._transfer)
        settings = read_config(self._transfer.kv_connector_extra_config)
        support.stream_of(vllm_config, settings.kv_stream)
        first_step = support.first_step_of(vllm_config, settings.first_step)
        self._config = msgspec.structs.replace(settings, first_step=first_step)
        self._skips_drafts = support.may_skip_drafts(vllm_config)
        self._sleeps_when_idle = support.sleeps_when_idle(vllm_config)
        self._version = version
        self._scheduler: SchedulerSide | None = None
        self._opened: OpenCache | None = None
        self._pool: Any = None
        self._reported: dict[str, int] = {}

    @property
    def scheduler(self) -> SchedulerSide:
        if self._scheduler is None:
            raise ConfigError("kv_connector", "the worker's half has not started")
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        if self._opened is None:
            raise ConfigError("kv_connector", "no KV cache is registered")
        return self._opened.side

    # ------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._opened = open_cache(self._vllm_config, self._config, self._kv_cache_config, kv_caches, self._version)
        _BY_INCARNATION[self._opened.identity.incarnation] = self._opened.side
        if self._vllm_config.speculative_config is not None and not compat.steps_alone(self._vllm_config):
            self._draft_slots = RememberedSlots(self._opened.draft_layers)

    def get_handshake_metadata(self) -> BatonHandshake | None:
        opened = self._opened
        return None if opened is None else BatonHandshake(opened.rank, opened.identity, opened.window_tile)

    def shutdown(self) -> None:
        if self._opened is not None:
            self._opened.close()

    # ------------------------------------------------------------ worker: a step, in vLLM's order

    def handle_preemptions(self, kv_connector_metadata: BatonMetadata) -> None:
        """Give up preempted legs, before the step writes blocks."""
        self.worker.release_preempted(kv_connector_metadata.step.preempted)

    def bind_connector_metadata(self, connector_metadata: BatonMetadata) -> None:
        """Pass the step to the agent, before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if connector_metadata.step.receives:
            # vLLM does not wait for the GPU: earlier steps may still write to blocks that a receive now has.
            compat.wait_for_device(self._vllm_config)
        self.worker.begin(connector_metadata.step, connector_metadata.drafts_once)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: receives begin in `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is parked until its KV is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A target layer is written, so its copy may begin."""
        self.worker.layer_written(layer_name)
        if self._draft_slots is not None:
            self._draft_slots.record(layer_name, compat.slot_mappings())

    def wait_for_save(self) -> None:
        """Declare the step's tokens final, after the drafter; their copies overlap the next step."""
        if sys.exc_info()[1] is not None:
            return  # vLLM also calls this if the step failed
        if self._draft_slots is not None:
            self._draft_slots.blank()
        if isinstance(metadata := self._connector_metadata, BatonMetadata):
            if metadata.step.computed:
                compat.wait_for_device(self._vllm_config)
            self.worker.finalise(metadata.step.computed)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Handoffs that ended since the last step. vLLM expects failed receives among the finished ones too."""
        metadata = self._connector_metadata
        known = isinstance(metadata, BatonMetadata)
        results = self.worker.results(known and metadata.idle, known and metadata.parked)
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def get_kv_connector_stats(self) -> BatonStats | None:
        """Handoffs of a worker, or the scheduler's refused legs, since the last call."""
        if self._opened is not None:
            counts: Mapping[str, int] = self._opened.side.counts
            if self._opened.rank:
                # Only worker 0 reports outcomes, so that each counts once; all report failures and what they moved.
                counts = {name: counts[name] for name in counts if name in TOTALS or name.startswith("failed_")}
        elif self._scheduler is not None:
            counts = {"refused": self._scheduler.refused.total()}
        else:
            return None
        new = {name: count - self._reported.get(name, 0) for name, count in counts.items()}
        reported = {name: count for name, count in new.items() if count}
        if not reported:
            return None
        self._reported = dict(counts)
        return BatonStats(data=reported)

    def build_connector_worker_meta(self) -> BatonWorkerMetadata | None:
        """Admitted decode legs and first tokens, for the scheduler; None without."""
        admitted, first_tokens = self.worker.take_admitted(), self.worker.take_first_tokens()
        if not (admitted or first_tokens) or self._opened is None:
            return None
        return BatonWorkerMetadata({(self._opened.rank, request_id) for request_id in admitted}, first_tokens)

    # ------------------------------------------------------------ scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Some blocks are kept longer than their request."""
        self._pool = gpu_block_pool

    def set_xfer_handshake_metadata(self, metadata: dict[int, BatonHandshake]) -> None:
        self._take_identities(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], BatonHandshake]) -> None:
        self._take_identities(metadata.values())

    def _take_identities(self, handshakes: Iterable[BatonHandshake]) -> None:
        by_rank = sorted(handshakes, key=lambda each: each.rank)
        addresses = [(each.rank, each.identity.control_addresses[0]) for each in by_rank]
        size = self._vllm_config.parallel_config.world_size
        joined = joined_addresses(addresses, size)
        alone = size == 1 and not compat.zeroes_before_preemptions(self._vllm_config)
        worker = _BY_INCARNATION.get(by_rank[0].identity.incarnation) if alone else None
        identity = msgspec.structs.replace(by_rank[0].identity, control_addresses=joined)
        tables = caches.split_cache_groups(self._kv_cache_config)
        self._scheduler = SchedulerSide(
            identity,
            self._config.ticket_key(),
            tables,
            self._pool,
            verify_first=self._config.first_step == "verify",
            close_now=None if worker is None else worker.close_now,
            window_tile=min(each.window_tile for each in by_rank),
        )
        most = caches.most_blocks(self._vllm_config, self._kv_cache_config)
        self._scheduler.early = EarlyBlocks(tables, self._pool, most)

    def on_new_request(self, request: Any) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The number of tokens that come from the other engine, and whether asynchronously. None: ask again in the next
        step."""
        num = self.scheduler.num_matched(request.request_id, num_computed_tokens)
        return num, bool(num)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups, since the handoff fills the request's own blocks."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.on_allocated(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> BatonMetadata:
        side, scheduled = self.scheduler, scheduler_output.num_scheduled_tokens
        side.on_preempted(scheduler_output.preempted_req_ids or set())
        for new in scheduler_output.scheduled_new_reqs:
            end = new.num_computed_tokens + scheduled[new.req_id]
            side.on_scheduled(new.req_id, end, new.block_ids, replace=True)
        side.first_tokens.place(scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_spec_decode_tokens)
        if drafts_once := self._skips_drafts and side.only_prefills(scheduled):
            # No engine verifies the drafts of prefill legs.
            scheduler_output.num_spec_tokens_to_schedule = 0
        cached = scheduler_output.scheduled_cached_reqs
        columns = (cached.req_ids, cached.num_computed_tokens, cached.new_block_ids)
        for request_id, start, blocks in zip(*columns, strict=True):
            end = start + scheduled[request_id]
            side.on_scheduled(request_id, end, blocks, replace=request_id in cached.resumed_req_ids)
        idle = scheduler_output.total_num_scheduled_tokens == 0 and compat.steps_alone(self._vllm_config)
        # vLLM then takes drafts again, which a preempted request must not get.
        wakes = idle and self._sleeps_when_idle and not scheduler_output.preempted_req_ids
        self._idle_step = scheduler_output if wakes else None
        return BatonMetadata(side.take_step(), idle, drafts_once, side.is_parked())

    def update_connector_output(self, connector_output: Any) -> None:
        if isinstance(news := connector_output.kv_connector_worker_meta, BatonWorkerMetadata):
            self.scheduler.on_admitted(news.admitted)
            self.scheduler.on_first_tokens(news.first_tokens)
        if connector_output.finished_recving and self._idle_step is not None:
            # Else vLLM's engine core would sleep 1 ms.
            self._idle_step.total_num_scheduled_tokens = 1
        failed = connector_output.failed_recving or ()
        for request_id in connector_output.finished_recving or ():
            self.scheduler.on_received(request_id, request_id in failed)
        for request_id in connector_output.finished_sending or ():
            self.scheduler.on_sent(request_id)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request's leg. Returns whether vLLM must keep its blocks for now, and params for the client."""
        return self.scheduler.on_finished(request)

    def has_pending_push_work(self) -> bool:
        """vLLM must run a step to deliver messages to the worker."""
        return self._scheduler is not None and self._scheduler.has_news()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BatonStats | None:
        return BatonStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> BatonPromMetrics:
        return BatonPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _log_with_vllm() -> None:
    """vLLM configures only its own loggers."""
    ours, theirs = logging.getLogger("baton"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.level)
