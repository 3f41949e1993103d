"""Engines that share a model's experts: each gives the tokens and drafts of a single engine, whatever the others do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.engine.async_engine import AsyncEngine
from baton.engine.build import build_engine
from baton.engine.config import EngineConfig, SpeculativeConfig
from baton.engine.ranks.lockstep import Lockstep, WakeSockets
from baton.errors import ConfigError, EngineUnavailableError
from baton.models.layers.expert_parallel import ExpertRanks
from baton.sampling_params import SamplingParams
from benchmarks.parity.models import TARGETS
from testkit.engines import TARGET, request
from testkit.inside import engine_of, thread_of

Answer = tuple[list[int], list[int]]
PROMPTS = [[3 + (7 * i + 13 * n) % 90 for i in range(n)] for n in (1, 17, 40, 61)]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = TARGETS["deepseek_v3"](tmp_path_factory.mktemp("target"), 0)
    spec = SpeculativeConfig.parse({"method": "mtp", "num_speculative_tokens": 3})
    tiny = {"kv_cache_memory": 4 << 20, "max_model_len": 128, "max_num_batched_tokens": 32}
    return {
        "model": str(model),
        "speculative_config": spec,
        "skip_tokenizer_init": True,
        "batch_invariant": True,
        **tiny,
    }


@contextmanager
def ranks(size: int, store: Path, settings: dict[str, Any]) -> Iterator[list[AsyncEngine]]:
    def make(rank: int) -> AsyncEngine:
        more = {"data_parallel_size": size, "data_parallel_rank": rank, "data_parallel_store": str(store)}
        return AsyncEngine(EngineConfig(**settings, **more))

    with ThreadPoolExecutor(size) as pool:
        starts = [pool.submit(make, rank) for rank in range(size)]
        engines = []
        for start in starts:
            engines.append(start.result(timeout=300))
            engines[-1].start()
        try:
            yield engines
        finally:
            list(pool.map(AsyncEngine.close, engines))


async def answer(engine: AsyncEngine, name: str, prompt: list[int], params: SamplingParams = PARAMS) -> Answer:
    tokens, accepted = [], []
    async for chunk in engine.generate(request(name, prompt, params)):
        tokens += chunk.token_ids
        accepted += chunk.accepted
    return tokens, accepted


async def answers(engines: Sequence[AsyncEngine]) -> list[list[Answer]]:
    asked = [asyncio.gather(*(answer(e, f"{i}", p) for i, p in enumerate(PROMPTS))) for e in engines]
    return [list(each) for each in await asyncio.gather(*asked)]


@pytest.mark.usefixtures("one_thread")
async def test_ranks_answer_as_one_engine_does(tmp_path: Path, settings: dict[str, Any]) -> None:
    size = 3
    alone = AsyncEngine(EngineConfig(**settings))
    alone.start()
    (expected,) = await answers([alone])
    alone.close()
    with ranks(size, tmp_path, settings) as engines:
        # All at once; then each while the others are idle, and again after an idle period.
        assert await answers(engines) == [expected] * size
        for engine in [*engines, *engines]:
            assert await answers([engine]) == [expected]
        # One client leaves in the middle of an answer.
        cut = engines[0].generate(request("cut", PROMPTS[2], PARAMS))
        await anext(cut)
        await cut.aclose()
        assert await answers(engines[1:]) == [expected] * (size - 1)
        assert {engine.info.data_parallel_rank for engine in engines} == set(range(size))


@pytest.mark.usefixtures("one_thread")
async def test_the_end_of_one_is_the_end_of_all(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A sleeping rank learns of it when it gets a request."""
    with ranks(2, tmp_path, settings) as (first, second):
        core = engine_of(second).core
        for _ in range(6000):  # gloo's connections belong to this process and outlive the thread
            if all(engine_of(engine).core.peers.may_sleep(False) for engine in (first, second)):
                break
            await asyncio.sleep(0.01)

        def fail() -> bool:
            raise RuntimeError("out of luck")

        core.step = fail  # type: ignore[method-assign]
        core.post(lambda: None)
        await asyncio.to_thread(thread_of(second).join, 60.0)
        # In reality its process and its sockets would end now.
        assert isinstance(core.peers, Lockstep)
        core.peers.wake_sockets.close()
        with pytest.raises(EngineUnavailableError, match="EngineUnavailableError"):
            await answer(first, "1", PROMPTS[1])
        await asyncio.to_thread(thread_of(first).join, 60.0)
        assert first._failure is not None
        assert "data-parallel rank 1 has gone" in first._failure


def test_a_round_that_failed_is_the_last() -> None:
    def gather(head: Any) -> Any:
        raise RuntimeError("connection closed")

    shared = ExpertRanks(0, 2, gather, lambda parts, sizes: parts)
    for _ in range(2):
        with pytest.raises(EngineUnavailableError, match="cannot go on: RuntimeError: connection closed"):
            shared.finish(0)


class _Rounds:
    """Rounds of a rank whose peers send `words`."""

    def __init__(self) -> None:
        self.begun, self.begins = False, lambda: None
        self.said: list[int] = []
        self.words: list[int] = []

    def finish(self, word: int) -> list[int]:
        if not self.begun:
            self.begins()
        self.begun = False
        self.said.append(word)
        return [word, *self.words]


class _WakeSockets:
    def __init__(self) -> None:
        self.last_wave, self.woken = -1, list[int]()

    def wake(self, wave: int) -> None:
        self.woken.append(wave)


def test_a_rank_with_new_work_wakes_the_others_once_a_wave_and_wakes_of_old_waves_are_ignored() -> None:
    rounds, wake_sockets = _Rounds(), _WakeSockets()
    lockstep = Lockstep(rounds, wake_sockets)  # type: ignore[arg-type]

    def computes() -> bool:
        if not rounds.begun:
            rounds.begun = True
            rounds.begins()
        return True

    rounds.words = [1]
    assert lockstep.turn(lambda: False, False), "another has computed, and may need this one again"
    rounds.words = [0]
    assert not lockstep.turn(lambda: False, False)
    assert (rounds.said, wake_sockets.woken) == ([0, 0], []), "all are awake at first"
    assert not lockstep.turn(lambda: False, False)
    assert len(rounds.said) == 2, "a sleeping rank that has nothing to compute makes no round"
    assert lockstep.turn(computes, False)
    assert lockstep.turn(computes, False)
    assert not lockstep.turn(lambda: False, False)
    assert wake_sockets.woken == [1]
    wake_sockets.last_wave = 1
    assert not lockstep.turn(lambda: False, False)
    assert len(rounds.said) == 5, "that wave is over"
    wake_sockets.last_wave = 2
    assert not lockstep.turn(lambda: False, False)
    assert (len(rounds.said), wake_sockets.woken) == (6, [1])


def test_a_rank_that_is_told_to_stop_goes_on_until_all_are() -> None:
    rounds, wake_sockets = _Rounds(), _WakeSockets()
    lockstep = Lockstep(rounds, wake_sockets)  # type: ignore[arg-type]
    rounds.words = [0]
    lockstep.turn(lambda: False, False)
    assert not lockstep.may_sleep(True), "the others do not know yet"
    lockstep.turn(lambda: False, True)
    assert (rounds.said[-1], wake_sockets.woken, lockstep.ended) == (2, [1], False)
    assert lockstep.may_sleep(True)
    rounds.words, wake_sockets.last_wave = [3], 2
    lockstep.turn(lambda: False, True)
    assert lockstep.ended


def test_wakes_come_with_their_waves(tmp_path: Path) -> None:
    wake_sockets = [WakeSockets(str(tmp_path), rank, 2) for rank in range(2)]
    woken = threading.Event()
    wake_sockets[1].listen(woken.set)
    wake_sockets[0].wake(7)
    assert woken.wait(60)
    wake_sockets[0].wake(5)
    wake_sockets[1].close()
    assert wake_sockets[1].last_wave == 7
    with pytest.raises(EngineUnavailableError, match="data-parallel rank 1 has gone"):
        wake_sockets[0].wake(8)
    wake_sockets[0].close()
    with pytest.raises(ConfigError, match="data_parallel_store"):
        WakeSockets(str(tmp_path / "none"), 0, 2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"data_parallel_rank": 2, "data_parallel_store": "x"}, "data_parallel_rank: must be 0 to 1, got 2"),
        ({"tensor_parallel_size": 2}, "data_parallel_size: must be 1 with other tensor ranks or stages than one"),
        ({}, "data_parallel_size: is 2: ranks are started together, by baton serve and baton up"),
    ],
)
def test_invalid_data_parallel_settings_are_refused_by_name(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_engine(EngineConfig(TARGET, data_parallel_size=2, **more), lambda chunk, last: None)


@pytest.mark.usefixtures("one_thread")
async def test_ranks_without_experts_are_engines_of_their_own(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The second starts after the first has answered; they exchange nothing."""
    store = tmp_path / "store"
    store.mkdir()
    of_all = {**settings, "model": str(TARGETS["llama"](tmp_path / "target", 0))}
    of_all["speculative_config"] = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 3})
    alone = AsyncEngine(EngineConfig(**of_all))
    alone.start()
    (expected,) = await answers([alone])
    alone.close()
    engines = []
    for rank in range(2):
        place = {"data_parallel_size": 2, "data_parallel_rank": rank, "data_parallel_store": str(store)}
        engines.append(AsyncEngine(EngineConfig(**of_all, **place)))
        engines[-1].start()
        assert await answers(engines) == [expected] * len(engines)
        assert engines[-1].info.data_parallel_rank == rank
    assert not list(store.iterdir())
    engines[1].close()
    assert await answers(engines[:1]) == [expected]
    engines[0].close()
