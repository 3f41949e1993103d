"""Engines with few pages: for any order of arrival, every request is served in turn, and none waits for a deadline.
Waiting is counted in engine steps, not in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.engine.config import KVTransferConfig
from baton.handoff.protocol.ticket import Ticket, load_or_create_key, request_digest, sign_ticket
from baton.kvstore.store import StoreOptions
from baton.openai.http.api_errors import error_of_chunk, to_api_error
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.observe import make_cases
from baton.wire import HandoffParams
from testkit.engines import TARGET, Mode, Stepped, Stream, request, stepped

PAGE_BYTES = 16 * 2 * 4 * 32 * 2 * 5
LIMIT_S = 60.0
TICKET_LIFE_S = 60.0


class Cluster:
    """Prefill and decode engines in this process, whose requests arrive in any order."""

    def __init__(self, prefills: list[Stepped], decodes: list[Stepped], key: bytes) -> None:
        self.prefills, self.decodes, self._key = prefills, decodes, key
        self.ended_at: dict[str, int] = {}
        self.steps = 0

    def legs(self, name: str, p: Stepped, d: Stepped, prompt: list[int], params: SamplingParams, mode: Mode) -> Any:
        """Returns functions that add the prefill and the decode leg."""
        digest = request_digest(prompt, params, len(prompt))
        expiry = time.monotonic() + TICKET_LIFE_S
        signed = sign_ticket(self._key, Ticket.between(p.engine.info, d.engine.info, mode, digest, (expiry, expiry)))

        def leg(engine: Stepped, role: Any) -> Stream:
            return engine.add(request(name, prompt, params, None, HandoffParams(role=role, ticket=signed)))

        return lambda: leg(p, "prefill"), lambda: leg(d, "decode")

    def run(self, streams: dict[str, Stream], pause_s: float = 0.0) -> None:
        """Run until all streams have ended. Counts iterations in which some engine computed. In each, the agents'
        threads have `pause_s` to move KV, also if other processes keep the cores busy.
        """
        until = time.monotonic() + LIMIT_S
        while not all(stream.ended for stream in streams.values()):
            assert time.monotonic() < until, {name: stream for name, stream in streams.items() if not stream.ended}
            busy = [engine.step() for engine in self.prefills + self.decodes]
            time.sleep(pause_s)
            self.steps += any(busy)
            if not any(busy):
                time.sleep(0.001)
            for name, stream in streams.items():
                if stream.ended:
                    self.ended_at.setdefault(name, self.steps)

    def check(self, streams: dict[str, Stream], expected: dict[str, list[int]]) -> None:
        """All tokens are exact, nothing was recomputed, all engines are idle."""
        assert {name: stream.error for name, stream in streams.items() if stream.error} == {}
        assert {name: stream.token_ids for name, stream in streams.items()} == expected
        assert [dict(engine.core.metrics.recoveries) for engine in self.decodes if engine.core.metrics.recoveries] == []
        until = time.monotonic() + LIMIT_S
        while not all(engine.is_idle() for engine in self.prefills + self.decodes):
            assert time.monotonic() < until
            for engine in self.prefills + self.decodes:
                engine.step()


@contextmanager
def cluster(directory: Path, num: int, pages: int, store: bool = False, **decode: Any) -> Iterator[Cluster]:
    """`num` prefill engines and as many decode engines, with `pages` pages each."""
    key_file = str(directory / "ticket.key")
    kept = StoreOptions(path=f"{directory}/store") if store else None
    common: dict[str, Any] = {
        "ticket_key_file": key_file,
        "kv_transfer_config": KVTransferConfig("local://", prefix_store=kept),
        "kv_cache_memory": (pages + 1) * PAGE_BYTES,
        "max_model_len": 16 * (pages - 1),
        "max_num_batched_tokens": 64,
    }
    with ExitStack() as stack:
        ps = [stack.enter_context(stepped(role="prefill", engine_id=f"p{i}", **common)) for i in range(num)]
        ds = [
            stack.enter_context(stepped(role="decode", engine_id=f"d{i}", **{**common, **decode})) for i in range(num)
        ]
        yield Cluster(ps, ds, load_or_create_key(key_file))


def prompts(lengths: list[int]) -> list[list[int]]:
    cases = make_cases(Tokenizer.load(TARGET), lengths, SamplingParams())
    return [list(case.prompt_token_ids) for case in cases]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def alone() -> Iterator[Stepped]:
    """An engine with enough memory, for the expected tokens."""
    with stepped(max_num_batched_tokens=64) as one:
        yield one


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_crossed_legs_of_two_routers(tmp_path: Path, alone: Stepped, mode: Mode) -> None:
    """2P2D with pages for two prompts each; the routers' legs arrive in opposite orders."""
    given = prompts([100, 101, 102, 103, 104, 105, 106, 107])
    limits = params(6)
    expected = {str(i): alone.run(f"{mode}{i}", prompt, limits).token_ids for i, prompt in enumerate(given)}
    with cluster(tmp_path, 2, 17) as two:
        streams: dict[str, Stream] = {}
        legs = [
            two.legs(str(i), two.prefills[i % 2], two.decodes[i // 2 % 2], prompt, limits, mode)
            for i, prompt in enumerate(given)
        ]
        for prefill, _ in legs:
            prefill()
        for i in reversed(range(len(legs))):
            streams[str(i)] = legs[i][1]()
        two.run(streams)
        two.check(streams, expected)
        # A decode leg waits for KV, not in a queue of prompts.
        assert {chunk.queued_s for stream in streams.values() for chunk in stream.chunks} == {None}


@pytest.mark.parametrize("seeded", [False, True])
def test_a_prefix_store_that_changes_the_order(tmp_path: Path, alone: Stepped, seeded: bool) -> None:
    """One router; long prompts wait for the store while short ones pass them, on P and on D."""
    given = prompts([300, 40, 301, 41, 302, 42, 303])
    limits = params(4)
    expected = {str(i): alone.run(f"s{seeded}{i}", prompt, limits).token_ids for i, prompt in enumerate(given)}
    with cluster(tmp_path, 1, 24, store=True) as one:
        for prefill, decode in [
            one.legs(f"before-{i}", one.prefills[0], one.decodes[0], prompt, params(1), "push")
            for i, prompt in enumerate(given[:2] if seeded else [])
        ]:
            prefill()
            one.run({"before": decode()})
        one.steps = 0
        streams: dict[str, Stream] = {}
        for i, prompt in enumerate(given):
            prefill, decode = one.legs(str(i), one.prefills[0], one.decodes[0], prompt, limits, "push")
            if i % 2:
                streams[str(i)] = decode()
                prefill()
            else:
                prefill()
                streams[str(i)] = decode()
        one.run(streams)
        one.check(streams, expected)


def test_three_wait_for_one_long_stream(tmp_path: Path, alone: Stepped, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence at a time: the others keep their places until it ends, although their tickets expire."""
    given = prompts([30, 31, 32, 33])
    limits = [params(60), params(8), params(8), params(8)]
    expected, ideal = {}, 0
    for i, (prompt, limit) in enumerate(zip(given, limits, strict=True)):
        before = alone.core.metrics.num_steps
        expected[str(i)] = alone.run(f"w{i}", prompt, limit).token_ids
        ideal += alone.core.metrics.num_steps - before
    with cluster(tmp_path, 1, 17, max_num_seqs=1) as one:
        streams = {}
        for i, (prompt, limit) in enumerate(zip(given, limits, strict=True)):
            prefill, decode = one.legs(str(i), one.prefills[0], one.decodes[0], prompt, limit, "push")
            prefill()
            streams[str(i)] = decode()
        # Every ticket has expired before the second request gets its turn.
        while not streams["0"].token_ids:
            one.run({"none": Stream(ended=True)})
            for engine in (*one.prefills, *one.decodes):
                engine.step()
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 3 * TICKET_LIFE_S)
        one.run(streams)
        one.check(streams, expected)
        assert sorted(one.ended_at, key=lambda name: one.ended_at[name]) == ["0", "1", "2", "3"]
        assert max(one.ended_at.values()) <= 2 * ideal


def test_neither_queue_starves_the_other(tmp_path: Path, alone: Stepped) -> None:
    """A decode engine also computes short prompts itself. A leg that needs many pages is not passed forever."""
    (long, *short) = prompts([200, *range(20, 32)])
    with cluster(tmp_path, 1, 18) as one:
        prefill, decode = one.legs("long", one.prefills[0], one.decodes[0], long, params(4), "push")
        streams = {"long": decode()}
        d = one.decodes[0]
        for i, prompt in enumerate(short):
            streams[str(i)] = d.add(request(str(i), prompt, params(30)))
        prefill()
        one.run(streams, pause_s=0.01)
        expected = {"long": alone.run("long", long, params(4)).token_ids}
        expected |= {str(i): alone.run(f"n{i}", prompt, params(30)).token_ids for i, prompt in enumerate(short)}
        one.check(streams, expected)
        later = sum(at > one.ended_at["long"] for at in one.ended_at.values())
        assert later >= len(short) // 2, one.ended_at


def test_a_request_that_began_earlier_elsewhere_keeps_its_place(alone: Stepped) -> None:
    """Its engine has died, and it begins again here: not after those that came while it ran there."""
    given = {
        name: request(name, prompt, params(4)) for name, prompt in zip("abc", prompts([200, 201, 202]), strict=True)
    }
    given["c"] = msgspec.structs.replace(given["c"], waited_s=60.0)
    streams = {}
    for name, one in given.items():
        streams[name] = alone.add(one)
        if name == "a":
            alone.step()
    began: list[str] = []
    while not all(stream.ended for stream in streams.values()):
        alone.step()
        began += [name for name, stream in streams.items() if stream.token_ids and name not in began]
    assert began == ["a", "c", "b"], "what runs goes on, and then the one that began first"
    assert streams["c"].chunks[0].queued_s < 60.0, "only the wait on this engine is told"


def test_a_limit_to_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = prompts([30, 31])
    with cluster(tmp_path, 1, 17, max_num_seqs=1, queue_timeout_s=50.0) as one:
        legs = [one.legs(str(i), one.prefills[0], one.decodes[0], p, params(50), "push") for i, p in enumerate(given)]
        streams = {}
        for i, (prefill, decode) in enumerate(legs):
            prefill()
            streams[str(i)] = decode()
        until = time.monotonic() + LIMIT_S
        while not streams["0"].token_ids:
            assert time.monotonic() < until
            for engine in (*one.prefills, *one.decodes):
                engine.step()
        late = time.monotonic() + 51.0
        monkeypatch.setattr("baton.clock.time.monotonic", lambda: late)
        one.decodes[0].step()
        monkeypatch.undo()
        assert streams["1"].error == "queue_timeout: no room within 50 s"
        assert not streams["1"].recoverable
        assert to_api_error(error_of_chunk(streams["1"].error)).status == 503
        one.run(streams)
        assert streams["0"].error is None
        until = time.monotonic() + LIMIT_S
        while not all(engine.is_idle() for engine in one.prefills + one.decodes):
            assert time.monotonic() < until, "P is told at once"
            for engine in one.prefills + one.decodes:
                engine.step()


def test_the_first_token_says_how_long_its_prompt_waited(alone: Stepped, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(alone.core.clock, "monotonic", lambda: now)
    stream = alone.add(request("waits", prompts([20])[0], params(12)))
    now = 12.5
    while not stream.ended:
        alone.step()
        now += 1.0
    told = [chunk.queued_s for chunk in stream.chunks]
    assert len(told) > 1
    assert told == [2.5] + [None] * (len(told) - 1)
