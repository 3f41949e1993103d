"""Prometheus metrics of an API server, as clients see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.histogram import Histogram

_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0)
_ITL_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.5)

_E2E_BUCKETS_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0)
_TOKENS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_MODEL = "model_name"
_TOKENS, _PROMPT_TOKENS = "Tokens generated.", "Prompt tokens received."
_TTFT = "From the arrival of a request to its first token."
_ITL = "Between tokens of one sequence; tokens of one step share its time evenly."
_VLLM_HISTOGRAMS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("time_to_first_token_seconds", _TTFT, _TTFT_BUCKETS_S),
    ("request_time_per_output_token_seconds", "Mean time of a request's tokens after the first.", _ITL_BUCKETS_S),
    ("e2e_request_latency_seconds", "From the arrival of a request to its end.", _E2E_BUCKETS_S),
    ("request_decode_time_seconds", "From the first token of a request to its last.", _E2E_BUCKETS_S),
    ("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS_BUCKETS),
    ("request_generation_tokens", "Tokens generated for a request.", _TOKENS_BUCKETS),
    ("request_max_num_generation_tokens", "The most tokens of a request's choices.", _TOKENS_BUCKETS),
)

# Name, type ("counter", "gauge" or "histogram"), help, labels, value.
Row = tuple[str, str, str, Mapping[str, str], float | Histogram]


def counter(name: str, text: str, value: float, **labels: str) -> Row:
    return f"baton:{name}", "counter", text, labels, float(value)


def gauge(name: str, text: str, value: float, **labels: str) -> Row:
    return f"baton:{name}", "gauge", text, labels, float(value)


def histogram(name: str, text: str, value: Histogram, **labels: str) -> Row:
    return f"baton:{name}", "histogram", text, labels, value


# Engine metrics that vLLM has under the same names.
_VLLM_NAMES = frozenset(
    {
        "corrupted_requests",
        "iteration_tokens_total",
        "kv_cache_usage_perc",
        "num_preemptions",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens_by_source",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_queue_time_seconds",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_drafts",
    }
)


def with_vllm_names(rows: Iterable[Row], model: str) -> Iterator[Row]:
    """The rows, and those that vLLM has again under its names and labels."""
    for row in rows:
        yield row
        name, kind, text, labels, value = row
        name = name.removeprefix("baton:")
        if name in _VLLM_NAMES:
            yield f"vllm:{name}", kind, text, {"model_name": model, "engine": "0", **labels}, value


class ModelMetrics:
    """Only the event loop's thread writes, so there are no locks. `ended`: by reason."""

    __slots__ = ("ended", "gaps", "histograms", "num_prompt_tokens", "num_tokens")

    def __init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens = 0
        self.ended: Counter[str] = Counter()
        self.gaps = Histogram(_ITL_BUCKETS_S)
        self.histograms = {name: Histogram(buckets) for name, _, buckets in _VLLM_HISTOGRAMS}

    def observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)


class FrontMetrics:
    """Metrics in a separate registry, so that two apps in one process do not mix. `running`: the number of running
    sequences. `requests`: by route and status.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.running = 0
        self.requests: Counter[tuple[str, int]] = Counter()
        self.ttft = Histogram(_TTFT_BUCKETS_S)
        self.num_rounds = 0
        self.num_accepted: Counter[int] = Counter()  # by position
        self._models: dict[str, ModelMetrics] = {}
        self.registry.register(RowCollector(self._rows))

    def of_model(self, model: str) -> ModelMetrics:
        metrics = self._models.get(model)
        if metrics is None:
            metrics = self._models[model] = ModelMetrics()
        return metrics

    @property
    def num_output_tokens(self) -> int:
        return sum(one.num_tokens for one in self._models.values())

    @property
    def num_prompt_tokens(self) -> int:
        return sum(one.num_prompt_tokens for one in self._models.values())

    def _rows(self) -> Iterator[Row]:
        for (endpoint, status), count in self.requests.items():
            text = "Requests by endpoint and HTTP status."
            yield counter("http_requests", text, count, endpoint=endpoint, status=str(status))
        gaps = [one.gaps for one in self._models.values()] or [Histogram(_ITL_BUCKETS_S)]
        yield counter("front_prompt_tokens", _PROMPT_TOKENS, self.num_prompt_tokens)
        yield counter("front_output_tokens", _TOKENS, self.num_output_tokens)
        yield histogram("inter_token_latency_seconds", _ITL, Histogram.sum_of(gaps))
        yield histogram("time_to_first_token_seconds", _TTFT, self.ttft)
        yield counter("front_spec_rounds", "Verification rounds of delivered tokens.", self.num_rounds)
        text = "Rounds in which the draft at this position was accepted."
        for position, number in sorted(self.num_accepted.items()):
            yield counter("front_spec_accepted_per_pos", text, number, position=str(position))
        for model, one in self._models.items():
            labels = {_MODEL: model}
            yield "vllm:prompt_tokens", "counter", _PROMPT_TOKENS, labels, float(one.num_prompt_tokens)
            for reason, count in one.ended.items():
                text, more = "Requests that ended, by reason.", {"finished_reason": reason}
                yield "vllm:request_success", "counter", text, {**labels, **more}, float(count)
            yield "vllm:generation_tokens", "counter", _TOKENS, labels, float(one.num_tokens)
            yield "vllm:inter_token_latency_seconds", "histogram", _ITL, labels, one.gaps
            for name, text, _ in _VLLM_HISTOGRAMS:
                yield f"vllm:{name}", "histogram", text, labels, one.histograms[name]


def exposition_text(families: Iterable[Metric]) -> bytes:
    """Prometheus' text format, without `_created` samples."""

    class Families(CollectorRegistry):
        def collect(self) -> Iterator[Metric]:
            for family in families:
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family

    return generate_latest(Families())


class RowCollector(Collector):
    """Reads metrics kept elsewhere, at each scrape."""

    def __init__(self, rows: Callable[[], Iterable[Row]]) -> None:
        self._rows = rows

    def describe(self) -> Iterator[Metric]:
        """None: names are not known at registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Rows with one name must have the same label names."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily] = {}
        for name, kind, text, labels, value in self._rows():
            if name not in families:
                families[name] = _FAMILIES[kind](name, text, labels=list(labels))
            family, values = families[name], [str(label) for label in labels.values()]
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(value, Histogram)
                family.add_metric(values, value.buckets(), value.total)
            else:
                assert not isinstance(value, Histogram)
                family.add_metric(values, value)
        yield from families.values()


_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
