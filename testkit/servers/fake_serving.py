"""A deterministic engine, a tokenizer directory and a server for apps, for tests above the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import tokenizers
from aiohttp import web
from tokenizers import decoders, models, pre_tokenizers

from baton.engine.request_checks import check_identity
from baton.errors import EngineUnavailableError, OverloadedError, ProtocolError, RequestError
from baton.handoff.protocol import ticket as tickets
from baton.openai.http import serving
from baton.openai.http.serving import bind, url_of
from baton.wire import EngineInfo, EngineLoad, GenerateRequest, TokenChunk, TokenLogprobs

KEY = b"k" * 32
ADMIN_TOKEN = "t" * 32
ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
MAX_MODEL_LEN = 256
K = 3
# Every byte is a token, so a non-ASCII character spans tokens; EOS comes last.
TEXT = "The quick brown fox, l'été dernier, said 你好 to the lazy dog. "
EOS = 257
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
)


def write_tokenizer(directory: Path) -> Path:
    """Write a byte-level tokenizer with `<bos>` 256 and `<eos>` 257, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return directory


def load_of(num_running: int) -> EngineLoad:
    return EngineLoad(
        num_running=num_running,
        num_waiting=0,
        num_handoffs=0,
        kv_usage=0.0,
        num_referenced_pages=0,
        num_quarantined_pages=0,
        num_cached_pages=0,
    )


class FakeMetrics:
    """Rows as the real engine gives them."""

    def collect_rows(self) -> Iterator[tuple[str, str, str, dict[str, str], float]]:
        yield "baton:fake_steps", "counter", "Steps.", {"kind": "all"}, 3.0
        yield "baton:fake_pages", "gauge", "Pages.", {}, 7.0


class FakeEngine:
    """Continues every prompt with TEXT repeatedly, offset by the sample index, with `accept` accepted drafts per step.

    The first token comes alone, as after a prefill. A prefill leg ends after it and hands the rest to the decode leg of
    the same transfer, through `handed`, which both engines of a test share; the decode leg also sends that token. A
    resumed request continues after its known tokens. `parted`: errors of handoffs from a prefill engine, by its
    incarnation. `fail` names a misbehaviour, `fail_after` the number of output
    tokens after which a decode leg shows it. `queued_s`: the queue time that it reports.
    """

    def __init__(
        self,
        directory: Path,
        role: str = "both",
        handed: dict[bytes, asyncio.Future[str]] | None = None,
        length: int | None = None,
        accept: int = 2,
        step_s: float = 0.0,
        queued_s: float | None = None,
        fail: str | None = None,
        fail_after: int = 8,
        fingerprint: str = '{"weights": "a"}',
        model: str = "fake",
    ) -> None:
        self.info = EngineInfo(
            engine_id=f"{role}-engine",
            incarnation="1",
            role=role,  # type: ignore[arg-type]
            model=model,
            model_path=str(directory),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=258,
            eos_token_ids=[EOS],
            control_addresses=[] if role == "both" else ["tcp://127.0.0.1:1"],
            fingerprint=fingerprint,
            num_speculative_tokens=K,
            batch_invariant=True,
            # As on two hosts, one of which has been up for longer.
            clock=1000.0 if role == "prefill" else 9_000_000.0,
        )
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.tokens: list[int] = backend.encode(TEXT).ids
        self.handed = {} if handed is None else handed
        self.queued_s = queued_s
        self.length, self.accept, self.step_s, self.fail, self.fail_after = length, accept, step_s, fail, fail_after
        self.requests: list[GenerateRequest] = []
        self.outcomes: Counter[str] = Counter()
        self.running = 0
        self.ticket_key = KEY
        self.parted: dict[str, str] = {}
        self.when_lost: Callable[[], None] = lambda: None
        self.takes_any = False
        self.pause: asyncio.Event | None = None  # tokens after the first, and a prefill leg's end, wait for it

    def start(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to free."""

    def on_failure(self, call: Callable[[str], None]) -> None:
        """It never fails as a whole."""

    def metrics(self) -> FakeMetrics:
        return FakeMetrics()

    def load(self) -> EngineLoad:
        return load_of(self.running)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Refuse at once, or return the stream."""
        check_identity(request, self.info)
        self.requests.append(request)
        if self.fail == "down":
            raise EngineUnavailableError("the engine is down")
        if self.fail == "full" and request.num_known == 0:
            raise OverloadedError("7 requests wait already")
        if self.fail == "refuse leg":
            raise ProtocolError("the ticket is of another version")
        if self.fail == "refuse":
            raise RequestError("the engine refuses", "seed")
        return self._counted(request)

    async def _counted(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.running += 1
        outcome = "aborted"
        try:
            async for chunk in self._stream(request):
                if chunk.finish_reason is not None:
                    outcome = chunk.finish_reason
                yield chunk
            if outcome == "aborted":
                outcome = "handed over"
        finally:
            self.running -= 1
            self.outcomes[outcome] += 1

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        params, name = request.sampling_params, request.request_id
        first = params.sample_index
        endless = self.tokens * 20
        output = endless[first : first + params.max_tokens]
        reason = "length"
        if self.length is not None and self.length <= params.max_tokens and not params.ignore_eos:
            output, reason = [*output[: self.length - 1], EOS], "stop"
        known = len(request.prompt_token_ids) - (request.num_prompt_tokens or len(request.prompt_token_ids))
        # An engine cannot tell which engine made the tokens with which a request begins.
        taken = request.prompt_token_ids[len(request.prompt_token_ids) - known :] == output[:known]
        assert taken or self.takes_any
        role, start, parted = "both", known, None
        if request.handoff is not None:
            role = request.handoff.role
            signed_for = "prefill" if role == "prefill" else "decode"
            ticket = tickets.verify_ticket(self.ticket_key, request.handoff.ticket, signed_for, self.info.clock)  # type: ignore[arg-type]
            digest = tickets.request_digest(request.prompt_token_ids, params, request.num_prompt_tokens)
            if ticket.request_digest != digest:
                raise ProtocolError("another request's ticket")
            parted = self.parted.get(ticket.prefill_incarnation)
            future = self.handed.setdefault(ticket.transfer_id, asyncio.get_running_loop().create_future())
        if request.max_prefill_tokens is not None and self.fail == "evicted":
            error = "prefix_missing: too much of the prompt is not here"
            yield TokenChunk(request_id=name, finish_reason="error", error=error, recoverable=True)
            return
        if role == "decode":
            if self.fail == "handoff":
                yield TokenChunk(request_id=name, finish_reason="error", error="handoff_timeout: no commit")
                return
            if self.fail == "recoverable":
                self.fail = None
                yield TokenChunk(request_id=name, finish_reason="error", error="lease_expired: P", recoverable=True)
                return
            if parted is not None and parted.startswith("incompatible_peer"):
                yield TokenChunk(request_id=name, finish_reason="error", error=parted)
                return
            if parted is None:
                await future
            yield TokenChunk(request_id=name)  # its first chunk may be empty
        elif self.fail == "nothing left":
            error = "invalid_request: bad_words: no token is left"
            yield TokenChunk(request_id=name, finish_reason="error", error=error)
            return
        elif role == "prefill" and self.fail == "lost":
            raise ConnectionResetError
        elif role == "prefill" and known:
            await asyncio.sleep(self.step_s)
            future.set_result("handed over")
            return
        while start < len(output):
            if start > 0 and self.pause is not None:
                await self.pause.wait()
            count = 1 if start == 0 else self.accept + 1
            tokens, position = output[start : start + count], start
            start += len(tokens)
            ends = start >= len(output)
            hands_over = role == "prefill" and not ends
            yield TokenChunk(
                request_id=name,
                token_ids=[t ^ 1 for t in tokens] if self.fail == "wrong" and role == "decode" else tokens,
                position=position,
                logprobs=None if params.logprobs is None else [_logprobs(t, params.logprobs) for t in tokens],
                accepted=[self.accept] if position else [],
                drafted=[self.accept or 1] if position else [],
                finish_reason=reason if ends else None,  # type: ignore[arg-type]
                num_cached_tokens=1,
                handoff_error=parted if position == 0 else None,
                queued_s=self.queued_s if position == 0 and role != "decode" else None,
            )
            if role == "prefill":
                await asyncio.sleep(self.step_s)
                if self.pause is not None:
                    await self.pause.wait()
                future.set_result("handed over" if hands_over else "finished")
                return
            if start > self.fail_after and self.fail == "mid-stream":
                raise RuntimeError("a bug")
            if start > self.fail_after and self.fail == "thread died":
                raise EngineUnavailableError("the engine failed: RuntimeError")
            if start > self.fail_after and self.fail in ("lost", "dies"):
                self.fail = "down" if self.fail == "dies" else "lost"
                self.when_lost()
                raise ConnectionResetError
            if start > self.fail_after and self.fail == "reports":
                yield TokenChunk(request_id=name, finish_reason="error", error="no_room: full", recoverable=True)
                return
            await asyncio.sleep(self.step_s)


def _logprobs(token: int, num: int) -> TokenLogprobs:
    top = [(token, -0.5), ((token + 1) % 256, -1.5), ((token + 2) % 256, -2.5)]
    return TokenLogprobs(logprob=-0.5, top=top[:num])


@contextlib.asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """Serve an app on a free port as Baton does. Yields its base URL."""
    listener: socket.socket = bind("127.0.0.1", 0)
    async with serving.served(app, listener):
        yield url_of(listener, app)


async def complete(session: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, Any]:
    async with session.post(f"{url}/v1/completions", json={"prompt": "a", **body}) as response:
        return response.status, await response.json()


async def status_of(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(f"{url}/status") as response:
        return await response.json()


async def await_engines(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until the router has heard from each engine. Before that it takes an engine that has answered, although
    another one is the next."""
    unheard = ("not reached yet", "does not answer")
    while any(
        (why := engine["problem"]) and why.endswith(unheard) for engine in (await status_of(session, url))["engines"]
    ):
        await asyncio.sleep(0.002)


async def join(session: aiohttp.ClientSession, router: str, engine: str, role: str) -> None:
    body = {"url": engine, "role": role}
    async with session.post(f"{router}/instances/add", json=body, headers=ADMIN) as response:
        assert response.status == 200, await response.text()


async def until(condition: object) -> None:
    """Wait until a callable is true. Fails after 120 seconds, since other tests may use all cores."""
    assert callable(condition)
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never became true")
