"""One engine: the tokens are the same with any batch, chunks, page size, cache, preemption or speculation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton import LLM, SamplingParams
from baton.errors import CheckpointError, ConfigError, RequestError
from baton.verify.observe import make_cases
from testkit.inside import engine_of

TARGET = "models/baton-demo-llama"
EAGLE3 = {"method": "eagle3", "model": "models/baton-demo-eagle3", "num_speculative_tokens": 3}
EAGLE = {"method": "eagle", "model": "models/baton-demo-eagle", "num_speculative_tokens": 3}
PAGE_BYTES = 16 * 2 * 4 * 32 * 2 * 5


def run(prompts: list[list[int]], params: SamplingParams, **settings: Any) -> list[tuple[list[int], list[int]]]:
    with LLM(TARGET, batch_invariant=True, **settings) as llm:
        results = llm.generate(prompts, params)
        load = engine_of(llm).core.load()
        assert load.num_referenced_pages == 0
        assert load.num_quarantined_pages == 0
        return [(r.outputs[0].token_ids, r.outputs[0].accepted) for r in results]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    with LLM(TARGET) as llm:
        cases = make_cases(engine_of(llm).tokenizer, [1, 2, 15, 16, 17, 31, 32, 33, 90], SamplingParams())
    return [list(case.prompt_token_ids) for case in cases]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_neither_token_nor_logprob(prompts: list[list[int]], temperature: float) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=11, logprobs=2)

    def said(spec: dict[str, Any] | None) -> tuple[list[tuple[object, object]], list[int]]:
        with LLM(TARGET, batch_invariant=True, speculative_config=spec) as llm:
            outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
        return [(o.token_ids, o.logprobs) for o in outputs], [count for o in outputs for count in o.accepted]

    plain, _ = said(None)
    for spec in (EAGLE3, EAGLE):
        speculative, rounds = said(spec)
        assert speculative == plain
        assert sum(rounds) > 0
        assert max(rounds) <= 3


class _NotingDrafts:
    """An executor that notes when its drafter runs."""

    def __init__(self, executor: Any, order: list[object]) -> None:
        self._executor, self._order = executor, order

    def __getattr__(self, name: str) -> Any:
        if name == "draft":
            self._order.append("drafts")
        return getattr(self._executor, name)


def test_first_tokens_are_sent_before_the_drafter_runs() -> None:
    """The engine gives way once for all first tokens of a step, and never for later ones."""
    order: list[object] = []
    with LLM(TARGET, batch_invariant=True, speculative_config=EAGLE3) as llm:
        steps = engine_of(llm).core.steps
        emit, executor = steps.emit, steps.executor
        steps.emit = lambda chunk, last: (order.append(chunk.position), emit(chunk, last))
        steps.after_first = lambda: order.append("gives way")
        steps.executor = _NotingDrafts(executor, order)
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
        steps.executor = executor
    assert order[:4] == [0, 0, "gives way", "drafts"]
    assert order.count("gives way") == 1
    assert order.count("drafts") > 1


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 48},
        {"max_num_batched_tokens": 7},
        {"block_size": 7},
        {"max_num_seqs": 1},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_and_acceptance_do_not_depend_on_scheduling(
    prompts: list[list[int]], settings: dict[str, Any], temperature: float
) -> None:
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=3)
    expected = run(prompts, params, speculative_config=EAGLE3)
    assert run(prompts, params, speculative_config=EAGLE3, **settings) == expected


def test_preemption_by_recompute_changes_nothing(prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=3, ignore_eos=True, presence_penalty=0.5)
    many = (prompts * 2)[:12]
    expected = run(many, params, speculative_config=EAGLE3)
    settings = {"speculative_config": EAGLE3, "kv_cache_memory": 24 * PAGE_BYTES}
    with LLM(TARGET, batch_invariant=True, **settings) as llm:
        results = llm.generate(many, params)
        assert llm.metrics.num_preemptions == engine_of(llm).core.scheduler.num_preemptions > 0
        assert [(r.outputs[0].token_ids, r.outputs[0].accepted) for r in results] == expected


def test_prefix_cache_hits_change_nothing(prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    long = prompts[-1]
    extended = [[*long[:k], 5, 6, 7] for k in (15, 16, 17, 40)] + [long[:33], long]
    expected = run(extended, params, speculative_config=EAGLE3, enable_prefix_caching=False)
    with LLM(TARGET, batch_invariant=True, speculative_config=EAGLE3) as llm:
        llm.generate([long], params)
        results = llm.generate(extended, params)
        assert [r.num_cached_tokens for r in results] == [14, 15, 16, 39, 32, 89]
        assert [(r.outputs[0].token_ids, r.outputs[0].accepted) for r in results] == expected


def test_a_prefix_is_shared_with_those_of_its_salt_alone(prompts: list[list[int]]) -> None:
    params, long = SamplingParams(max_tokens=4, temperature=0.0), prompts[-1]
    with LLM(TARGET, batch_invariant=True, speculative_config=EAGLE3) as llm:
        for salts, cached in (([None], [0]), (["a", "b"], [0, 0]), (["b", "c", "a", None], [80, 0, 80, 80])):
            asked: Any = [{"prompt_token_ids": long} | ({} if salt is None else {"cache_salt": salt}) for salt in salts]
            results = llm.generate(asked, params)
            assert [result.num_cached_tokens for result in results] == cached
            assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1
        for bad in ("", 7, "x" * 1025):
            with pytest.raises(RequestError, match="cache_salt"):
                llm.generate({"prompt_token_ids": long, "cache_salt": bad}, params)


def shortened(source: str, folder: Path, max_position: int) -> str:
    folder.mkdir()
    for file in Path(source).iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": max_position}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("together", [True, False])
def test_speculation_goes_up_to_the_end_of_the_context(
    prompts: list[list[int]], together: bool, tmp_path: Path
) -> None:
    target = shortened(TARGET, tmp_path / "target", 64)
    spec = EAGLE3 | {"model": shortened(EAGLE3["model"], tmp_path / "head", 32), "num_speculative_tokens": 5}
    many = [prompts[-1][:length] for length in (1, 40, *range(57, 64))]
    params = [SamplingParams(max_tokens=64 - len(prompt), temperature=0.0, ignore_eos=True) for prompt in many]
    found = []
    for settings in ({"speculative_config": spec}, {}):
        with LLM(target, batch_invariant=True, **settings) as llm:
            if together:
                results = llm.generate(many, params)
            else:
                results = [llm.generate([prompt], [one])[0] for prompt, one in zip(many, params, strict=True)]
        found.append([r.outputs[0].token_ids for r in results])
        # Nothing is drafted beyond the context, and the last token is chosen without drafts.
        rounds = [r.outputs[0].accepted for r in results]
        assert all(not accepted for accepted in rounds[-2:])
    assert [len(prompt) + len(tokens) for prompt, tokens in zip(many, found[0], strict=True)] == [64] * len(many)
    assert found[0] == found[1]


def test_samples_of_one_prompt_differ_and_repeat(prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, n=3, seed=1)
    with LLM(TARGET, batch_invariant=True) as llm:
        first = [o.token_ids for o in llm.generate([prompts[4]], params)[0].outputs]
        again = [o.token_ids for o in llm.generate([prompts[4]], params)[0].outputs]
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 3


def test_the_engines_seed_is_that_of_requests_without_one(prompts: list[list[int]]) -> None:
    found = []
    for engine_seed, own in ((5, None), (None, 5), (6, None)):
        with LLM(TARGET, batch_invariant=True, seed=engine_seed) as llm:
            params = SamplingParams(max_tokens=12, temperature=1.0, seed=own)
            found.append(llm.generate([prompts[4]], params)[0].outputs[0].token_ids)
    assert found[0] == found[1] != found[2]


def test_stop_conditions(prompts: list[list[int]]) -> None:
    with LLM(TARGET, speculative_config=EAGLE3, batch_invariant=True) as llm:
        free = llm.generate([prompts[5]], SamplingParams(max_tokens=24, temperature=0.0))[0].outputs[0]
        token = free.token_ids[9]
        cut = free.token_ids.index(token) + 1
        params = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=(token,))
        stopped = llm.generate([prompts[5]], params)[0].outputs[0]
        assert stopped.token_ids == free.token_ids[:cut]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)
        for length in (1, 2, 5):
            short = llm.generate([prompts[5]], SamplingParams(max_tokens=length, temperature=0.0))[0].outputs[0]
            assert short.token_ids == free.token_ids[:length]
            assert short.finish_reason == "length"
        word = free.text[10:14]
        params = SamplingParams(max_tokens=24, temperature=0.0, stop=(word,))
        by_text = llm.generate([prompts[5]], params)[0].outputs[0]
        assert by_text.text == free.text[: free.text.index(word)]
        assert engine_of(llm).core.load().num_referenced_pages == 0


def test_refusals_name_the_cause(prompts: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="max_sequences: is unknown"):
        LLM(TARGET, max_sequences=3)
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        LLM(TARGET, speculative_config={**EAGLE3, "num_speculative_tokens": 0})
    with pytest.raises(ConfigError, match=r"speculative_config\.modle"):
        LLM(TARGET, speculative_config={**EAGLE3, "modle": "x"})
    with pytest.raises(ConfigError, match="model"):
        LLM("models/none")
    with pytest.raises(CheckpointError):
        LLM("tests")
    with pytest.raises(ConfigError, match="the greatest --max-model-len that fits is 32"):
        LLM(TARGET, max_model_len=64, kv_cache_memory=3 * PAGE_BYTES)
    with LLM(TARGET, kv_cache_memory=3 * PAGE_BYTES) as llm:
        for ids, params, name in (
            ([1] * 64, SamplingParams(), "prompt"),
            ([], SamplingParams(), "prompt"),
            ([999999], SamplingParams(), "prompt"),
            ([1] * 32, SamplingParams(), "prompt"),
        ):
            with pytest.raises(RequestError) as caught:
                llm.generate([ids], params)
            assert caught.value.param == name
