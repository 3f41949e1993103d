"""The prefill engine of `baton bench handoff`: a process that reads and writes JSON lines on its pipes, and computes
nothing."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import msgspec

from baton.bench.modelled import ModelledEngine, ModelledKV
from baton.children import PYTHON, LineProcess
from baton.errors import EngineUnavailableError
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import Seeds
from baton.handoff.protocol.ticket import verify_ticket

# Time for D to register before the first chunk.
_LEAD_S = 0.005


class PrefillPeer:
    """Raises `EngineUnavailableError` if the process has ended."""

    def __init__(self, kv: ModelledKV, tensor_parallel_size: int, num_pages: int, uri: str, ticket_key: bytes) -> None:
        self._child = LineProcess([*PYTHON, "-c", f"from {__name__} import serve_prefill; serve_prefill()"])
        self._send([msgspec.to_builtins(kv), tensor_parallel_size, num_pages, uri, ticket_key.hex()])
        self.addresses: list[str] = self.receive()

    def prefill(self, ticket: str, num_tokens: int, pages: list[int], chunk: int, rate: float) -> None:
        """Begin a prefill in chunks of `chunk` tokens, at `rate` tokens per second; 0: all is computed already.

        Answered by two lines: at the end of the prefill `[time, bytes copied so far]`, and after the handoff its
        `ModelledEngine.copied`.
        """
        self._send([ticket, num_tokens, pages, chunk, rate])

    def _send(self, what: Any) -> None:
        try:
            self._child.write_line(json.dumps(what))
        except BrokenPipeError:
            raise EngineUnavailableError("the process of the prefill engine has ended") from None

    def receive(self) -> Any:
        line = self._child.read_line()
        if not line:
            raise EngineUnavailableError("the process of the prefill engine has ended")
        return json.loads(line)

    def close(self) -> None:
        self._child.close(20)


def serve_prefill() -> None:
    kv, tensor_parallel_size, num_pages, uri, key = json.loads(sys.stdin.readline())
    modelled, ticket_key = msgspec.convert(kv, ModelledKV), bytes.fromhex(key)
    engine = ModelledEngine("P", modelled, tensor_parallel_size, num_pages, uri, ticket_key)
    try:
        _answer([agent.address for agent in engine.agents])
        for line in sys.stdin:
            _prefill(engine, modelled, ticket_key, *json.loads(line))
    finally:
        engine.close()


def _prefill(
    engine: ModelledEngine,
    kv: ModelledKV,
    key: bytes,
    text: str,
    num_tokens: int,
    pages: list[int],
    chunk: int,
    rate: float,
) -> None:
    ticket = verify_ticket(key, text, "prefill", time.monotonic())
    before, tables = engine.copied(), dict.fromkeys(kv.groups, pages)
    engine.together.open_prefill(ticket)
    engine.together.admit_prefill(ticket.key)
    begin = time.monotonic() + _LEAD_S
    for done in (*range(chunk, num_tokens, chunk), num_tokens) if rate else (num_tokens,):
        if rate:
            time.sleep(max(0.0, begin + done / rate - time.monotonic()))
        engine.together.declare_final(ticket.key, num_tokens, tables, kv.final(num_tokens, done))
    ended = [time.monotonic(), engine.copied()[0] - before[0]]
    final = kv.final(num_tokens, num_tokens, seeded=True)
    engine.together.finish_prefill(ticket.key, Seeds(first_token=1, draft_token_ids=[2, 3]), False, final)
    _answer(ended)
    engine.next(lambda event: isinstance(event, ev.PrefillReleased) and event.outcome == "committed")
    _answer([after - was for was, after in zip(before, engine.copied(), strict=True)])


def _answer(what: Any) -> None:
    print(json.dumps(what), flush=True)
