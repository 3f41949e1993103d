"""Non-finite logits: no token is chosen from them, their request ends with its own error, and no other request is
affected.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from baton.engine.async_engine import AsyncEngine
from baton.engine.config import EngineConfig, KVTransferConfig, SpeculativeConfig
from baton.engine.executor import LocalExecutor
from baton.engine.llm import LLM
from baton.engine.runner import ModelRunner
from baton.engine.sampling.nonfinite import rows_not_finite
from baton.engine.sampling.sampler import choose_tokens
from baton.engine.step_plans import NOT_FINITE, DraftPlan, DraftResult
from baton.errors import HandoffError
from baton.handoff.protocol.events import DecodeProgress
from baton.handoff.protocol.ticket import load_or_create_key
from baton.router import RouterConfig
from baton.router.app import build_app as build_router
from baton.sampling_params import SamplingParams, StructuredOutputsParams
from baton.server import build_app
from testkit.checkpoints.common import make_checkpoint
from testkit.checkpoints.drafters_tokens import ngram
from testkit.checkpoints.moe import make_moe_checkpoint
from testkit.engines import EAGLE3, TARGET, MakeDrafts, Stepped, draft_by, pair, request, stepped
from testkit.inside import engine_of
from testkit.servers.fake_serving import served

pytestmark = pytest.mark.usefixtures("one_thread")
# A token whose embedding is NaN.
BAD = 77
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, top_p=0.9, ignore_eos=True)
# Restrictions do not matter: a mask is minus infinity on purpose, and is applied later.
RESTRICTED = SamplingParams(
    max_tokens=12,
    temperature=1.2,
    seed=3,
    top_k=40,
    min_p=0.01,
    logprobs=2,
    ignore_eos=True,
    min_tokens=12,
    logit_bias={7: 2.0},
    repetition_penalty=1.2,
    presence_penalty=0.3,
    allowed_token_ids=tuple(range(300)),
)
PROMPTS = [[1, 2, 3], [9] * 20, [5, 4, 3, 2] * 12, [8]]
PREFIX = [3 + i % 50 for i in range(40)]
ERROR = "nonfinite_logits: the model's logits for position {} are not finite"


def spoil(one: Stepped, value: float = math.nan) -> None:
    spoil_runner(runner_of(one), value)


def runner_of(one: Stepped) -> ModelRunner:
    assert isinstance(one.core.executor, LocalExecutor)
    return one.core.executor.runner


def spoil_runner(runner: ModelRunner, value: float = math.nan) -> None:
    runner.model.model.embed_tokens.weight[BAD] = value


def granite(path: Path, **overrides: Any) -> Path:
    pytest.importorskip("transformers")
    from testkit.checkpoints.granite import make_granite

    experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
    return make_granite(path, **{**experts, "tie_word_embeddings": False, **overrides})


def gemma3(path: Path, **overrides: Any) -> Path:
    pytest.importorskip("transformers")
    from testkit.checkpoints.gemma3 import make_gemma3

    return make_gemma3(path, tie_word_embeddings=False, **overrides)


def gpt_oss(path: Path, **overrides: Any) -> Path:
    pytest.importorskip("transformers")
    from testkit.checkpoints.gpt_oss import make_gpt_oss

    return make_gpt_oss(path, **overrides)


def llama(path: Path, **overrides: Any) -> Path:
    # Groups of three query heads, so that a kernel's vectors of one key span several rows.
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}
    return make_checkpoint(path, "llama", **{**heads, **overrides})


MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": llama,
    "llama of bfloat16": lambda path: llama(path, torch_dtype="bfloat16"),
    "deepseek": lambda path: make_moe_checkpoint(path, "deepseek_v3"),
    "granite": granite,
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
}


def broken_drafts(texts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft the right next token if it is known, and the bad token after it."""

    def draft(before: MakeDrafts, plan: DraftPlan) -> DraftResult:
        drafts = []
        for context, num in zip(plan.contexts, plan.num_drafts.tolist(), strict=True):
            known = next((t for t in texts if t[: len(context)] == context.tolist()), [])
            drafts.append([*known[len(context) : len(context) + 1], *[BAD] * num][:num])
        return DraftResult(drafts, np.zeros((0, 0, 0), dtype=np.float32))

    draft_by(monkeypatch, draft)


@pytest.mark.parametrize("backend", ["paged_cpu", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_drafts_that_are_not_finite_change_no_token(
    name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "model": str(MODELS[name](tmp_path / "model")),
        "kv_cache_memory": 8 << 20,
        "attention_backend": backend,
        "batch_invariant": backend == "paged_cpu",
    }
    with stepped(**settings, speculative_config=None) as one:
        expected = {params: [s.token_ids for s in one.all_of(PROMPTS, params)] for params in (GREEDY, SAMPLED)}
    for params, tokens in expected.items():
        with monkeypatch.context() as patch:
            broken_drafts([p + t for p, t in zip(PROMPTS, tokens, strict=True)], patch)
            drafter = SpeculativeConfig.parse(json.dumps(ngram()))
            with stepped(**settings, speculative_config=drafter) as one:
                spoil(one)
                streams = one.all_of(PROMPTS, params)
                assert [(s.token_ids, s.error) for s in streams] == [(t, None) for t in tokens]
                assert sum(sum(stream.accepted) for stream in streams) > 5
                assert one.core.metrics.num_corrupted == 0


@pytest.fixture
def whole() -> Iterator[Stepped]:
    with stepped() as one:
        yield one


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, RESTRICTED], ids=["greedy", "sampled", "restricted"])
def test_a_request_ends_alone(params: SamplingParams, value: float, whole: Stepped) -> None:
    expected = [stream.token_ids for stream in whole.all_of(PROMPTS, params)]
    clean = runner_of(whole).model.model.embed_tokens.weight[BAD].clone()
    spoil(whole, value)
    streams = [
        whole.add(request(f"r{i}", prompt, params))
        for i, prompt in enumerate([*PROMPTS[:2], [7, 8, BAD, 4], *PROMPTS[2:]])
    ]
    while not all(stream.ended for stream in streams):
        whole.step()
    failed = streams.pop(2)
    assert (failed.token_ids, failed.finish_reason, failed.error) == ([], "error", ERROR.format(4))
    assert [stream.token_ids for stream in streams] == expected
    assert whole.core.metrics.num_corrupted == 1
    assert whole.core.metrics.num_requests["error"] == 1
    assert whole.is_idle()
    # Its pages with non-finite values are used again.
    assert [stream.token_ids for stream in whole.all_of(PROMPTS, params)] == expected
    # A transient cause leaves no trace, not even in the prefix cache.
    runner_of(whole).model.model.embed_tokens.weight[BAD] = clean
    assert whole.run("again", [7, 8, BAD, 4], params).error is None


@pytest.mark.parametrize("budget", [2048, 16])
def test_nothing_of_it_stays_in_the_prefix_cache(budget: int) -> None:
    """Pages of a prompt's first chunks are cached before its logits exist."""
    prompt = [*PREFIX[:20], BAD, *PREFIX[20:]]
    with stepped(max_num_batched_tokens=budget, block_size=4) as one:
        expected = one.run("before", prompt, GREEDY).token_ids
    with stepped(max_num_batched_tokens=budget, block_size=4) as one:
        weight = runner_of(one).model.model.embed_tokens.weight
        clean = weight[BAD].clone()
        assert one.run("prefix", PREFIX[:20], GREEDY).error is None
        spoil(one)
        assert one.run("spoiled", prompt, GREEDY).error == ERROR.format(len(prompt))
        load = one.core.load()
        weight[BAD] = clean
        assert one.run("after", prompt, GREEDY).token_ids == expected
        assert one.core.load().num_cached_pages > load.num_cached_pages
        pools = one.core.cache.pools.values()
        assert all(pool.num_available == pool.num_pages - 1 for pool in pools)


def test_drafts_before_the_end_count_and_those_after_it_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with stepped(speculative_config=None) as one:
        text = one.run("plain", PROMPTS[0], GREEDY).token_ids
    stop = next(i for i, token in enumerate(text) if i >= 1 and token not in text[:i])
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(text[stop],))

    def draft(before: MakeDrafts, plan: DraftPlan) -> DraftResult:
        at = len(plan.contexts[0]) - len(PROMPTS[0])
        # Up to the last token, and one more, which the model would choose if its logits were not finite.
        drafts = [*text[at : stop + 1], 0, 0][: int(plan.num_drafts[0])]
        return DraftResult([drafts], np.zeros((0, 0, 0), dtype=np.float32))

    draft_by(monkeypatch, draft)
    drafter = {**ngram(), "num_speculative_tokens": stop + 2}
    with stepped(speculative_config=SpeculativeConfig.parse(json.dumps(drafter))) as one:
        weight = runner_of(one).model.model.embed_tokens.weight
        weight[text[stop]] = math.nan  # it is the last token: no token after it is wanted
        stream = one.run("drafted", PROMPTS[0], params)
        assert (stream.token_ids, stream.finish_reason, stream.error) == (text[: stop + 1], "stop", None)
        stream = one.run("on", PROMPTS[0], GREEDY)
        assert stream.error == ERROR.format(len(PROMPTS[0]) + stop + 1)


def test_a_drafter_whose_logits_are_not_finite_costs_drafts_alone(whole: Stepped) -> None:
    expected = {params: [s.token_ids for s in whole.all_of(PROMPTS, params)] for params in (GREEDY, SAMPLED)}
    drafter: Any = runner_of(whole).drafter
    with torch.inference_mode():
        for parameter in drafter.parameters():
            parameter.fill_(math.nan)
    for params, tokens in expected.items():
        streams = whole.all_of(PROMPTS, params)
        assert [(s.token_ids, s.error) for s in streams] == [(t, None) for t in tokens]
    assert whole.core.metrics.num_corrupted == 0


def test_scores_of_a_prompt(whole: Stepped) -> None:
    spoil(whole)
    for max_tokens in (0, 4):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=1)
        fine = whole.run(f"fine{max_tokens}", [7, 8, 4], params)
        assert (fine.error, fine.finish_reason) == (None, "length")
        spoiled = whole.run(f"spoiled{max_tokens}", [7, 8, BAD, 4], params)
        assert spoiled.error == "nonfinite_logits: the model's logits for position 3 of the prompt are not finite"
        # Nothing is scored after the last token.
        assert whole.run(f"last{max_tokens}", [7, 8, 4, BAD], params).error == (
            None if not max_tokens else ERROR.format(4)
        )


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("spoiled", ["prefill", "decode", "both"])
def test_a_decode_engine_recomputes_if_only_the_prefill_engine_is_faulty(
    spoiled: str, mode: Any, tmp_path: Path
) -> None:
    """If only the prefill engine is faulty, the decode engine recomputes everything, without the received pages."""
    prompt = [*PREFIX[:20], BAD, *PREFIX[20:]]
    with stepped() as one:
        text = one.run("plain", prompt, GREEDY).token_ids
    with pair(tmp_path, max_num_batched_tokens=16, block_size=4) as two:
        for name, engine in (("prefill", two.prefill), ("decode", two.decode)):
            if spoiled in (name, "both"):
                spoil(engine)
        prefill, decode = two.legs("r", prompt, GREEDY, mode)
        legs = two.decode.core.legs
        assert legs is not None
        two.prefill.step()  # the first chunk: there are pages for all
        two.decode_until(lambda: any(leg.wanted for leg in legs.open.values()))
        if spoiled == "prefill":
            # As if the digests of the first pages had already matched: the bytes arrived unchanged.
            ((key, leg),) = legs.open.items()
            two.decode.core.on_handoff(DecodeProgress(key, dict.fromkeys(leg.wanted, 32)))
        two.step_until(lambda: prefill.ended and decode.ended)
        two.settle()
        if spoiled == "decode":
            # It has the KV of all tokens before and does not compute the bad one.
            assert (decode.token_ids, decode.error) == (text, None)
            return
        assert (prefill.token_ids, prefill.finish_reason, prefill.error) == ([], "error", ERROR.format(len(prompt)))
        assert two.decode.core.metrics.handoff_failures == {"nonfinite_logits": 1}
        expected = ([], ERROR.format(len(prompt))) if spoiled == "both" else (text, None)
        assert (decode.token_ids, decode.error) == expected


async def test_clients_get_an_error_for_logits_that_are_not_finite() -> None:
    engine = AsyncEngine(EngineConfig(model=TARGET, speculative_config=SpeculativeConfig.parse(json.dumps(EAGLE3))))
    assert isinstance(engine_of(engine).core.executor, LocalExecutor)
    spoil_runner(engine_of(engine).core.executor.runner)
    engine.start()
    asked: dict[str, Any] = {"prompt": [7, 8, BAD, 4], "max_tokens": 4, "temperature": 0.0}
    try:
        app = build_app(engine, engine_of(engine).tokenizer)
        async with served(app) as url, aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/completions", json=asked) as response:
                body = await response.json()
                assert response.status == 500
            assert body["error"]["type"] == "server_error"
            assert body["error"]["code"] == "nonfinite_logits"
            assert "logits for position 4 are not finite" in body["error"]["message"]
            async with session.post(f"{url}/v1/completions", json={**asked, "stream": True}) as response:
                text = (await response.read()).decode()
            assert '"code":"nonfinite_logits"' in text
            assert '"finish_reason":"' not in text
            async with session.get(f"{url}/metrics") as response:
                text = await response.text()
            assert "baton:corrupted_requests_total 2.0" in text
            assert "\nvllm:corrupted_requests_total{" in text
            async with session.post(f"{url}/v1/completions", json={**asked, "prompt": [7, 8]}) as response:
                assert response.status == 200
    finally:
        engine.close()


@pytest.mark.parametrize("recovery", ["recompute", "none"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_routers_clients_get_an_error_for_logits_that_are_not_finite(
    stream: bool, recovery: Any, tmp_path: Path
) -> None:
    key_file = str(tmp_path / "ticket.key")
    key = load_or_create_key(key_file)
    asked: dict[str, Any] = {"prompt": [7, 8, BAD, 4], "max_tokens": 4, "temperature": 0.0, "stream": stream}
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for role in ("prefill", "decode"):
            settings: Any = {
                "role": role,
                "engine_id": role,
                "ticket_key_file": key_file,
                "kv_transfer_config": KVTransferConfig(kv_transport="local://"),
                "recovery": recovery,
            }
            engine = AsyncEngine(EngineConfig(model=TARGET, **settings))
            assert isinstance(engine_of(engine).core.executor, LocalExecutor)
            spoil_runner(engine_of(engine).core.executor.runner)
            engine.start()
            stack.callback(engine.close)
            urls.append(await stack.enter_async_context(served(build_app(engine, engine_of(engine).tokenizer))))
        config = RouterConfig(prefill=(urls[0],), decode=(urls[1],), ticket_key=key, tokenizer=TARGET)
        router = await stack.enter_async_context(served(await build_router(config)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with session.post(f"{router}/v1/completions", json=asked) as response:
            text = (await response.read()).decode()
            assert response.status == 500  # also for a stream: it has not begun
        assert '"code":"nonfinite_logits"' in text
        assert '"finish_reason":"' not in text
        async with session.post(f"{router}/v1/completions", json={**asked, "prompt": [7, 8, 4]}) as response:
            assert response.status == 200


def test_the_offline_class_raises() -> None:
    with LLM(model=TARGET) as llm:
        executor = engine_of(llm).core.executor
        assert isinstance(executor, LocalExecutor)
        spoil_runner(executor.runner)
        with pytest.raises(HandoffError, match="nonfinite_logits"):
            llm.generate([[7, 8, BAD, 4]], GREEDY)


def test_which_rows_are_not_finite() -> None:
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0))
    logits[1, 7], logits[3, 0], logits[4, 999] = math.nan, math.inf, -math.inf
    logits[5, :2] = torch.tensor([math.inf, -math.inf])
    logits[6] = 3e38  # the sum of finite numbers may be infinite
    assert rows_not_finite(logits).tolist() == [1, 3, 4, 5]
    assert choose_tokens(logits, None).tolist()[1:6:2] == [NOT_FINITE] * 3
    assert choose_tokens(logits, None)[0] == logits[0].argmax()
    assert rows_not_finite(logits[:0]).tolist() == []


def test_states_and_pages_of_windows_are_forgotten_too(tmp_path: Path) -> None:
    """State checkpoints, and pages that a window has passed."""
    prompt = [*[3 + i % 60 for i in range(300)], BAD, *[5 + i % 50 for i in range(290)]]
    for model in (granite(tmp_path / "granite"), gemma3(tmp_path / "gemma3", max_position_embeddings=1024)):
        settings: dict[str, Any] = {"model": str(model), "kv_cache_memory": 16 << 20, "speculative_config": None}
        with stepped(**settings, max_num_batched_tokens=64) as one:
            weight = runner_of(one).model.model.embed_tokens.weight
            clean = weight[BAD].clone()
            spoil(one)
            assert one.run("spoiled", prompt, GREEDY).error == ERROR.format(len(prompt))
            assert one.core.load().num_cached_pages == 0
            weight[BAD] = clean
            healed = one.run("after", prompt, GREEDY)
        with stepped(**settings) as one:
            assert one.run("fresh", prompt, GREEDY).token_ids == healed.token_ids


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_drafts_under_a_grammar_and_every_verifier(verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A non-finite draft follows a finite one. Neither the choice there nor the grammar fails on it."""
    grammar = StructuredOutputsParams(regex="[a-z ]{4,40}")
    # The bad token is never the right one.
    common: dict[str, Any] = {"max_tokens": 12, "temperature": 0.7, "logit_bias": {BAD: -100.0}}
    constrained, free = SamplingParams(seed=2, structured_outputs=grammar, **common), SamplingParams(seed=3, **common)

    def draft(before: MakeDrafts, plan: DraftPlan) -> DraftResult:
        result = before(plan)
        return DraftResult([[*ids[:1], *[BAD] * (len(ids) - 1)] for ids in result.drafts], result.mtp_hidden)

    draft_by(monkeypatch, draft)
    spec = SpeculativeConfig.parse(json.dumps({**EAGLE3, "verifier": verifier}))
    with stepped(speculative_config=spec) as one:
        spoil(one)
        for asked in (constrained, free):
            streams = one.all_of(PROMPTS, asked)
            assert all(stream.error is None and stream.token_ids for stream in streams)
            assert one.run(f"bad-{asked.seed}", [7, BAD], asked).error == ERROR.format(2)
