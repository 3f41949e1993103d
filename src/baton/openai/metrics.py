"""Prometheus metrics of a front door: requests, tokens, and the times a client sees. Times are in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0)
_ITL_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.5)

Row = tuple[str, str, str, Mapping[str, str], float]  # type is "counter" or "gauge"


def counter(name: str, text: str, value: float, **labels: str) -> Row:
    """A row of `RowCollector`: a counter of Baton's own."""
    return f"baton:{name}", "counter", text, labels, float(value)


def gauge(name: str, text: str, value: float, **labels: str) -> Row:
    """A row of `RowCollector`: a gauge of Baton's own."""
    return f"baton:{name}", "gauge", text, labels, float(value)


class FrontMetrics:
    """Counters and histograms in a registry of their own, so that two apps in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # An endpoint is a route, never a client's path.
        self.requests = self._counter(
            "baton:http_requests", "Requests by endpoint and HTTP status.", "endpoint", "status"
        )
        self.prompt_tokens = self._counter("baton:front_prompt_tokens", "Prompt tokens received.")
        self.output_tokens = self._counter("baton:front_output_tokens", "Tokens generated.")
        self.ttft = self._histogram(
            "baton:time_to_first_token_seconds", "From the arrival of a request to its first token.", _TTFT_BUCKETS_S
        )
        self.itl = self._histogram(
            "baton:inter_token_latency_seconds",
            "Between tokens of one sequence; tokens of one step share its time evenly.",
            _ITL_BUCKETS_S,
        )
        self.rounds = self._counter("baton:front_spec_rounds", "Verification rounds of delivered tokens.")
        self.accepted = self._counter(
            "baton:front_spec_accepted_per_pos", "Rounds in which the draft at this position was accepted.", "position"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets_s: Sequence[float]) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=buckets_s)


class SequenceTimer:
    """Times one sequence's tokens for `FrontMetrics`, from its arrival on."""

    def __init__(self, metrics: FrontMetrics, num_prompt_tokens: int) -> None:
        metrics.prompt_tokens.inc(num_prompt_tokens)
        self._metrics = metrics
        self._last = time.perf_counter()
        self._any = False

    def tokens(self, num_tokens: int, accepted: Iterable[int] = ()) -> None:
        """Record that `num_tokens` tokens came now, and of each verification round how many drafts it accepted."""
        metrics = self._metrics
        metrics.output_tokens.inc(num_tokens)
        for count in accepted:
            metrics.rounds.inc()
            for position in range(count):
                metrics.accepted.labels(str(position)).inc()
        if num_tokens == 0:
            return
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        if self._any:
            for _ in range(num_tokens):
                metrics.itl.observe(elapsed / num_tokens)
        else:
            self._any = True
            metrics.ttft.observe(elapsed)


class RowCollector(Collector):
    """Exports counters that are kept elsewhere: each scrape reads `(name, type, help, labels, value)` rows."""

    def __init__(self, rows: Callable[[], Iterable[Row]]) -> None:
        self._rows = rows

    def describe(self) -> Iterator[Metric]:
        """Return nothing: names are known only when rows are read, not at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield one family per name; rows of one name must have the same label names."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, kind, text, labels, value in self._rows():
            if name not in families:
                family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                families[name] = family(name, text, labels=list(labels))
            families[name].add_metric([str(label) for label in labels.values()], value)
        yield from families.values()
