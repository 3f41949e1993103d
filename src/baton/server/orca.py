"""ORCA: an engine's load in a header of its answers, as vLLM reports it.

Gateways that route by load ask for it in each request, and need no scrape.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable

from aiohttp import web

from baton.errors import EngineUnavailableError
from baton.wire import EngineLoad

ASKED, HEADER = "endpoint-load-metrics-format", "endpoint-load-metrics"


def load_report(load: EngineLoad, form: str) -> str | None:
    """The header's value. `form`: TEXT or JSON, in any case; None for others."""
    metrics = {"kv_cache_usage_perc": load.kv_usage, "num_requests_waiting": float(load.num_waiting)}
    match form.lower():
        case "text":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
        case "json":
            return "JSON " + json.dumps({"named_metrics": metrics})
    return None


def reports_load(load: Callable[[], EngineLoad]) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """For `on_response_prepare`: adds the header to successful answers, streams included, of requests that ask
    for it.
    """

    async def report(request: web.Request, response: web.StreamResponse) -> None:
        form = request.headers.get(ASKED)
        if not form or response.status != 200:
            return
        with contextlib.suppress(EngineUnavailableError):
            value = load_report(load(), form)
            if value is not None:
                response.headers[HEADER] = value

    return report
