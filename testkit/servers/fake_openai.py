"""A small OpenAI-compatible server on its own thread: it answers like vLLM, and misbehaves as configured."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from baton.openai.http.serving import bind, url_of

Json = dict[str, Any]
TIE = 3  # the output position at which the two best tokens may be close
METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="fake"}} {drafts}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="fake",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="fake",position="1"}} {second}
vllm:num_requests_running{{engine="0",model_name="fake"}} 0.0
"""


def token(prompt: list[int], position: int) -> int:
    return (sum(prompt) * 31 + position * 17) % 1000


@dataclass
class FakeOpenAI:
    """`change(body, index)` edits a correct answer. `raw`: sent unchanged instead of the answer, with `status`. `gap`:
    the distance of the runner-up's logprob at position TIE. Counters grow by `rounds`, `first` and `second` per
    request, from their current values.
    """

    change: Callable[[Json, int], None] | None = None
    raw: bytes | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    gap: float = 1.0
    owned_by: str = "vllm"
    metrics: str | None = METRICS
    metrics_status: int = 200
    rounds: int = 10
    first: int = 6
    second: int = 3
    tokenizes: bool = True
    bos: int | None = None
    template: str = "{role}: {content}\n"
    drafts: int = 100
    accepted: list[int] = field(default_factory=lambda: [70, 20])
    requests: list[Json] = field(default_factory=list)
    authorization: list[str | None] = field(default_factory=list)
    visited: list[str] = field(default_factory=list)

    def answer(self, body: Json) -> Json:
        prompt, num = body["prompt"], body["max_tokens"]
        ids = [token(prompt, position) for position in range(num)]
        gaps = [self.gap if position == TIE else 1.0 for position in range(num)]
        names = [f"token_id:{i}" for i in ids]
        others = [f"token_id:{(i + 1) % 1000}" for i in ids]
        top = [{a: -0.5, b: -0.5 - gap} for a, b, gap in zip(names, others, gaps, strict=True)]
        logprobs = {"tokens": names, "token_logprobs": [-0.5] * num, "top_logprobs": top}
        choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": "length", "logprobs": logprobs}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num, "total_tokens": len(prompt) + num}
        return {"choices": [choice], "usage": usage}

    def chat(self, body: Json) -> Json:
        """A correct answer to a chat: a completion's answer in the format of chats."""
        text = "".join(self.template.format(**message) for message in body["messages"])
        completion = self.answer(body | {"prompt": list(text.encode())})
        (choice,), logprobs = completion["choices"], completion["choices"][0].pop("logprobs")
        scored = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        content = [
            {"token": name, "logprob": value, "top_logprobs": [{"token": t, "logprob": v} for t, v in top.items()]}
            for name, value, top in scored
        ]
        choice |= {"message": {"role": "assistant", "content": ""}, "logprobs": {"content": content}}
        return completion | {"prompt_token_ids": list(text.encode())}

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        index = len(self.requests)
        self.requests.append(body)
        self.authorization.append(request.headers.get("Authorization"))
        self.drafts += self.rounds
        self.accepted = [self.accepted[0] + self.first, self.accepted[1] + self.second]
        await asyncio.sleep(self.delay_s)
        if self.raw is not None:
            return web.Response(body=self.raw, status=self.status, headers=self.headers)
        answer = self.chat(body) if "messages" in body else self.answer(body)
        if self.change is not None:
            self.change(answer, index)
        return web.json_response(answer)

    async def other(self, request: web.Request) -> web.StreamResponse:
        self.visited.append(request.path)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "fake", "owned_by": self.owned_by}]})
        if request.path == "/tokenize" and self.tokenizes:
            body = await request.json()
            bos = [self.bos] if self.bos is not None and body["add_special_tokens"] else []
            return web.json_response({"tokens": bos + list(body["prompt"].encode())})
        if request.path == "/metrics" and self.metrics is not None:
            text = self.metrics.format(drafts=self.drafts, first=self.accepted[0], second=self.accepted[1])
            return web.Response(text=text, status=self.metrics_status)
        return web.json_response({"error": {"message": "Not Found"}}, status=404)


@contextlib.contextmanager
def running(fake: FakeOpenAI) -> Iterator[str]:
    """Serve it. Yields its base URL."""
    loop = asyncio.new_event_loop()
    listener = bind("127.0.0.1", 0)
    app = web.Application()
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, fake.complete)
    app.router.add_route("*", "/{path:.*}", fake.other)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.SockSite(runner, listener).start()

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield url_of(listener)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def zipped(value: Json) -> bytes:
    return gzip.compress(json.dumps(value).encode())
