"""Real engines that refuse the router's tickets, or each other: every request is answered, and `/status` says why."""

from __future__ import annotations

import json
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from baton.handoff.protocol.frames import PROTOCOL_VERSION
from testkit.processes.running import run, running

TARGET = "models/baton-demo-llama"
# An engine that speaks the next version of the handoff protocol.
NEXT = """
from baton.handoff.protocol import frames
frames.PROTOCOL_VERSION += 1
from baton.cli import main
main()
"""
pytestmark = pytest.mark.usefixtures("forks")


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def flags_of(fault: str, folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Of the prefill engine, the decode engine and the router."""
    one, other = (["--ticket-key-file", str(folder / name)] for name in ("key", "other"))
    if fault == "another ticket key":
        return other, one, one
    if fault == "incompatible_peer":
        return [*one, "--integrity", "full"], [*one, "--integrity", "off"], one
    for name in ("P", "D"):
        assert run("keys", "--output", str(folder / name), "--engines", "P,D").returncode == 0
    (folder / "D" / "ticket.key").write_bytes((folder / "P" / "ticket.key").read_bytes())
    p, d = (["--keys", str(folder / name), "--engine-id", name] for name in ("P", "D"))
    return p, d, ["--ticket-key-file", str(folder / "P" / "ticket.key")]


@pytest.mark.parametrize("fault", ["another ticket key", "incompatible_peer", "unreachable_peer"])
def test_a_pair_that_cannot_hand_over_costs_no_request(fault: str, tmp_path: Path) -> None:
    prefill, decode, router = flags_of(fault, tmp_path)
    serve = ["serve", TARGET, "--kv-cache-memory", "16M", "--role"]
    with ExitStack() as stack:
        p = stack.enter_context(running(tmp_path / "p.log", *serve, "prefill", *prefill)).url
        d = stack.enter_context(running(tmp_path / "d.log", *serve, "decode", *decode)).url
        front = ["router", "--prefill", p, "--decode", d, "--max-local-prefill-length", "0", *router]
        url = stack.enter_context(running(tmp_path / "r.log", *front)).url
        body = {"prompt": "the quick brown fox " * 4, "max_tokens": 6, "temperature": 0}
        answers = [ask(f"{url}/v1/completions", body)["choices"][0]["text"] for _ in range(3)]
        assert len(set(answers)) == 1
        status = ask(f"{url}/status")
        (alarm,) = status["alarms"]
        assert p in alarm
        assert fault in alarm
        assert status["handoffs"]["started"] == status["handoffs"]["failed"] == 1
        assert status["decisions"]["no_prefill_engine"] >= 2


def test_engines_of_two_protocol_versions_hand_over_nothing_and_are_named(tmp_path: Path) -> None:
    one = ["--ticket-key-file", str(tmp_path / "key")]
    serve = ["serve", TARGET, "--kv-cache-memory", "16M", *one, "--role"]
    newer = [sys.executable, "-c", NEXT]
    with ExitStack() as stack:
        p = stack.enter_context(running(tmp_path / "p.log", *serve, "prefill", command=newer)).url
        d = stack.enter_context(running(tmp_path / "d.log", *serve, "decode")).url
        front = ["router", "--prefill", p, "--decode", d, "--max-local-prefill-length", "0", *one]
        url = stack.enter_context(running(tmp_path / "r.log", *front)).url
        versions = f"version {PROTOCOL_VERSION + 1} at P, {PROTOCOL_VERSION} at D"
        body = {"prompt": "the quick brown fox " * 4, "max_tokens": 6, "temperature": 0}
        assert ask(f"{url}/v1/completions", body)["choices"][0]["text"]
        status = ask(f"{url}/status")
        (alarm,) = status["alarms"]
        assert versions in alarm
        # The router has seen it before it began a handoff.
        assert (status["handoffs"]["started"], status["decisions"]["no_prefill_engine"]) == (0, 1)
        doctor = run("doctor", url)
        assert doctor.returncode == 1
        assert "FINDING protocol:" in doctor.stdout
        assert versions in run("status", url).stdout
