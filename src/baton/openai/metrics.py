"""Prometheus metrics of a front door: requests, tokens, and the times a client sees. Times are in seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0)
_ITL_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.5)

Row = tuple[str, str, str, Mapping[str, str], float]  # type is "counter" or "gauge"


class FrontMetrics:
    """Counters and histograms in a registry of their own, so that two apps in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "baton:http_requests",
            "Requests by endpoint and HTTP status.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self._prompt_tokens = Counter("baton:front_prompt_tokens", "Prompt tokens received.", registry=self.registry)
        self._output_tokens = Counter("baton:front_output_tokens", "Tokens generated.", registry=self.registry)
        self._ttft = Histogram(
            "baton:time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            registry=self.registry,
            buckets=_TTFT_BUCKETS_S,
        )
        self._itl = Histogram(
            "baton:inter_token_latency_seconds",
            "Between tokens of one sequence; tokens of one step share its time evenly.",
            registry=self.registry,
            buckets=_ITL_BUCKETS_S,
        )
        self._rounds = Counter(
            "baton:front_spec_rounds", "Verification rounds of delivered tokens.", registry=self.registry
        )
        self._accepted = Counter(
            "baton:front_spec_accepted_per_pos",
            "Rounds in which the draft at this position was accepted.",
            ["position"],
            registry=self.registry,
        )

    def request_ended(self, endpoint: str, status: int) -> None:
        """Count one request of `endpoint` (a route, never a client's path)."""
        self._requests.labels(endpoint, str(status)).inc()

    def sequence(self, num_prompt_tokens: int) -> SequenceTimer:
        """Start the clock of one sequence."""
        self._prompt_tokens.inc(num_prompt_tokens)
        return SequenceTimer(self)

    def observe_first(self, elapsed_s: float) -> None:
        """Record one time to first token."""
        self._ttft.observe(elapsed_s)

    def observe_next(self, elapsed_s: float, num_tokens: int) -> None:
        """Record `num_tokens` that came together, `elapsed_s` after those before."""
        for _ in range(num_tokens):
            self._itl.observe(elapsed_s / num_tokens)

    def count_tokens(self, num_tokens: int, accepted: Iterable[int]) -> None:
        """Count generated tokens, and accepted drafts per position of each verification round."""
        self._output_tokens.inc(num_tokens)
        for count in accepted:
            self._rounds.inc()
            for position in range(count):
                self._accepted.labels(str(position)).inc()


class SequenceTimer:
    """Times one sequence's tokens for `FrontMetrics`."""

    def __init__(self, metrics: FrontMetrics) -> None:
        self._metrics = metrics
        self._last = time.perf_counter()
        self._any = False

    def tokens(self, num_tokens: int, accepted: Iterable[int] = ()) -> None:
        """Record that `num_tokens` tokens came now."""
        self._metrics.count_tokens(num_tokens, accepted)
        if num_tokens == 0:
            return
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        if self._any:
            self._metrics.observe_next(elapsed, num_tokens)
        else:
            self._any = True
            self._metrics.observe_first(elapsed)


class RowCollector(Collector):
    """Shows plain counters kept elsewhere: each scrape reads `(name, type, help, labels, value)` rows."""

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
