"""No request ends an engine: invalid ones are refused, and one that fails in a step fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.engine import executor
from baton.engine.async_engine import AsyncEngine
from baton.engine.config import EngineConfig, SpeculativeConfig
from baton.engine.runner import ModelRunner
from baton.errors import EngineUnavailableError, RequestError
from baton.sampling_params import SamplingParams
from baton.wire import TokenChunk
from testkit.checkpoints.drafters_tokens import draft_model
from testkit.engines import EAGLE3, TARGET, MakeDrafts, draft_by, request, stepped
from testkit.inside import engine_of, thread_of

PROMPTS = [[1, 2, 3], [7, 8], [9] * 20, [4, 5, 6, 7]]
GUILTY = 2


@asynccontextmanager
async def running() -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(
        EngineConfig(model=TARGET, batch_invariant=True, speculative_config=SpeculativeConfig.parse(EAGLE3))
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "temperature": 0.9, "seed": 5, **changes})


async def answer(engine: AsyncEngine, name: str, prompt: list[int], asked: SamplingParams) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request(name, prompt, asked))]


async def answers(engine: AsyncEngine) -> list[list[TokenChunk]]:
    names = [f"r{index}" for index in range(len(PROMPTS))]
    asked = [answer(engine, name, prompt, params()) for name, prompt in zip(names, PROMPTS, strict=True)]
    return await asyncio.wait_for(asyncio.gather(*asked), 60)


async def idle(engine: AsyncEngine) -> None:
    """A request's last chunk leaves before its pages are free."""
    for _ in range(2000):
        load = engine.load()
        if (load.num_running, load.num_referenced_pages, load.num_quarantined_pages) == (0, 0, 0):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(engine.load())


def tokens(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_parameters_out_of_bounds_are_refused_and_the_engine_goes_on() -> None:
    hostile: list[tuple[str, dict[str, Any]]] = [
        ("stop_token_ids", {"stop_token_ids": (-1000000000,), "min_tokens": 3}),
        ("sample_index", {"sample_index": 2**64}),
        ("stop_token_ids", {"stop_token_ids": tuple(range(100)) * 11}),
        ("logit_bias", {"logit_bias": {-1000000000: 1.0}}),
        ("seed", {"seed": 2**64}),
    ]
    at_the_bounds = params(
        sample_index=2**64 - 1,
        seed=2**64 - 1,
        stop_token_ids=(0, 0, 1),
        min_tokens=6,
        temperature=1e-320,
        repetition_penalty=0.01,
        top_k=2**31 - 1,
    )
    async with running() as engine:
        expected = tokens(await answer(engine, "before", PROMPTS[0], params()))
        for param, changes in hostile:
            with pytest.raises(RequestError) as caught:
                await answer(engine, "hostile", PROMPTS[0], params(**changes))
            assert caught.value.param == param
        assert len(tokens(await answer(engine, "edge", PROMPTS[0], at_the_bounds))) == 6
        assert tokens(await answer(engine, "after", PROMPTS[0], params())) == expected


def guilty(rows: Any) -> bool:
    """Whether the beginning of the guilty prompt is among the rows: a plan names no request."""
    return bool(((rows.token_ids == PROMPTS[GUILTY][0]) & (rows.positions == 0)).any())


def guilty_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target fails whenever the guilty request is among the rows."""
    whole = ModelRunner.forward

    def forward(self: ModelRunner, rows: Any, *more: Any) -> Any:
        if guilty(rows):
            raise IndexError("guilty rows")
        return whole(self, rows, *more)

    monkeypatch.setattr(ModelRunner, "forward", forward)


def guilty_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = executor.choose_tokens

    def choose(logits: Any, sampling: Any, *more: Any) -> Any:
        # No other request reaches these positions.
        if sampling is not None and (sampling.position > len(PROMPTS[GUILTY])).any():
            raise IndexError("guilty sampling")
        return whole(logits, sampling, *more)

    monkeypatch.setattr(executor, "choose_tokens", choose)


def guilty_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    def draft(before: MakeDrafts, plan: Any) -> Any:
        drafts = before(plan)
        if guilty(plan.rows):
            raise IndexError("guilty drafting")
        return drafts

    draft_by(monkeypatch, draft)


@pytest.fixture(scope="module")
def quiet() -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with running() as engine:
            return [tokens(chunks) for chunks in await answers(engine)]

    return asyncio.run(run())


@pytest.mark.parametrize("break_it", [guilty_forward, guilty_sampling, guilty_drafting], ids=lambda f: f.__name__)
async def test_a_request_that_fails_in_a_step_ends_alone(
    break_it: Callable[[pytest.MonkeyPatch], None], quiet: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as engine:
        with monkeypatch.context() as broken:
            break_it(broken)
            found = await answers(engine)
        for index, chunks in enumerate(found):
            if index == GUILTY:
                assert (chunks[-1].finish_reason, chunks[-1].error) == ("error", "step_failed: IndexError")
            else:
                assert tokens(chunks) == quiet[index]
        assert [tokens(chunks) for chunks in await answers(engine)] == quiet
        await idle(engine)


@pytest.mark.parametrize("broken", ["forward", "draft"])
async def test_an_engine_that_can_compute_nothing_fails_as_a_whole(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not answer every request with an error forever."""

    def fail(self: ModelRunner, *arguments: Any) -> Any:
        raise RuntimeError("the device is gone")

    async with running() as engine:
        failures: list[str] = []
        engine.on_failure(failures.append)
        monkeypatch.setattr(ModelRunner, broken, fail)
        with pytest.raises(EngineUnavailableError, match="RuntimeError"):
            await answers(engine)
        await asyncio.wait_for(asyncio.to_thread(thread_of(engine).join), 60)
        assert failures == ["the engine failed: RuntimeError('the device is gone')"]
        engine.on_failure(failures.append)  # registered late, but called at once
        assert len(failures) == 2


@pytest.mark.parametrize("page", [2, 16])
def test_a_request_that_leaves_nothing_to_choose_ends_alone(page: int, tmp_path: Path) -> None:
    """The test whether the engine still works computes a token and the drafts after it, which may need more than one
    page.
    """
    drafter = SpeculativeConfig.parse(draft_model(tmp_path, num=5, vocab_size=2048))
    with stepped(speculative_config=drafter, block_size=page, kv_cache_memory=4 << 20) as one:
        barred = one.engine.tokenizer.encode("a", add_special_tokens=False)
        ended = one.run("guilty", PROMPTS[0], params(allowed_token_ids=tuple(barred), bad_words=("a",)))
        assert ended.error is not None
        assert "leaves no token to choose" in ended.error
        assert len(one.run("after", PROMPTS[0], params(ignore_eos=True)).token_ids) == 6
        assert one.is_idle()


async def test_a_canary_leaves_nothing(quiet: list[list[int]]) -> None:
    async with running() as engine:
        core = engine_of(engine).core
        assert core.steps.can_compute()
        assert core.load().num_referenced_pages == 0
        assert [tokens(chunks) for chunks in await answers(engine)] == quiet
