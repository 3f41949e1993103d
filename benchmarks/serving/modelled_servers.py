"""A prefill and a decode server without a model, which cost little CPU: vLLM's with NixlConnector, or Baton's engines.

    python -m benchmarks.serving.modelled_servers DIRECTORY [--first-ms 20] [--step-ms 20] [--handoff-ms 0]

Serves both on loopback until its standard input ends, and prints their ports as JSON. A prefill leg ends `--first-ms`
after its request, and its handoff `--handoff-ms` later. Then the decode server says the first token, which prefill
servers of Baton and SGLang hand over; vLLM's decode server computes it in a step. `benchmarks.sglang.first_tokens`
measures how long the handoffs of SGLang's own backends take. All decode legs get a token together, once per step.
`DIRECTORY` has the tokenizer. Requests with SGLang's `bootstrap_room` are taken as its servers take them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from baton.wire import EngineInfo, EngineLoad, Role

# "a" of `testkit.servers.fake_serving.write_tokenizer`.
TOKEN, TEXT, MODEL = 64, "a", "demo"
_MAX_LEN = 1 << 16
_EMPTY = EngineLoad(
    num_running=0,
    num_waiting=0,
    num_handoffs=0,
    kv_usage=0.0,
    num_referenced_pages=0,
    num_quarantined_pages=0,
    num_cached_pages=0,
)


class _Body(msgspec.Struct):
    """Of a request, what decides the answer."""

    max_tokens: int = 16
    stream: bool = False
    prompt: Any = ""
    request_id: str = ""
    bootstrap_room: Any = None
    kv_transfer_params: dict[str, Any] | None = None


class _Leg(msgspec.Struct):
    """The body of `POST /inference/v1/generate`."""

    class Params(msgspec.Struct):
        max_tokens: int

    class Handoff(msgspec.Struct):
        role: str

    request_id: str
    sampling_params: Params
    handoff: Handoff | None = None


def _event(finish: str | None) -> bytes:
    choice = {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    choice["token_ids"] = [TOKEN]
    head = {"id": "cmpl-modelled", "object": "text_completion", "created": 1, "model": MODEL}
    return b"data: " + json.dumps({**head, "choices": [choice], "usage": None}).encode() + b"\n\n"


_NEXT, _LAST, _DONE = _event(None), _event("length"), b"data: [DONE]\n\n"


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_NEXT_CHUNK, _LAST_CHUNK, _END = _chunked(_NEXT), _chunked(_LAST), b"0\r\n\r\n"


def _whole(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _streamed(kind: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


class ModelledServer:
    """One server of a role. Times are in seconds."""

    def __init__(self, role: Role, directory: Path, first_s: float, step_s: float, handoff_s: float = 0.0) -> None:
        self.role, self.first_s, self.handoff_s, self._step_s = role, first_s, handoff_s, step_s
        self._streams: dict[Stream, None] = {}
        self._ticks = False
        self._directory = directory

    def page(self, path: str) -> bytes:
        """The answer to a question about the server."""
        card = {"id": MODEL, "object": "model", "root": str(self._directory), "max_model_len": _MAX_LEN}
        if path == "/v1/models":
            return _whole(json.dumps({"object": "list", "data": [card]}).encode())
        if path == "/metrics":
            return _whole(b"process_start_time_seconds 1.0\nvllm:nixl_num_failed_transfers_total 0.0\n")
        if path == "/inference/v1/info":
            return _whole(msgspec.json.encode(self._info()))
        if path == "/inference/v1/load":
            return _whole(msgspec.json.encode(_EMPTY))
        return _whole(json.dumps({"model_path": str(self._directory), "served_model_name": MODEL}).encode())

    def _info(self) -> EngineInfo:
        return EngineInfo(
            engine_id=f"{self.role}-0",
            incarnation=f"{self.role}-1",
            role=self.role,
            model=MODEL,
            model_path=str(self._directory),
            max_model_len=_MAX_LEN,
            vocab_size=258,
            eos_token_ids=[257],
            control_addresses=["tcp://127.0.0.1:1"],
            fingerprint="{}",
            num_speculative_tokens=0,
            batch_invariant=True,
        )

    def run(self, stream: Stream) -> None:
        """Give a stream a token per step."""
        self._streams[stream] = None
        if not self._ticks:
            self._ticks = True
            asyncio.get_running_loop().call_later(self._step_s, self._tick)

    def _tick(self) -> None:
        for stream in list(self._streams):
            if not stream.step():
                del self._streams[stream]
        self._ticks = bool(self._streams)
        if self._ticks:
            asyncio.get_running_loop().call_later(self._step_s, self._tick)


class Stream:
    """A streamed answer with `left` tokens to come. `render`: the chunk of a token, by how many are left after it.
    `ends`: packets after the last, as uvicorn's.
    """

    def __init__(
        self, transport: asyncio.Transport, left: int, render: Callable[[int], bytes], ends: tuple[bytes, ...]
    ) -> None:
        self._transport, self._left, self._render, self._ends = transport, left, render, ends

    def step(self) -> bool:
        """Send a token. False: it was the last, or nobody reads."""
        if self._transport.is_closing():
            return False
        self._left -= 1
        self._transport.write(self._render(self._left))
        for end in () if self._left else self._ends:
            self._transport.write(end)
        return self._left > 0


class Connection(asyncio.Protocol):
    """HTTP/1.1 with bodies of known length, one request after the other."""

    def __init__(self, server: ModelledServer) -> None:
        self._server = server
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(fields.get("content-length", 0))
        if len(rest) < length:
            return
        self._data = rest[length:]
        method, _, target = lines[0].partition(" ")
        if method == "PRI":  # HTTP/2, tried first
            self._transport.close()
            return
        path = target.partition(" ")[0]
        self._answer(method, path.partition("?")[0], rest[:length])

    def _answer(self, method: str, path: str, body: bytes) -> None:
        if method == "POST" and path == "/v1/completions":
            self._complete(msgspec.json.decode(body, type=_Body))
        elif method == "POST" and path == "/inference/v1/generate":
            self._generate(msgspec.json.decode(body, type=_Leg))
        elif path == "/v1/completions/render":
            self._transport.write(_whole(b'{"error": {"message": "disabled"}}', "403 Forbidden"))
        else:
            self._transport.write(self._server.page(path))

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        if not seconds:
            call()
            return
        asyncio.get_running_loop().call_later(seconds, lambda: None if self._transport.is_closing() else call())

    def _complete(self, body: _Body) -> None:
        params = body.kv_transfer_params or {}
        prefills = bool(params.get("do_remote_decode")) or self._server.role == "prefill"
        if body.stream:
            count = 1 if prefills else body.max_tokens
            stream = Stream(self._transport, count, _sse, (_chunked(_DONE), _END))
            if prefills or body.bootstrap_room is not None:
                first_s = self._server.first_s + (0.0 if prefills else self._server.handoff_s)
                self._later(first_s, lambda: self._begin(stream, "text/event-stream"))
            else:  # the prefill has ended
                self._transport.write(_streamed("text/event-stream"))
                self._later(self._server.handoff_s, lambda: self._server.run(stream))
            return
        answer = json.loads(_LAST.removeprefix(b"data: "))
        answer["kv_transfer_params"] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1]],
            "remote_engine_id": "P",
            "remote_request_id": body.request_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": len(body.prompt),
            "transfer_mode": "pull",
        }
        self._later(self._server.first_s, lambda: self._transport.write(_whole(json.dumps(answer).encode())))

    def _generate(self, leg: _Leg) -> None:
        role = None if leg.handoff is None else leg.handoff.role
        prefills = role == "prefill"
        total = 1 if prefills else leg.sampling_params.max_tokens
        ends = not prefills or leg.sampling_params.max_tokens == 1

        def render(left: int) -> bytes:
            finish = b',"finish_reason":"length"' if not left and ends else b""
            text = b'{"request_id":"%b","token_ids":[%d],"position":%d%b}\n'
            return _chunked(text % (leg.request_id.encode(), TOKEN, total - left - 1, finish))

        stream = Stream(self._transport, total, render, (_END,))
        first_s = self._server.first_s + (self._server.handoff_s if role == "decode" else 0.0)
        self._later(first_s, lambda: self._begin(stream, "application/x-ndjson"))

    def _begin(self, stream: Stream, kind: str) -> None:
        self._transport.write(_streamed(kind))
        if stream.step():
            self._server.run(stream)


def _sse(left: int) -> bytes:
    return _NEXT_CHUNK if left else _LAST_CHUNK


async def serve(directory: Path, first_s: float, step_s: float, handoff_s: float) -> None:
    loop, ports = asyncio.get_running_loop(), []
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        server = ModelledServer(role, directory, first_s, step_s, handoff_s)
        listening = await loop.create_server(lambda server=server: Connection(server), "127.0.0.1", 0)  # type: ignore[misc]
        ports.append(listening.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--first-ms", type=float, default=20.0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--handoff-ms", type=float, default=0.0)
    options = parser.parse_args()
    times_s = (options.first_ms / 1e3, options.step_ms / 1e3, options.handoff_ms / 1e3)
    asyncio.run(serve(options.directory, *times_s))


if __name__ == "__main__":
    main()
