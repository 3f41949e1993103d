"""A deployment as `baton up` starts it: every control socket has keys, and a stranger is counted."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import zmq

from baton.deployment import Deployment
from testkit.checkpoints.common import make_checkpoint
from testkit.waiting import eventually


def ask(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read()
    return text.decode() if url.endswith("/metrics") else json.loads(text)


def refused(url: str) -> dict[str, float]:
    """`baton:handoff_refused` of an engine, by kind."""
    lines = [line for line in ask(f"{url}/metrics").splitlines() if line.startswith("baton:handoff_refused_total{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_engines_of_a_deployment_have_keys(tmp_path: Path) -> None:
    model = str(make_checkpoint(tmp_path / "tiny", "llama"))
    with Deployment(model, engine_flags=["--kv-cache-memory", str(4 << 20)]) as deployment:
        prefill, decode = deployment.engine_urls
        address = ask(f"{prefill}/inference/v1/info")["control_addresses"][0]
        assert address.startswith("curve://prefill-0@127.0.0.1:")
        answer = ask(f"{deployment.url}/v1/completions", {"prompt": "hello", "max_tokens": 8, "temperature": 0})
        assert answer["usage"]["completion_tokens"] >= 1
        assert ask(f"{deployment.url}/status")["handoffs"]["completed"] == 1
        for url in (prefill, decode):
            assert refused(url) == dict.fromkeys(("connection", "malformed", "message", "session", "ticket"), 0.0)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(address.replace("curve://prefill-0@", "tcp://"))
            stranger.send(b"hello")
            eventually(lambda: refused(prefill)["connection"])
        assert "handoffs" in ask(f"{deployment.url}/status")
