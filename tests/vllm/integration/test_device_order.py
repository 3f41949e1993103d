"""Copies and a GPU that vLLM does not wait for: no copy starts before conflicting kernels have ended."""

from __future__ import annotations

import contextlib
import os
import queue
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from baton.errors import ConfigError
from baton.plugin_base.rank_agent import digester_of
from baton.transports.base import DeviceMemory
from baton.vllm import compat
from baton.vllm.config import PluginConfig
from baton.vllm.connector import BatonConnector, BatonMetadata, BatonWorkerMetadata
from baton.vllm.first_step import FirstTokens
from baton.vllm.open_cache import OpenCache, _unbound
from baton.vllm.steps import StepNews
from baton.vllm.worker import Results


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(compat, "wait_for_device", lambda config: made.append("wait"))
    return made


def connector(calls: list[str]) -> BatonConnector:
    """The connector's half in the worker, with a worker that records its calls."""
    half = BatonConnector.__new__(BatonConnector)
    half._vllm_config = SimpleNamespace()
    begin, finalise = (lambda step, once: calls.append("begin")), (lambda computed: calls.append("finalise"))
    worker: Any = SimpleNamespace(begin=begin, finalise=finalise)
    half._opened = opened(worker)
    return half


def opened(side: Any, rank: int = 0) -> OpenCache:
    """The cache of one worker, with only its half of the connector."""
    nothing: Any = None
    return OpenCache(side, rank, nothing, nothing, nothing)


def test_the_device_is_waited_for_before_copies_and_only_then(calls: list[str]) -> None:
    half, anything = connector(calls), cast("Any", object())
    for step in (StepNews(), StepNews(receives=[anything]), StepNews(computed=[anything])):
        half.bind_connector_metadata(BatonMetadata(step, idle=False))
        half.wait_for_save()
        calls.append("|")
    assert " ".join(calls) == "begin finalise | wait begin finalise | begin wait finalise |"


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_failed_made_nothing_final(calls: list[str], fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    half = connector(calls)
    half.worker.results = lambda *_: Results()  # type: ignore[method-assign]
    half.worker.take_admitted = set  # type: ignore[method-assign]
    half.worker.take_first_tokens = dict  # type: ignore[method-assign]
    half.worker.counts, half._reported = Counter(), {}
    monkeypatch.setattr(mixin, "get_kv_transfer_group", lambda: half)
    monkeypatch.setattr(mixin, "get_forward_context", lambda: None)
    step: Any = SimpleNamespace(
        kv_connector_metadata=BatonMetadata(StepNews(computed=[cast("Any", object())]), idle=False),
        has_sync_kv_loads=False,
        finished_req_ids=set(),
    )
    with contextlib.suppress(ZeroDivisionError), mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(step):
        assert not 1 / (not fails) - 1
    assert calls == (["begin"] if fails else ["begin", "wait", "finalise"])


def test_a_receive_of_several_workers_ends_with_the_last_and_fails_with_any() -> None:
    """Results are joined as vLLM joins its workers' outputs."""

    def output(rank: int, step: Results, admitted: set[str]) -> Any:
        half = BatonConnector.__new__(BatonConnector)
        half._connector_metadata, worker = None, SimpleNamespace(results=lambda *_: step)
        worker.take_admitted, worker.take_first_tokens = lambda: admitted, lambda: dict.fromkeys(admitted, 7)
        half._opened = opened(worker, rank)
        ends = half.get_transfer_results(set())
        news = KVConnectorOutput(
            finished_sending=ends.finished_sending,
            finished_recving=ends.finished_recving,
            failed_recving=ends.failed_recving,
            kv_connector_worker_meta=half.build_connector_worker_meta(),
        )
        return SimpleNamespace(kv_connector_output=news)

    joined = KVOutputAggregator(expected_finished_count=2)
    steps = [
        (Results(received={"good", "bad"}, failed={"bad"}), Results(sent={"own"})),
        (Results(sent={"own"}), Results(received={"good", "bad"})),
    ]
    found = []
    for first, second in steps:
        outputs = [output(0, first, {"next"}), output(1, second, set())]
        found.append(joined.aggregate(outputs).kv_connector_output)  # type: ignore[arg-type, union-attr]
    assert [(each.finished_sending, each.finished_recving, each.failed_recving) for each in found] == [
        (None, None, set()),
        ({"own"}, {"good", "bad"}, {"bad"}),
    ]
    assert found[0].kv_connector_worker_meta == BatonWorkerMetadata({(0, "next")}, {"next": 7})
    assert found[0].kv_connector_worker_meta.aggregate(BatonWorkerMetadata({(1, "next")}, {})).admitted == {
        (0, "next"),
        (1, "next"),
    }


def test_refusals_are_counted_beside_the_scheduler() -> None:
    half = BatonConnector.__new__(BatonConnector)
    half._opened, half._scheduler, half._reported = None, None, {}
    assert half.get_kv_connector_stats() is None
    refused = Counter(["the ticket was used before", "this engine takes no decode legs"])
    half._scheduler = cast("Any", SimpleNamespace(refused=refused))
    stats = half.get_kv_connector_stats()
    assert stats is not None
    assert stats.data == {"refused": 2}
    assert half.get_kv_connector_stats() is None


def test_workers_tell_ends_once_and_what_each_has_moved() -> None:
    told = []
    for rank in range(2):
        half = BatonConnector.__new__(BatonConnector)
        counts = Counter(committed=3, released=1, bytes=100, runs=5, failed_peer_lost=1, prefill_committed=2)
        half._opened, half._reported = opened(SimpleNamespace(counts=counts), rank), {}
        told.append(half.get_kv_connector_stats())
    first, second = told
    assert first is not None
    assert second is not None
    assert second.data == {"bytes": 100, "runs": 5, "failed_peer_lost": 1}
    assert first.aggregate(second).data == {
        "committed": 3,
        "released": 1,
        "bytes": 200,
        "runs": 10,
        "failed_peer_lost": 2,
        "prefill_committed": 2,
    }


def without_tokens(ranks: int = 1, sleeps: bool = False, preempted: Iterable[str] = ()) -> tuple[BatonConnector, Any]:
    """The connector's half in the scheduler, of `ranks` data-parallel engines, and the output of a step without tokens.
    `sleeps`: vLLM's engine core sleeps after it."""
    half = BatonConnector.__new__(BatonConnector)
    scheduler = SimpleNamespace(on_preempted=lambda ids: None, take_step=StepNews, first_tokens=FirstTokens())
    scheduler.on_received, scheduler.is_parked = lambda request_id, failed: None, lambda: True
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=ranks))
    vars(half).update(_vllm_config=config, _scheduler=scheduler, _skips_drafts=False, _sleeps_when_idle=sleeps)
    step = SimpleNamespace(preempted_req_ids={*preempted}, num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    none = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[])
    step.scheduled_new_reqs, step.scheduled_cached_reqs, step.scheduled_spec_decode_tokens = [], none, {}
    return half, step


@pytest.mark.parametrize(("ranks", "idle"), [(1, True), (2, False)])
def test_a_step_that_other_engines_wait_for_is_not_idle(ranks: int, idle: bool) -> None:
    """Data-parallel ranks of a model with experts: a rank that waited for events would delay all."""
    half, step = without_tokens(ranks)
    assert half.build_connector_meta(step).idle is idle


def engine_core(half: BatonConnector, step: Any, received: set[str] | None, calls: list[str]) -> EngineCore:
    """vLLM's engine core, whose one step delivers the KV of `received`. `calls`: of the executor, afterwards."""

    def update(step: Any, output: Any) -> dict[int, Any]:
        half.update_connector_output(KVConnectorOutput(finished_recving=received))
        return {}

    done = SimpleNamespace(result=lambda: SimpleNamespace())
    found = EngineCore.__new__(EngineCore)
    scheduler = SimpleNamespace(has_requests=lambda: True, schedule=lambda throttled: step, update_from_output=update)
    scheduler.get_grammar_bitmask = lambda step: None
    executor = SimpleNamespace(execute_model=lambda step, non_block: done)
    executor.take_draft_token_ids = lambda: calls.append("takes drafts")
    config = SimpleNamespace(observability_config=SimpleNamespace(enable_logging_iteration_details=False))
    vars(found).update(scheduler=scheduler, model_executor=executor, vllm_config=config, log_stats=False)
    vars(found).update(aborts_queue=queue.Queue(), check_for_draft_tokens=True, async_scheduling=False)
    return found


@pytest.mark.parametrize(
    ("changes", "received", "wakes"),
    [
        ({"sleeps": True}, {"r"}, True),
        ({"sleeps": True}, None, False),
        ({"sleeps": False}, {"r"}, False),
        # The drafts are those of the last step with tokens, which a preempted request does not have any more.
        ({"sleeps": True, "preempted": {"other"}}, {"r"}, False),
        ({"sleeps": True, "ranks": 2}, {"r"}, False),
    ],
)
def test_a_step_that_has_delivered_kv_counts_as_one_with_tokens(
    changes: dict[str, Any], received: set[str] | None, wakes: bool
) -> None:
    """After others vLLM's engine core sleeps."""
    half, step = without_tokens(**changes)
    half.build_connector_meta(step)
    made: list[str] = []
    core = engine_core(half, step, received, made)
    _, executed = core.step()
    core.post_step(executed)
    assert (executed, made) == (wakes, ["takes drafts"] if wakes else [])


@pytest.mark.parametrize(("device", "given"), [("cpu", {0, 1}), ("cuda", {1})])
def test_threads_get_the_cores_that_the_operator_gave(device: str, given: set[int]) -> None:
    """Not the cores to which vLLM has bound its CPU worker, nor all of the host's."""
    cores = {0: {1}, os.getppid(): {0, 1}}
    known = patch.multiple(os, sched_getaffinity=cores.__getitem__, sched_setaffinity=cores.__setitem__)
    with known, _unbound(SimpleNamespace(device_config=SimpleNamespace(device_type=device))):
        assert cores[0] == given
    assert cores[0] == {1}


def test_digests_of_a_gpus_memory_are_refused() -> None:
    regions = [DeviceMemory(4096, 64, 0, enter=lambda: None)]
    key = {"keys": "keys"}
    assert digester_of(PluginConfig(**key), regions, {}) is None
    with pytest.raises(ConfigError, match="integrity"):
        digester_of(PluginConfig(**key, integrity="sampled"), regions, {})
