"""Engines in this process, stepped by hand: one engine with both roles, or a prefill and a decode engine."""

from __future__ import annotations

import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from torch import Tensor

from baton.engine.build import Engine, build_engine
from baton.engine.config import EngineConfig, KVTransferConfig, SpeculativeConfig
from baton.engine.executor import LocalExecutor
from baton.engine.request_checks import make_request
from baton.engine.step_plans import DraftPlan, DraftResult
from baton.handoff.protocol.ticket import Ticket, load_or_create_key, prefix_digest, request_digest, sign_ticket
from baton.sampling_params import SamplingParams
from baton.wire import FinishReason, GenerateRequest, HandoffParams, LegRole, TokenChunk, TokenLogprobs

if TYPE_CHECKING:
    import pytest

TARGET = "models/baton-demo-llama"
EAGLE3 = {"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3}
Mode = Literal["push", "pull"]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids below 256; shorter ones are no prefixes of longer ones."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


@dataclass(slots=True)
class Stream:
    """The output of one engine for one request. Each entry of `chunks` has the tokens of one verification round."""

    chunks: list[TokenChunk] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    recoverable: bool = False
    num_cached: int = 0
    window_start: int = 0
    ended: bool = False

    def push(self, chunk: TokenChunk, last: bool) -> None:
        if chunk.token_ids:
            assert chunk.position is not None
            self.chunks.append(chunk)
            self.positions += range(chunk.position, chunk.position + len(chunk.token_ids))
        self.token_ids += chunk.token_ids
        self.num_cached = chunk.num_cached_tokens or self.num_cached
        self.window_start = chunk.window_start or self.window_start
        self.logprobs += chunk.logprobs or []
        self.accepted += chunk.accepted
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.stop_reason = chunk.stop_reason or self.stop_reason
        self.error, self.recoverable = chunk.error or self.error, chunk.recoverable or self.recoverable
        self.ended = self.ended or last

    @property
    def result(self) -> tuple[list[int], FinishReason | None, int | None, list[TokenLogprobs]]:
        return self.token_ids, self.finish_reason, self.stop_reason, self.logprobs


class Stepped:
    def __init__(self, **settings: Any) -> None:
        self.streams: dict[str, Stream] = defaultdict(Stream)
        head = SpeculativeConfig.parse(json.dumps(EAGLE3))
        defaults: dict[str, Any] = {"model": TARGET, "speculative_config": head, "batch_invariant": True}
        defaults["max_decode_gap_s"] = 0.0  # or chunks would depend on time
        defaults["kv_cache_memory"] = 32 << 20  # all of it is written at the start
        config = EngineConfig(**{**defaults, **settings})
        self.engine: Engine = build_engine(config, lambda chunk, last: self.streams[chunk.request_id].push(chunk, last))
        self.core = self.engine.core

    def add(self, wire: GenerateRequest) -> Stream:
        stream = self.streams[wire.request_id] = Stream()
        self.core.add(make_request(self.engine, wire))
        return stream

    def step(self) -> bool:
        self.core.drain()
        return self.core.peers.turn(self.core.step, False)

    def run(self, name: str, prompt: list[int], params: SamplingParams, known: list[int] | None = None) -> Stream:
        """Run a request to its end; with `known`, one that resumes from those output tokens."""
        stream = self.add(request(name, prompt, params, known))
        while not stream.ended:
            self.step()
        return stream

    def all_of(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Stream]:
        """Run requests side by side to their end. Afterwards the engine must be idle."""
        streams = [self.add(request(f"{len(self.streams)}", prompt, params)) for prompt in prompts]
        while not all(stream.ended for stream in streams) or self.step():
            self.step()
        assert self.is_idle()
        return streams

    def is_idle(self) -> bool:
        load = self.core.load()
        return not (
            load.num_running
            or load.num_waiting
            or load.num_handoffs
            or load.num_referenced_pages
            or load.num_quarantined_pages
        )


def kv_of(engine: Stepped) -> dict[str, Tensor]:
    """K and V of its groups that keep them."""
    assert isinstance(engine.core.executor, LocalExecutor)
    return {name: memory.kv for name, memory in engine.core.executor.runner.kv.items() if memory.kv is not None}


def request(
    name: str,
    prompt: list[int],
    params: SamplingParams,
    known: list[int] | None = None,
    handoff: HandoffParams | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=prompt + (known or []),
        sampling_params=params,
        num_prompt_tokens=len(prompt) if known is not None else None,
        handoff=handoff,
    )


@contextmanager
def stepped(**settings: Any) -> Iterator[Stepped]:
    one = Stepped(**settings)
    try:
        yield one
    finally:
        one.engine.close()


@dataclass(frozen=True, slots=True)
class Moved:
    """A prefix that one engine sends to another: the streams of both, and its length in tokens."""

    source: Stream
    destination: Stream | None
    num_tokens: int


class Pair:
    """A prefill and a decode engine in this process that hand over."""

    def __init__(self, prefill: Stepped, decode: Stepped, key: bytes) -> None:
        self.prefill, self.decode, self._key = prefill, decode, key

    def signed(self, digest: bytes, mode: Mode, back: bool = False) -> str:
        """A ticket for a handoff, or with `back` for one from D to P."""
        p, d = self.prefill.engine.info, self.decode.engine.info
        expiry = time.monotonic() + 60.0
        return sign_ticket(self._key, Ticket.between(*((d, p) if back else (p, d)), mode, digest, (expiry, expiry)))

    def legs(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams,
        mode: Mode,
        known: list[int] | None = None,
        timings: bool = False,
        salt: str | None = None,
    ) -> tuple[Stream, Stream]:
        """Add both legs of a request. Returns the streams of P and D."""
        signed = self.signed(request_digest(prompt + (known or []), params, len(prompt)), mode)
        prefill = request(name, prompt, params, known, HandoffParams(role="prefill", ticket=signed))
        decode = request(name, prompt, params, known, HandoffParams(role="decode", ticket=signed))
        prefill, decode = (msgspec.structs.replace(one, timings=timings, cache_salt=salt) for one in (prefill, decode))
        return self.prefill.add(prefill), self.decode.add(decode)

    def hand_back(
        self,
        name: str,
        prompt: list[int],
        mode: Mode,
        salt: str | None = None,
        most: int = 0,
        most_missing: int | None = None,
    ) -> Moved:
        """D offers what it has cached of a prompt (at most `most` tokens, 0: all). Returns the streams of D, which has
        said how much that is, and of P, which has yet to take it; None if D declines.
        """
        signed = self.signed(prefix_digest(prompt, salt), mode, back=True)

        def leg(role: LegRole, num_tokens: int, window_start: int = 0) -> GenerateRequest:
            params = HandoffParams(
                role=role,
                ticket=signed,
                prefix_len=num_tokens,
                window_start=window_start,
                prefix_multiple=self.prefill.engine.info.prefix_multiple,
            )
            wire = request(name, prompt, SamplingParams(temperature=0.0), handoff=params)
            return msgspec.structs.replace(wire, cache_salt=salt, max_prefill_tokens=most_missing)

        source = self.decode.add(leg("prefill", most or len(prompt) - 1))
        if source.ended:
            return Moved(source, None, 0)
        destination = self.prefill.add(leg("decode", source.num_cached, source.window_start))
        return Moved(source, destination, source.num_cached)

    def step_until(self, condition: Callable[[], bool], limit_s: float = 300.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, (self.prefill.streams, self.decode.streams)
            busy = self.prefill.step() | self.decode.step()
            if not busy:
                time.sleep(0.001)

    def decode_until(self, condition: Callable[[], bool], limit_s: float = 300.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, self.decode.streams
            if not self.decode.step():
                time.sleep(0.001)

    def await_session(self) -> None:
        """Wait until D has a session with P, without a step of either."""
        assert self.decode.engine.agent is not None
        deadline = time.monotonic() + 60.0
        while self.decode.engine.agent.stats().sessions == 0:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def settle(self) -> None:
        """Run until both sides are idle."""
        self.step_until(lambda: self.prefill.is_idle() and self.decode.is_idle())

    def check_handoffs(self, whole: Sequence[Stream], prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """Hand each prompt over in push and in pull. All are committed, with the tokens and the acceptance of `whole`,
        the streams of one engine."""
        modes: tuple[Mode, Mode] = ("push", "pull")
        for mode in modes:
            legs = [self.legs(f"{mode}-{i}", prompt, params, mode) for i, prompt in enumerate(prompts)]
            self.settle()
            assert [rest.token_ids for _, rest in legs] == [one.token_ids for one in whole], "other tokens"
            assert [rest.accepted for _, rest in legs] == [one.accepted for one in whole], "other acceptance"
        metrics = self.decode.core.metrics
        assert not metrics.recoveries
        assert metrics.num_handoffs["committed"] == 2 * len(prompts)


@contextmanager
def pair(directory: Path, decode: dict[str, Any] | None = None, **settings: Any) -> Iterator[Pair]:
    """`settings` are for both engines, `decode` for the decode engine in addition."""
    key_file = str(directory / "ticket.key")
    common = {
        "ticket_key_file": key_file,
        "kv_transfer_config": KVTransferConfig(kv_transport="local://"),
        **settings,
    }
    with (
        stepped(role="prefill", engine_id="p", **common) as p,
        stepped(role="decode", engine_id="d", **{**common, **(decode or {})}) as d,
    ):
        yield Pair(p, d, load_or_create_key(key_file))


MakeDrafts = Callable[[DraftPlan], DraftResult]


def draft_by(patch: pytest.MonkeyPatch, draft: Callable[[MakeDrafts, DraftPlan], DraftResult]) -> None:
    """Engines of one rank make their drafts by `draft` from now on. Its first argument is what made them before."""
    before = LocalExecutor.draft
    patch.setattr(LocalExecutor, "draft", lambda self, plan: draft(functools.partial(before, self), plan))


def note_drafts(patch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """The drafts that engines with one request make from now on, by the number of known tokens."""
    found: dict[int, list[int]] = {}

    def draft(before: MakeDrafts, plan: DraftPlan) -> DraftResult:
        out = before(plan)
        (drafts,) = out.drafts
        if drafts:
            found[int(plan.rows.positions[-1]) + 2] = drafts
        return out

    draft_by(patch, draft)
    return found
