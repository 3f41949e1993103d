"""Prefill engines get KV back from engines that hold it if that pays; otherwise, and whatever fails, they compute."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BatonError, EngineLostError
from baton.router.connectors.base import Connector, ConnectorConfig, PrefixLeg
from baton.router.hand_back import HandBack, HandBacks, HandBackWatch
from baton.router.leg_tasks import Chunks
from baton.router.policies import PolicyConfig, create_policies
from baton.router.pooled_engine import Charge
from baton.router.prefixes import PromptBlocks, prompt_of
from baton.router.routes import Routes
from baton.wire import LegRole, TokenChunk
from tests.router.choice.test_policies import Pool, asked

ANSWERED = list(range(320))
NEXT = [*ANSWERED, *range(900, 940)]


class Script(Connector):
    """Legs of a hand-back that do what a test says. `log`: what happened to them, in order."""

    moves_prefixes = True
    client = legs = None  # type: ignore[assignment]

    def __init__(self, **chunks: Any) -> None:
        super().__init__(ConnectorConfig())
        self.chunks, self.log = chunks, list[str]()

    def prefix_leg(self, *_: Any) -> PrefixLeg:
        def leg(role: LegRole, prefix_len: int, window_start: int, most_missing: int | None) -> Chunks:
            self.log.append(f"{role} {prefix_len} {most_missing}" + f" from {window_start}" * (window_start > 0))
            return self.run(role)

        return leg

    async def run(self, role: LegRole) -> AsyncGenerator[TokenChunk, None]:
        try:
            for step in self.chunks[role]:
                if isinstance(step, BatonError):
                    raise step
                if isinstance(step, str):
                    await asyncio.sleep(3600 if step == "hang" else 0.3)
                    continue
                yield step
            self.log.append(f"{role} ends")
        except (GeneratorExit, asyncio.CancelledError):
            self.log.append(f"{role} is closed")
            raise


Script.__abstractmethods__ = frozenset()


def chunk(num_cached: int = 0, **fields: Any) -> TokenChunk:
    return TokenChunk(request_id="r", num_cached_tokens=num_cached, **fields)


def on(connector: Connector, **settings: Any) -> HandBacks:
    return HandBacks(connector, PolicyConfig(hand_back=True, **settings))


def routes_of(pool: Pool, backs: HandBacks, most: int = 0) -> Routes:
    return Routes(pool, create_policies(config=backs._config), most, backs)  # type: ignore[arg-type]


def test_a_prefill_engine_gets_what_a_decode_engine_answered(directory: Path) -> None:
    pool = Pool(directory)
    pool.decode[1].known.learn(PromptBlocks(ANSWERED))
    pool.prefill[1].known.learn(PromptBlocks(ANSWERED[:160]))
    route = routes_of(pool, on(Script())).choose(asked(NEXT), (), False)
    assert route is not None
    assert route.prefill is not None
    assert (route.decode, route.hand_back) == (pool.decode[1], HandBack(pool.decode[1], 160, 160))
    assert route.prefill is pool.prefill[1], "the rest is to be moved"
    assert route.charges["prefill"] == Charge(40, 360)
    pool.prefill[1].queued_tokens = 500
    for tokens, salt, gain in ((NEXT, "tenant", None), ([7, *NEXT], None, None), (NEXT, None, 320)):
        route = routes_of(pool, on(Script())).choose(asked(tokens, cache_salt=salt), (), False)
        assert route is not None
        assert (route.hand_back.num_tokens if route.hand_back else None) == gain
        assert route.prefill is pool.prefill[0]
        pool.prefill[0].known.forget(PromptBlocks(NEXT))
    assert route.hand_back is not None
    assert route.hand_back.source is pool.decode[1], "the other prefill engine has yet to compute what it was sent"


@pytest.mark.parametrize(
    ("backs", "expected"),
    [
        (HandBacks(Script(), PolicyConfig()), False),
        (on(Script(), min_hand_back_length=321), False),
        (on(Script(), min_hand_back_length=320), True),
    ],
)
def test_hand_back_is_off_unless_it_is_set_and_does_not_pay_for_few_tokens(
    backs: Any, expected: bool, directory: Path
) -> None:
    pool = Pool(directory)
    pool.decode[0].known.learn(PromptBlocks(ANSWERED))
    route = routes_of(pool, backs).choose(asked(NEXT), (), False)
    assert route is not None
    assert (route.hand_back is not None) is expected


@pytest.mark.parametrize(
    ("backs", "why"), [(on(Script()), "handed_off"), (HandBacks(Script(), PolicyConfig()), "cached")]
)
def test_a_turn_that_prefill_engines_can_get_back_is_not_computed_by_its_decode_engine(
    backs: Any, why: str, directory: Path
) -> None:
    pool = Pool(directory)
    pool.decode[0].known.learn(PromptBlocks(ANSWERED))
    route = routes_of(pool, backs, most=16).choose(asked(NEXT), (), False)
    assert route is not None
    assert (route.why, route.decode) == (why, pool.decode[0])


def test_a_pair_that_is_slower_than_computing_is_tried_again_later(directory: Path) -> None:
    pool, backs, prompt = Pool(directory), on(Script()), PromptBlocks(NEXT)
    source, prefill = pool.decode[0], pool.prefill[0]
    source.known.learn(PromptBlocks(ANSWERED))
    pace = backs._pace_of(source, prefill)
    for seconds in (9.0, 0.3, 0.3):  # the first includes connecting
        pace.measure(seconds, 100)
        backs._compute_pace(prefill).measure(0.1, 100)
    assert backs.choose(prompt, prefill, pool.engines) is not None, "too few to judge by"
    pace.measure(0.3, 100)
    found = [backs.choose(prompt, prefill, pool.engines) is not None for _ in range(32)]
    assert [number for number, chosen in enumerate(found) if chosen] == [15, 31]
    assert backs.counts["too_slow"] == 30
    assert backs.choose(prompt, pool.prefill[1], pool.engines) is not None, "another pair is not known yet"
    for _ in range(8):
        pace.measure(0.001, 100)
    assert backs.choose(prompt, prefill, pool.engines) is not None


async def moved(
    script: Script, directory: Path, measured: Sequence[float] = (), **settings: Any
) -> tuple[HandBacks, Pool]:
    """A prefill leg with a hand-back before it. Its chunk comes in any case. `measured`: seconds of earlier moves."""
    pool, backs, drained = Pool(directory), on(script, **settings), list[Chunks]()
    for seconds in measured:
        backs._pace_of(pool.decode[0], pool.prefill[0]).measure(seconds, 288)
    pool.decode[0].known.learn(PromptBlocks(ANSWERED))

    async def leg() -> AsyncGenerator[TokenChunk, None]:
        script.log.append("prefill leg")
        yield chunk(300, token_ids=[1], position=0)

    back = HandBack(pool.decode[0], 320)
    watch = HandBackWatch(backs, asked(NEXT), pool.prefill[0], back, "push", drained.append)
    await watch.begin()
    async for found in leg():
        watch.on_chunk(found)
    for rest in drained:
        assert [found async for found in rest] == []
    return backs, pool


async def test_the_prefill_leg_begins_when_the_prefix_is_there(directory: Path) -> None:
    script = Script(prefill=[chunk(304)], decode=[chunk(288, finish_reason="length")])
    backs, _ = await moved(script, directory)
    assert script.log == ["prefill 359 344", "decode 304 None", "decode ends", "prefill leg", "prefill ends"]
    assert (backs.counts, backs.num_tokens) == ({"completed": 1}, 288)
    assert "router_hand_backs" in {row[0].removeprefix("baton:") for row in backs.rows()}
    assert backs.describe()["num_tokens"] == 288


@pytest.mark.parametrize("queued_s", [None, 3600.0])
async def test_waiting_for_other_requests_is_no_time_of_the_move(queued_s: float | None, directory: Path) -> None:
    script = Script(prefill=[chunk(304)], decode=[chunk(288, finish_reason="length", queued_s=queued_s)])
    backs, _ = await moved(script, directory, measured=(9.0, 1e-6, 1e-6))
    ((_, per_s),) = backs.describe()["moved_tokens_per_s"].items()  # type: ignore[attr-defined]
    assert (per_s == 432_000_000) == (queued_s is not None)


MISSING = chunk(finish_reason="error", error="prefix_missing: too little")
REFUSED = chunk(finish_reason="error", error="prefix_refused: no pages are free")


@pytest.mark.parametrize(
    ("source", "destination", "reason", "log"),
    [
        ([MISSING], [], "prefix_missing", []),
        ([EngineLostError("gone")], [], "EngineLostError", []),
        # An engine's own reason makes no entry of its own.
        ([chunk(finish_reason="error", error="reason 17: of many")], [], "other", []),
        ([], [], "EngineUnavailableError", ["prefill ends"]),
        (
            [chunk(304), "hang"],
            [REFUSED],
            "prefix_refused",
            ["decode 304 None", "decode is closed", "prefill is closed"],
        ),
        ([chunk(304), "hang"], [EngineLostError("gone")], "EngineLostError", ["decode 304 None", "prefill is closed"]),
        (["hang"], [], "timeout", ["prefill is closed"]),
        ([chunk(304)], ["hang"], "timeout", ["decode 304 None", "decode is closed", "prefill is closed"]),
    ],
)
async def test_whatever_fails_the_prefill_engine_computes(
    source: list[Any],
    destination: list[Any],
    reason: str,
    log: list[str],
    directory: Path,
) -> None:
    script = Script(prefill=source, decode=destination)
    backs, pool = await moved(script, directory, hand_back_limit_s=1.0 if reason == "timeout" else 100.0)
    assert script.log[1:] == [*log, "prefill leg"]
    assert (backs.counts, backs.failures) == ({"failed": 1}, {reason: 1})
    held = pool.decode[0].known.num_tokens(PromptBlocks(NEXT))
    assert held == (0 if reason == "prefix_missing" else 320), "what it denied is not expected again"


@pytest.mark.parametrize(("least", "counts"), [(16, {"completed": 2, "failed": 1}), (0, {"completed": 3})])
async def test_a_move_may_take_longer_than_computing_only_if_it_is_always_wanted(
    least: int, counts: dict[str, int], directory: Path
) -> None:
    pool, script = Pool(directory), Script(prefill=[chunk(304)], decode=[chunk(304, finish_reason="length")])
    backs, prefill, back = on(script, min_hand_back_length=least), pool.prefill[0], HandBack(pool.decode[0], 320)
    for steps in [], [], ["longer than the least limit"]:
        script.chunks["decode"] = [*steps, chunk(304, finish_reason="length")]
        await backs.run(asked(NEXT), prefill, back, "push", lambda _: None)
        backs.on_first_token(asked(NEXT), prefill, chunk(304), 0.0)
    assert backs.counts == counts


async def test_a_denied_prefix_of_an_adapter_is_not_expected_again(directory: Path) -> None:
    pool, request = Pool(directory), asked(NEXT, adapter="tune")
    source = pool.decode[0]
    source.known.learn(prompt_of(request))
    backs = on(Script(prefill=[MISSING]))
    await backs.run(request, pool.prefill[0], HandBack(source, 320), "push", lambda _: None)
    assert (backs.failures, source.known.num_tokens(prompt_of(request))) == ({"prefix_missing": 1}, 0)


async def test_nothing_is_kept_of_engines_that_have_left(directory: Path) -> None:
    pool, backs = Pool(directory), on(Script(prefill=[chunk(304)], decode=[chunk(304, finish_reason="length")]))
    for _ in range(4):
        await backs.run(asked(NEXT), pool.prefill[0], HandBack(pool.decode[0], 320), "push", lambda _: None)
        backs.on_first_token(asked(NEXT), pool.prefill[0], chunk(304), 0.1)
    told: Any = backs.describe()
    assert [*told["moved_tokens_per_s"], *told["computed_tokens_per_s"]] == ["decode-2 to prefill-0", "prefill-0"]
    del pool
    gc.collect()
    told = backs.describe()
    assert told["moved_tokens_per_s"] == told["computed_tokens_per_s"] == {}


async def test_the_destination_is_told_where_windows_begin(directory: Path) -> None:
    script = Script(prefill=[chunk(304, window_start=208)], decode=[chunk(304, finish_reason="length")])
    await moved(script, directory)
    assert script.log[:2] == ["prefill 359 344", "decode 304 None from 208"]


async def test_a_client_that_leaves_ends_both_legs(directory: Path) -> None:
    pool, script = Pool(directory), Script(prefill=[chunk(304)], decode=["hang"])
    back = HandBack(pool.decode[0], 320)
    watch = HandBackWatch(on(script), asked(NEXT), pool.prefill[0], back, "pull", lambda _: None)
    task = asyncio.ensure_future(watch.begin())
    while "decode 304 None" not in script.log:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert script.log[-2:] == ["decode is closed", "prefill is closed"]
