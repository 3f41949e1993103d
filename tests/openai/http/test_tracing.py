"""Clients' traces: how their headers are read, and that legs and log lines contain them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict

from baton.openai.http.tracing import trace_of
from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import FakeEngine, complete, served

ID, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{ID}-{SPAN}-01"


def headers(*pairs: tuple[str, str]) -> CIMultiDict[str]:
    return CIMultiDict(pairs)


def test_a_trace_goes_on_as_it_came() -> None:
    trace = trace_of(headers(("Traceparent", PARENT), ("TraceState", "a=1,b=2"), ("tracestate", "c=3")))
    assert trace is not None
    assert trace.id == ID
    assert trace.headers() == {"traceparent": PARENT, "tracestate": "a=1,b=2,c=3"}
    alone = trace_of(headers(("traceparent", PARENT)))
    assert alone is not None
    assert alone.headers() == {"traceparent": PARENT}
    # A later version may append fields.
    assert trace_of(headers(("traceparent", f"cc-{ID}-{SPAN}-01-more"))) is not None


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "x",
        PARENT + "-more",
        PARENT.upper(),
        f"ff-{ID}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{ID}-{'0' * 16}-01",
        f"00-{ID[1:]}-{SPAN}-01",
        f"cc-{ID}-{SPAN}-01-" + "x" * 300,
        PARENT + "\n",
        PARENT + "\r\nX-Evil: 1",
    ],
)
def test_a_malformed_traceparent_is_ignored(parent: str) -> None:
    assert trace_of(headers(("traceparent", parent), ("tracestate", "a=1"))) is None


def test_two_traces_are_none_and_a_state_that_is_too_long_is_left_out() -> None:
    assert trace_of(headers(("traceparent", PARENT), ("traceparent", PARENT))) is None
    assert trace_of(headers(("tracestate", "a=1"))) is None


@pytest.mark.parametrize("state", ["a=" + "x" * 511, "a=\xe9", "a=\x00"])
def test_a_state_that_no_header_can_have_is_left_out(state: Any) -> None:
    trace = trace_of(headers(("traceparent", PARENT), ("tracestate", state)))
    assert trace is not None
    assert trace.tracestate is None


async def test_log_lines_name_the_trace_of_their_request(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.openai.records")
    engine = FakeEngine(directory, step_s=0.005)
    async with (
        served(build_app(engine, Tokenizer.load(directory))) as url,
        aiohttp.ClientSession() as traced,
        aiohttp.ClientSession() as plain,
    ):
        # Sequential and concurrent connections: no request gets another's trace.
        traced.headers["traceparent"] = PARENT
        for _ in range(2):
            await complete(traced, url, max_tokens=3)
            await complete(plain, url, max_tokens=4)
        await asyncio.gather(*(complete(s, url, max_tokens=n) for s, n in ((traced, 3), (plain, 4)) * 3))
        reused = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=reused) as one:
            for given, max_tokens in (({"traceparent": PARENT}, 3), ({}, 4)):
                body = {"prompt": "a", "max_tokens": max_tokens}
                async with one.post(f"{url}/v1/completions", json=body, headers=given) as response:
                    assert response.status == 200
                    await response.read()
    lines = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert len(lines) == 12
    assert all(line["trace_id"] == (ID if line["output_tokens"] == 3 else None) for line in lines)
    assert f"trace_id={ID}" in caplog.text
    assert "trace_id=None" not in caplog.text
