"""Fake vLLM servers, alone or in pairs, with a connector that only signals when the decode leg may start."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
from aiohttp import web

from baton.event_loop import timeout
from baton.handoff.protocol import ticket as tickets
from baton.sampling_params import SamplingParams
from baton.wire import LegRole, VllmIdentity
from testkit.servers.fake_serving import KEY, served

# vLLM's `SamplingParams`.
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}

Kind = Literal["baton", "pull", "push", "alone"]
EOS = 257


def token_at(position: int) -> int:
    """The token of every server at a position of its text, prompt included."""
    return 97 + position % 26


def event(tokens: Sequence[int], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "token_ids": list(tokens), "finish_reason": finish, **more}]}


@dataclass
class Shared:
    """State shared by two servers: finished prefill legs, by ticket or by request id, and those given up."""

    finished: dict[str, asyncio.Event] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)

    def of(self, name: str) -> asyncio.Event:
        return self.finished.setdefault(name, asyncio.Event())


@dataclass
class FakeVllm:
    """`says` replaces tokens by position of the text. `gap`: how far the token that it would have chosen otherwise is
    behind, in nats. `kind` "alone": the decode leg does not wait, as if its server recomputed.

    `fail`: "refuse" 400, "broken" 500, "cut" the connection during the stream, "stream" an error as an event, "reject"
    a refusal as an event, "dies" an error as an event, and from then on it answers with errors, "error" or "abort" as a
    finish reason; for all legs, or only for legs of `fail_role`, in a stream after `fail_after` tokens. `halted`: legs
    of this role get no answer, or ("all") nothing does. `raw`: bodies of answers, by path. `comments`: it sends
    comments while there is nothing else to send. `asked`: received bodies. `left`: roles whose client left.
    `num_short`: tokens missing from a NIXL prefill. `has_ranks`: it is several data-parallel engines; `ranks`: the
    requested ones. `started`: the process start time in
    its metrics. `traces`: role, `traceparent` and `tracestate` of requests. `defaults`: its sampling defaults, and
    `limit`, the most tokens of any request; None: it does not tell them, like vLLM without --enable-scale-out.
    `outcome`: in its metrics, how its connector ended each decode leg. `block_size`: of its metrics. `metrics`: of the
    last event of a stream, which waits for `released`. `adapter`: how its connector describes the adapter `lora`.
    `lacks_prefixes`: its prefix cache has nothing of what is to be handed back. `loses_prefixes`: what is handed back
    does not arrive.
    """

    root: Path
    name: str = "P"
    kind: Kind = "baton"
    shared: Shared = field(default_factory=Shared)
    says: dict[int, int] = field(default_factory=dict)
    gap: float = 0.01
    fail: str | None = None
    fail_role: str | None = None
    fail_after: int = 0
    truncate: bool = False
    multiple: int = 1
    num_drafts: int = 0
    max_model_len: int = 512
    num_short: int = 0
    eos_at: int | None = None
    healthy: bool = True
    fingerprint: str = "{}"
    started: float | None = None
    step_s: float = 0.0
    pause: asyncio.Event | None = None
    halted: str | None = None
    raw: dict[str, bytes] = field(default_factory=dict)
    comments: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    has_ranks: bool = False
    ranks: list[str | None] = field(default_factory=list)
    traces: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    defaults: dict[str, Any] | None = field(default_factory=dict)
    tile: int = 0
    outcome: str | None = None
    block_size: int | None = None
    metrics: Any = None
    released: asyncio.Event | None = None
    adapter: str = ""
    lacks_prefixes: bool = False
    loses_prefixes: bool = False
    identity: Callable[[], dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.identity = self.own_identity

    def app(self) -> web.Application:
        @web.middleware
        async def first(request: web.Request, handler: Any) -> web.StreamResponse:
            while self.halted == "all":
                await asyncio.sleep(0.01)
            if request.path in self.raw:
                return web.Response(body=self.raw[request.path])
            answer: web.StreamResponse = await handler(request)
            return answer

        app = web.Application(middlewares=[first], client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/completions/render", self._render)
        return app

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        async with served(self.app()) as url:
            yield url

    def legs(self, role: str) -> list[dict[str, Any]]:
        """Requests whose `kv_transfer_params` have this `role`; "none": requests without a handoff."""
        return [body for body in self.asked if self._role(body) == role]

    def own_identity(self) -> dict[str, Any]:
        facts = {**json.loads(self.fingerprint), "output.sampling_defaults": repr(self.defaults)}
        return {
            "engine_id": self.name,
            "incarnation": f"{self.name}-1",
            "control_addresses": ["tcp://127.0.0.1:1"],
            "fingerprint": json.dumps(facts),
            "truncate_prefill": self.truncate,
            "prefill_multiple": self.multiple,
            "tile": self.tile,
            "roles": ["prefill", "decode"],
            "vocab_size": 258,
            "eos_token_ids": [EOS],
            "num_speculative_tokens": self.num_drafts,
            "sampling_defaults": dict(self.defaults or {}),
            "moves_prefixes": True,
            # As on two hosts, one of which has been up for longer.
            "clock": float(1000 * ord(self.name[0])),
        }

    def _role(self, body: dict[str, Any]) -> str:
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            return "prefill"
        if params.get("do_remote_prefill"):
            return "decode"
        return str(params.get("baton", {}).get("role", "none"))

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        parent = "demo" if self.adapter else None
        adapter = {"id": "lora", "root": "elsewhere", "parent": parent, "max_model_len": None}
        return web.json_response(
            {"data": [{"id": "demo", "root": str(self.root), "max_model_len": self.max_model_len}, adapter]}
        )

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        lines = ['vllm:num_requests_waiting{engine="0"} 5.0', 'vllm:num_requests_waiting{engine="1"} 7.0']
        lines += ["# HELP x", 'vllm:num_requests_running{model_name="a b"} 3.0', "vllm:kv_cache_usage_perc{} 0.5"]
        if self.kind in ("pull", "push"):
            lines.append('vllm:nixl_num_failed_transfers_total{engine="0"} 0.0')
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} 0.0' for i in range(self.num_drafts)
        ]
        lines += [f"process_start_time_seconds {self.started}"] if self.started is not None else []
        if self.outcome is not None:
            lines.append(f'vllm:baton_handoffs_total{{outcome="{self.outcome}"}} {len(self.legs("decode"))}')
        if self.block_size is not None:
            lines.append(f'vllm:cache_config_info{{block_size="{self.block_size}"}} 1.0')
        response = web.StreamResponse()
        await response.prepare(request)
        for line in lines:  # long ones come in pieces
            await response.write(line.encode() + b"\n")
            await asyncio.sleep(0.001)
        return response

    async def _render(self, request: web.Request) -> web.Response:
        """The request as the engine would get it, without what has its neutral value."""
        if self.defaults is None:
            return web.json_response({"error": {"message": "disabled"}}, status=403)
        body, defaults = await request.json(), dict(self.defaults)
        limit = defaults.pop("limit", self.max_model_len)
        given = {**defaults, **{name: value for name, value in body.items() if value is not None}}
        params = {name: given[name] for name, neutral in NEUTRAL.items() if given.get(name, neutral) != neutral}
        if given.get("temperature") == 0:
            params = {name: value for name, value in params.items() if name not in ("top_p", "top_k", "min_p")}
        room = self.max_model_len - len(body["prompt"])
        params["max_tokens"] = min(room, limit, given.get("max_tokens", room))
        return web.json_response([{"request_id": "x", "token_ids": body["prompt"], "sampling_params": params}])

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.ranks.append(request.headers.get("X-data-parallel-rank"))
        role = self._role(body)
        self.traces.append((role, request.headers.get("traceparent"), request.headers.get("tracestate")))
        try:
            while self.halted == role:
                await asyncio.sleep(0.01)
            return await self._complete(request, body, role)
        except asyncio.CancelledError:
            self.left.append(role)
            raise

    async def _complete(self, request: web.Request, body: dict[str, Any], role: str) -> web.StreamResponse:
        failing = self.fail is not None and role == (self.fail_role or role) and role not in ("identify", "cancel")
        if failing and self.fail in ("refuse", "broken"):
            status = 400 if self.fail == "refuse" else 500
            return web.json_response({"error": {"message": "no such thing"}}, status=status)
        if role in ("identify", "cancel"):
            identity = self.identity() | {"adapter": self.adapter if body["model"] == "lora" else ""}
            if self.has_ranks:
                rank = int(request.headers.get("X-data-parallel-rank", "0"))
                identity |= {"engine_id": f"{self.name}_dp{rank}", "data_parallel_rank": rank}
            return web.json_response(event([97], "length") | {"kv_transfer_params": {"baton": identity}})
        if role == "decode":
            await self._handed(body)
        leg = (body.get("kv_transfer_params") or {}).get("baton", {})
        if role == "prefill" and leg.get("prefix") and self.lacks_prefixes:
            self.shared.given_up.add(leg["ticket"])
            self.shared.of(leg["ticket"]).set()
            await asyncio.Event().wait()  # until the client leaves
        tokens, finish = self._output(body)
        logprobs = [self._logprobs(token, body) for token in tokens]
        if not body.get("stream"):
            await asyncio.sleep(self.step_s)
            if failing and self.fail == "cut":
                assert request.transport is not None
                request.transport.abort()
            if failing:
                finish = "abort" if self.fail == "abort" else "error"
            answer = event(tokens, finish, logprobs=_joined(logprobs) if body.get("logprobs") is not None else None)
            answer["metrics"] = self.metrics
            if role == "prefill":
                answer["kv_transfer_params"] = self._finish(body)
            elif leg.get("prefix"):
                lost = self.loses_prefixes or leg["ticket"] in self.shared.given_up
                got = 0 if lost else leg.get("num_tokens") or len(body["prompt"]) - 1
                answer["kv_transfer_params"] = {"baton": {"num_tokens": got}}
            return web.json_response(answer)
        response = web.StreamResponse()
        await response.prepare(request)
        for index, token in enumerate(tokens):
            if index and self.pause is not None:
                await self.pause.wait()
            await asyncio.sleep(self.step_s)
            fails = failing and index >= self.fail_after
            if fails and self.fail == "cut":
                assert request.transport is not None
                request.transport.abort()
                return response
            if self.comments:
                await response.write(b": keep-alive\n\n")
            last = finish if index == len(tokens) - 1 else None
            item = event([token], "error" if fails and self.fail == "error" else last)
            if index == 0:
                item["choices"][0]["prompt_token_ids"] = body["prompt"]
            if fails and self.fail == "abort":
                item = event([], "abort")
            if body.get("logprobs") is not None and item["choices"][0]["token_ids"]:
                item["choices"][0]["logprobs"] = _joined(logprobs[index : index + 1])
            if fails and self.fail in ("stream", "dies"):
                item = {"error": {"message": "no memory"}}
            if fails and self.fail == "reject":
                item = {"error": {"message": "not supported", "code": 400, "param": "min_p"}}
            await response.write(b"data: " + json.dumps(item).encode() + b"\n\n")
            if fails:
                if self.fail == "dies":
                    self.fail, self.healthy = "broken", False
                break
        if self.released is not None:
            await self.released.wait()
        if body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
            last = {"choices": [], "usage": usage, "metrics": self.metrics}
            await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        if role == "prefill":
            self._finish(body)
        return response

    def _output(self, body: dict[str, Any]) -> tuple[list[int], str]:
        start = len(body["prompt"])
        tokens: list[int] = []
        for position in range(start, start + body["max_tokens"]):
            if position == self.eos_at and not body["ignore_eos"]:
                return [*tokens, EOS], "stop"
            tokens.append(self.says.get(position, token_at(position)))
        return tokens, "length"

    def _logprobs(self, token: int, body: dict[str, Any]) -> dict[str, Any]:
        position = len(body["prompt"])
        other = token_at(position) if token != token_at(position) else token + 1
        return {"logprob": -0.5, "top": {f"token_id:{token}": -0.5, f"token_id:{other}": -0.5 - self.gap}}

    def _finish(self, body: dict[str, Any]) -> dict[str, Any]:
        """A prefill leg has finished: the decode leg may continue."""
        params, name = body["kv_transfer_params"], f"cmpl-{body.get('request_id', 'probe')}-0"
        if "baton" in params:
            leg = params["baton"]
            whole = self.truncate or leg.get("seed_first_token", False)
            self._check("prefill", body, body["prompt"] if whole else body["prompt"][:-1])
            self.shared.of(leg["ticket"]).set()
            return {}
        self.shared.of(name).set()
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": self.name,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(body["prompt"]) - self.num_short,
            "transfer_mode": self.kind,
        }

    async def _handed(self, body: dict[str, Any]) -> None:
        """Wait for the prefill leg, as a decode server does before its first token."""
        params = body["kv_transfer_params"]
        if "baton" in params:
            identity, prompt = msgspec.convert(self.identity(), VllmIdentity), body["prompt"]
            num_tokens = params["baton"].get("num_tokens") or identity.handed_over(len(prompt))
            self._check("decode", body, prompt[:num_tokens])
            name = params["baton"]["ticket"]
        else:
            needed = {"remote_engine_id", "remote_host", "remote_port", "remote_request_id", "tp_size"}
            assert needed <= params.keys()
            assert self.kind != "pull" or params["remote_block_ids"]
            name = params["remote_request_id"]
        if self.kind == "alone":
            return
        async with timeout(5.0):
            await self.shared.of(name).wait()

    def _check(self, role: LegRole, body: dict[str, Any], handed_over: Sequence[int]) -> None:
        ticket = body["kv_transfer_params"]["baton"]["ticket"]
        signed = tickets.verify_ticket(KEY, ticket, role, float(1000 * ord(self.name[0])))
        digest = tickets.request_digest(handed_over, SamplingParams())
        if body["model"] == "lora":
            digest = tickets.adapter_digest(digest, self.adapter)
        assert signed.request_digest == digest


def _joined(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"token_logprobs": [e["logprob"] for e in each], "top_logprobs": [e["top"] for e in each]}
