"""Handoffs in vLLM's statistics and Prometheus metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Summed over workers.
TOTALS = {"bytes": "Bytes of committed handoffs.", "runs": "Runs of committed handoffs."}


class BatonStats(KVConnectorStats):
    """Counts since the last report, by name: handoffs by outcome, `bytes`, `runs`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> BatonStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"baton {name}": count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class BatonPromMetrics(KVConnectorPromMetrics):
    """`vllm:baton_handoffs{outcome}`, `vllm:baton_handoff_bytes`, `vllm:baton_handoff_runs`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._handoffs = counter(
            name="vllm:baton_handoffs",
            documentation="Handoffs by outcome: committed, released, failed_REASON; on the other side prefill_OUTCOME; "
            "on both, legs that were refused.",
            labelnames=[*labelnames, "outcome"],
        )
        self._totals = {
            name: counter(name=f"vllm:baton_handoff_{name}", documentation=text, labelnames=labelnames)
            for name, text in TOTALS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if name in self._totals:
                self._totals[name].labels(*labels).inc(count)
            else:
                self._handoffs.labels(*labels, name).inc(count)
