"""Gemma 3 and 4 and gpt-oss on whole engines: windows smaller than, equal to and larger than a page, beside full
layers.

Tokens are those of transformers; batches, hits, preemption and handoffs change neither tokens nor acceptance.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baton import LLM
from baton.engine.config import SpeculativeConfig
from baton.models.base import CausalLM
from baton.models.layer_cache import KVLayerSpec
from baton.models.loading.loader import load_model
from baton.sampling_params import SamplingParams
from testkit.checkpoints.common import make_drafter
from testkit.checkpoints.gemma3 import make_gemma3
from testkit.checkpoints.gemma4 import make_gemma4
from testkit.checkpoints.gpt_oss import make_gpt_oss
from testkit.engines import Mode, pair, request, stepped
from tests.engine.handoff.test_handoff_kinds import both_ways, drop_one_page_more, prompt_of, want_one_page_less
from tests.engine.models.test_transformers_equality import assert_greedy, load_reference

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = 16
NUM_TOKENS = 12
LENGTHS = (1, 5, 17, 70)
# By name: the maker, the shape, and overrides.
MODELS: dict[str, tuple[Callable[..., Path], str, dict[str, Any]]] = {
    "gemma3": (make_gemma3, "gemma3", {}),
    "gemma3-odd": (make_gemma3, "gemma3-odd", {}),
    "gemma3-new": (make_gemma3, "gemma3-new", {}),
    "gemma4": (make_gemma4, "gemma4", {}),
    "gemma4-odd": (make_gemma4, "gemma4-odd", {}),
    "gemma4-experts": (make_gemma4, "gemma4-experts", {}),
    "gpt_oss": (make_gpt_oss, "gpt_oss", {}),
    "gpt_oss-odd": (make_gpt_oss, "gpt_oss-odd", {}),
    "gpt_oss-page": (make_gpt_oss, "gpt_oss", {"sliding_window": PAGE, "num_key_value_heads": 4}),
    "gpt_oss-one": (make_gpt_oss, "gpt_oss", {"sliding_window": 1}),
}
Settings = dict[str, Any]
Find = Callable[..., "Trial"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A target and a random EAGLE-3 head (a Llama layer) for it."""

    path: Path
    head: Path
    model: CausalLM

    def settings(self, has_drafter: bool = False, **more: Any) -> Settings:
        spec = {"method": "eagle3", "model": str(self.head), "num_speculative_tokens": 3}
        parsed = SpeculativeConfig.parse(json.dumps(spec)) if has_drafter else None
        return {"model": str(self.path), "speculative_config": parsed, "block_size": PAGE, **more}

    def layers(self, windowed: bool) -> list[KVLayerSpec]:
        specs = [spec for spec in self.model.kv_layers if isinstance(spec, KVLayerSpec)]
        return [spec for spec in specs if (spec.window is not None) is windowed]

    @property
    def window(self) -> int:
        """With the entry that a drafter reads before it."""
        spec = self.layers(windowed=True)[0]
        assert spec.window is not None
        return spec.window + spec.lookback


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    @functools.cache
    def make(name: str, seed: int = 0) -> Trial:
        maker, shape, overrides = MODELS[name]
        root = tmp_path_factory.mktemp(name)
        target = maker(root / "target", shape, seed=seed, **overrides)
        return Trial(target, make_drafter(root / "head", "eagle3", target, seed=seed), load_model(target))

    return make


@pytest.mark.parametrize(
    ("name", "seed"), [*((name, 1) for name in MODELS), ("gemma3-odd", 2), ("gemma3-odd", 3), ("gpt_oss", 2)]
)
def test_greedy_tokens_are_those_of_transformers(name: str, seed: int, find: Find) -> None:
    trial = find(name, seed)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in LENGTHS]
    model = load_reference(trial.path)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    head = {"method": "eagle3", "model": str(trial.head), "num_speculative_tokens": 3}
    for drafter in ({}, {"speculative_config": head}):
        # Fewer rows per step than the prompts have: chunks, and prompts beside decoding requests.
        with LLM(str(trial.path), kv_cache_memory=8 << 20, max_num_batched_tokens=40, **drafter) as llm:
            found = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
        for prompt, got in zip(prompts, found, strict=True):
            assert_greedy(model, prompt, got, NUM_TOKENS)


GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
WITH_LOGPROBS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize(
    ("name", "dtype"), [("gemma3-odd", "float32"), ("gemma4-odd", "bfloat16"), ("gpt_oss", "bfloat16")]
)
def test_a_request_alone_gets_the_bits_it_gets_among_others(name: str, dtype: str, find: Find) -> None:
    """Tokens and logprobs, with any chunks and page size."""
    trial = find(name)
    prompts = [prompt_of(length, salt=length) for length in (3, 17, 50)]
    with stepped(**trial.settings(dtype=dtype, enable_prefix_caching=False)) as one:
        expected = [one.run(f"{i}", prompt, WITH_LOGPROBS).result for i, prompt in enumerate(prompts)]
    for has_drafter, rows, size in ((False, 23, 7), (True, 50, 16)):
        settings = trial.settings(has_drafter, dtype=dtype, max_num_batched_tokens=rows) | {"block_size": size}
        with stepped(**settings) as one:
            assert [stream.result for stream in one.all_of(prompts, WITH_LOGPROBS)] == expected


@pytest.mark.parametrize(("name", "has_drafter"), [("gemma3", True), ("gemma3-odd", False), ("gpt_oss-page", True)])
def test_hits_of_windowed_groups_change_no_token(name: str, has_drafter: bool, find: Find) -> None:
    """The same prompts again, others with the same beginning, and some whose first pages slid out of the window."""
    trial = find(name)
    prompts = [prompt_of(70), prompt_of(48), prompt_of(70)[:64] + prompt_of(20, salt=3), prompt_of(33)]
    with stepped(**trial.settings(has_drafter, enable_prefix_caching=False)) as one:
        expected = [stream.result for stream in one.all_of(prompts, GREEDY)]
    with stepped(**trial.settings(has_drafter, max_num_batched_tokens=40)) as one:
        first = [one.run(f"a{i}", prompt, GREEDY).result for i, prompt in enumerate(prompts)]
        assert first == expected
        assert [stream.result for stream in one.all_of(prompts, GREEDY)] == expected
        assert one.core.metrics.num_cached_tokens > 64


@pytest.mark.parametrize("name", ["gpt_oss"])
def test_little_memory_changes_no_token(name: str, find: Find) -> None:
    trial = find(name)
    prompts = [prompt_of(length, salt=length) for length in (20, 33, 47, 60)]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    with stepped(**trial.settings(True)) as one:
        expected = [stream.token_ids for stream in one.all_of(prompts, params)]
        page_bytes = {g: m.spec.page_bytes for g, m in one.core.executor.runner.kv.items()}  # type: ignore[attr-defined]
    # Ten pages of each group: one context and a part of another.
    settings = trial.settings(True, max_model_len=120, kv_cache_memory=10 * sum(page_bytes.values()))
    with stepped(max_num_batched_tokens=24, **settings) as one:
        streams = one.all_of(prompts, params)
        assert one.core.scheduler.num_preemptions > 0
        assert [stream.token_ids for stream in streams] == expected


@pytest.mark.parametrize("name", ["gemma3-odd", "gpt_oss", "gpt_oss-page"])
def test_windows_give_pages_back_while_prompts_are_computed(name: str, find: Find) -> None:
    trial, budget = find(name), 20
    prompt = prompt_of(150)
    with stepped(**trial.settings(enable_prefix_caching=False)) as one:
        expected = one.run("r", prompt, GREEDY).result
    with stepped(**trial.settings(enable_prefix_caching=False, max_num_batched_tokens=budget)) as one:
        (pool,) = [one.core.cache.pools[g] for g, rules in one.core.cache.rules.items() if rules.window is not None]
        stream = one.add(request("r", prompt, GREEDY))
        while not stream.ended:
            one.step()
            # The tokens that the chunk's first row sees, and the chunk, at any offset in their pages.
            assert pool.num_referenced <= 1 + -(-(trial.window - 1 + budget) // PAGE)
        assert stream.result == expected


@pytest.mark.parametrize(
    ("name", "has_drafter"),
    [
        ("gemma3", True),
        ("gemma3-odd", False),
        ("gemma3-odd", True),
        ("gemma4-odd", True),
        ("gpt_oss", False),
        ("gpt_oss-page", True),
        ("gpt_oss-odd", True),
        ("gpt_oss-one", False),
    ],
)
def test_a_handoff_changes_neither_tokens_nor_acceptance(
    name: str, has_drafter: bool, find: Find, tmp_path: Path
) -> None:
    """With several page sizes on P and on D, and other ones for the window's group than for the full group."""
    trial = find(name)
    lengths = [1, 4, 5, 6, 16, 17, 40, 70]
    settings = trial.settings(has_drafter, integrity="full", max_num_batched_tokens=32)
    modes: tuple[Mode, Mode] = ("push", "pull")
    sizes = {"block_size": "7,sliding_window=12" if has_drafter else "24"}
    with stepped(**settings) as single, pair(tmp_path, sizes, **settings) as two:
        for mode, params in zip(modes, (GREEDY, SAMPLED), strict=True):
            both_ways(single, two, lengths, params, mode)
        assert two.decode.core.metrics.num_handoffs["committed"] == 2 * len(lengths)


@pytest.mark.parametrize(
    ("name", "has_drafter"),
    [("gemma3", True), ("gemma3-odd", False), ("gemma4-odd", False), ("gpt_oss", True), ("gpt_oss-one", False)],
)
def test_of_a_window_only_the_window_is_sent(name: str, has_drafter: bool, find: Find, tmp_path: Path) -> None:
    """Bytes by hand: all tokens of full layers and of the head, and of windowed layers those that the next
    token sees.
    """
    trial = find(name)

    def entry(specs: list[KVLayerSpec]) -> int:
        return sum(2 * spec.num_kv_heads * spec.head_dim * 4 for spec in specs)

    full, windowed = entry(trial.layers(windowed=False)), entry(trial.layers(windowed=True))
    # The head has the target's heads, in one layer.
    head = entry(trial.layers(windowed=False)[:1]) if has_drafter else 0
    modes: tuple[Mode, Mode] = ("push", "pull")
    with pair(tmp_path, **trial.settings(has_drafter, enable_prefix_caching=False)) as two:
        for mode in modes:
            for length in (3, 70):
                before = two.decode.core.metrics.handoff_bytes
                two.legs(f"{mode}{length}", prompt_of(length), GREEDY, mode)
                two.settle()
                sent = two.decode.core.metrics.handoff_bytes - before
                assert sent == length * (full + head) + min(length, trial.window - 1) * windowed, (mode, length)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_entries_that_d_has_cached_are_not_sent(name: str, find: Find, tmp_path: Path) -> None:
    """A second request with the same beginning: hits of full layers, and of the window if its pages are there."""
    trial = find(name)
    prompts = [prompt_of(70), prompt_of(70)[:64] + prompt_of(30, salt=9), prompt_of(70)]
    settings = trial.settings(True, max_num_batched_tokens=40)
    with stepped(**settings) as single, pair(tmp_path, **settings) as two:
        sent = []
        for number, prompt in enumerate(prompts):
            whole, before = single.run(f"{number}", prompt, GREEDY), two.decode.core.metrics.handoff_bytes
            told, rest = two.legs(f"{number}", prompt, GREEDY, "push" if number % 2 else "pull")
            two.step_until(lambda told=told, rest=rest: told.ended and rest.ended)
            two.settle()
            assert (rest.result, rest.accepted) == (whole.result, whole.accepted)
            sent.append(two.decode.core.metrics.handoff_bytes - before)
        assert not two.decode.core.metrics.handoff_failures
        assert sent[1] < sent[0]
        assert sent[2] < sent[0] / 2


@pytest.mark.parametrize(
    ("name", "breaks", "shows"),
    [("gemma3", drop_one_page_more, "register_refused"), ("gpt_oss", want_one_page_less, "other tokens: push, 70")],
)
def test_a_page_of_the_window_that_is_missing_shows(
    name: str,
    breaks: Callable[[pytest.MonkeyPatch], None],
    shows: str,
    find: Find,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = find(name).settings()
    with stepped(**settings) as single, pair(tmp_path, **settings) as two:
        breaks(monkeypatch)
        with pytest.raises(AssertionError, match=shows):
            both_ways(single, two, [70, 75], WITH_LOGPROBS, "push")
