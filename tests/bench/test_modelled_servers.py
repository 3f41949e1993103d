"""The modelled servers of `python -m benchmarks.serving.router_speed`: when each says its first token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from baton.wire import Role
from benchmarks.serving.modelled_servers import Connection, ModelledServer

BODY = {"prompt": "a", "max_tokens": 2, "stream": True}
SAMPLING = {"request_id": "1", "sampling_params": {"max_tokens": 2}}
# Of each kind of server: the path, and the bodies of both legs.
KINDS: dict[str, tuple[str, dict[Role, dict[str, Any]]]] = {
    "vllm": (
        "/v1/completions",
        {
            "prefill": {**BODY, "kv_transfer_params": {"do_remote_decode": True}},
            "decode": {**BODY, "kv_transfer_params": {"do_remote_prefill": True}},
        },
    ),
    "sglang": ("/v1/completions", {"prefill": {**BODY, "bootstrap_room": 1}, "decode": {**BODY, "bootstrap_room": 1}}),
    "baton": (
        "/inference/v1/generate",
        {
            "prefill": {**SAMPLING, "handoff": {"role": "prefill"}},
            "decode": {**SAMPLING, "handoff": {"role": "decode"}},
        },
    ),
}


class Client(asyncio.Transport):
    """Notes in `said` which role says a token."""

    def __init__(self, role: Role, said: list[Role], enough: asyncio.Event) -> None:
        super().__init__()
        self._role, self._said, self._enough = role, said, enough

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if b"token_ids" in bytes(data):
            self._said.append(self._role)
            if set(self._said) == {"prefill", "decode"}:
                self._enough.set()

    def is_closing(self) -> bool:
        return self._enough.is_set()


@pytest.mark.parametrize(("handoff_s", "first"), [(0.0, "decode"), (0.2, "prefill")])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_decode_server_waits_for_the_handoff(kind: str, handoff_s: float, first: Role, tmp_path: Path) -> None:
    """Without one, the leg that is sent first gets the first token."""
    said: list[Role] = []
    enough = asyncio.Event()
    path, bodies = KINDS[kind]
    roles: tuple[Role, ...] = ("decode", "prefill")
    for role in roles:
        connection = Connection(ModelledServer(role, tmp_path, 0.01, 0.001, handoff_s))
        connection.connection_made(Client(role, said, enough))
        body = json.dumps(bodies[role]).encode()
        head = f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.data_received(head.encode() + body)
    await asyncio.wait_for(enough.wait(), 60)
    assert said[0] == first
