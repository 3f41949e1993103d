"""Metrics and the log line of one sequence."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from baton.log_limit import LogLimit
from baton.openai.http.api_errors import ApiError
from baton.openai.http.caller import CALLER, line_of
from baton.openai.http.metrics import FrontMetrics
from baton.openai.http.tracing import TRACE
from baton.openai.output import Times

logger = logging.getLogger(__name__)
refusals = logging.getLogger("baton.openai.http")
refusals.addFilter(LogLimit())
_REPORT_S = 10.0


class SequenceRecord:
    """Records one sequence in `FrontMetrics`. `route`: the backend's reason for its route. Times are in seconds."""

    def __init__(self, metrics: FrontMetrics, request_id: str, model: str, num_prompt_tokens: int) -> None:
        self._metrics, self._id, self._model = metrics, request_id, model
        self._num_prompt, self._num_output = num_prompt_tokens, 0
        self._began = self._first = self._last = time.perf_counter()
        self._over = False
        self._trace, self._caller = TRACE.get(), CALLER.get()
        self.route = "one_engine"
        self.engines: Sequence[str] = ()
        self.num_cached_tokens = 0
        self._of_model = metrics.of_model(model)
        self._of_model.num_prompt_tokens += num_prompt_tokens
        metrics.running += 1

    def on_route(self, route: str, engines: Sequence[str] = ()) -> None:
        self.route, self.engines = route, engines

    def tokens(self, num_tokens: int, accepted: Iterable[int] = ()) -> None:
        """`accepted`: drafts per verification."""
        metrics = self._metrics
        self._of_model.num_tokens += num_tokens
        for count in accepted:
            metrics.num_rounds += 1
            for position in range(count):
                metrics.num_accepted[position] += 1
        if num_tokens == 0:
            return
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        if self._num_output:
            self._of_model.gaps.observe(elapsed / num_tokens, num_tokens)
        else:
            self._first = now
            metrics.ttft.observe(elapsed)
            self._of_model.observe("time_to_first_token_seconds", elapsed)
        self._num_output += num_tokens

    @property
    def times(self) -> Times:
        return Times(self._began, self._first, self._last)

    def end(self, reason: str, error: str | None = None, log: bool = True) -> None:
        if self._over:
            return
        self._over = True
        self._metrics.running -= 1
        self._of_model.ended[reason] += 1
        decode_s = self._last - self._first
        tpot_s = decode_s / (self._num_output - 1) if self._num_output > 1 else None
        histograms = self._of_model.histograms
        histograms["e2e_request_latency_seconds"].observe(time.perf_counter() - self._began)
        histograms["request_prompt_tokens"].observe(self._num_prompt)
        histograms["request_generation_tokens"].observe(self._num_output)
        if self._num_output:
            histograms["request_decode_time_seconds"].observe(decode_s)
        if tpot_s is not None:
            histograms["request_time_per_output_token_seconds"].observe(tpot_s)
        if not log or not logger.isEnabledFor(logging.INFO):
            return
        fields: dict[str, object] = {
            "id": self._id,
            **(self._caller.fields() if self._caller is not None else {}),
            "trace_id": self._trace.id if self._trace is not None else None,
            "model": self._model,
            "prompt_tokens": self._num_prompt,
            "output_tokens": self._num_output,
            "cached_tokens": self.num_cached_tokens,
            "where": self.route,
            "engines": ",".join(self.engines) or None,
            "ttft_ms": round((self._first - self._began) * 1e3, 2) if self._num_output else None,
            "tpot_ms": None if tpot_s is None else round(tpot_s * 1e3, 2),
            "finish": reason,
            "error": error,
        }
        logger.info("%s", line_of(fields), extra={"fields": fields})


def log_refusal(method: str, endpoint: str, error: ApiError) -> None:
    """Limited in rate, so that floods do not fill the disk; `baton:http_requests` counts all."""
    caller = CALLER.get()
    fields: dict[str, object] = {
        "status": error.status,
        "method": method,
        "endpoint": endpoint,
        "param": error.param,
        "code": error.code,
        "reason": error.message,
        **(caller.fields() if caller is not None else {}),
    }
    level = logging.WARNING if error.status >= 500 else logging.INFO
    if method == "GET" and error.status == 503:  # probes repeat this until the server is ready
        level = logging.DEBUG
    refusals.log(level, "refused %s", line_of(fields), extra={"fields": fields})


async def report_throughput(metrics: FrontMetrics, more: Callable[[], str], every_s: float = _REPORT_S) -> None:
    """Log tokens per second, except in idle periods. `more` returns text to append."""

    def counts() -> tuple[int, int]:
        return metrics.num_prompt_tokens, metrics.num_output_tokens

    before = counts()
    while True:
        started = time.perf_counter()
        await asyncio.sleep(every_s)
        now = counts()
        prompt, output = ((b - a) / (time.perf_counter() - started) for a, b in zip(before, now, strict=True))
        before = now
        if prompt or output or metrics.running:
            text = "prompt %.1f tokens/s, output %.1f tokens/s, running %d%s"
            logger.info(text, prompt, output, metrics.running, more())
