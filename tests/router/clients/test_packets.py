"""What leaves a socket at once."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from baton.router.clients import engine_client as client
from baton.wire import GenerateRequest
from testkit.servers.fleets import BODY, Cluster


@pytest.mark.asyncio(loop_factories=["asyncio"])  # uvloop calls the kernel itself
async def test_heads_leave_with_what_follows_them_and_the_prefill_leg_first(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[tuple[str, bytes]] = []
    send, leg_body = socket.socket.send, client._leg_body

    def spy_send(self: socket.socket, data: Any, *more: Any) -> int:
        happened.append(("sent", bytes(data)))
        return send(self, data, *more)

    def spy_body(request: GenerateRequest) -> list[bytes]:
        assert request.handoff is not None
        happened.append(("made", request.handoff.role.encode()))
        return leg_body(request)

    monkeypatch.setattr(client, "_leg_body", spy_body)
    async with Cluster(directory, num_prefill=1, num_decode=1).run() as (url, session):
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "send", spy_send, raising=False)
            async with session.post(f"{url}/v1/completions", json={**BODY, "stream": True}) as response:
                assert b"data: " in await response.read()

    def only(what: str, *parts: bytes) -> int:
        (found,) = [i for i, one in enumerate(happened) if one[0] == what and all(part in one[1] for part in parts)]
        return found

    first_leg = only("sent", b"POST /inference", b'"role":"prefill"', b'"prompt_token_ids":[')
    assert only("made", b"prefill") < first_leg < only("made", b"decode")
    assert only("made", b"decode") < only("sent", b"POST /inference", b'"role":"decode"', b'"prompt_token_ids":[')
    heads = [data for what, data in happened if what == "sent" and data.startswith(b"HTTP/1.1 200")]
    legs, answers = ([head for head in heads if kind in head] for kind in (b"x-ndjson", b"event-stream"))
    assert len(legs) == 2
    assert all(b'"token_ids"' in head for head in legs)
    (answer,) = answers
    assert b"data: {" in answer
