"""A drafting method that only this file knows: no weights, no features and no KV, or KV of several geometries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton import LLM, SamplingParams
from baton.drafters.base import DraftBatch, Drafter
from baton.drafters.registry import DRAFTERS
from baton.models.base import CausalLM
from baton.models.layer_cache import AttnRows, KVLayerSpec
from baton.models.layers.linear import Build
from testkit.inside import engine_of

TARGET = "models/baton-demo-llama"
PROMPTS = [[5, 6, 7, 8] * 6, [9, 9, 9], [1], list(range(40, 90))]


class NGram:
    """Proposes what followed the last two tokens at their previous occurrence."""

    kv_layers: Sequence[KVLayerSpec] = ()
    kv_modules: Sequence[int | None] = ()
    aux_layers: tuple[int, ...] = ()
    needs_contexts = True

    @classmethod
    def load(cls, path: str, target: CausalLM, build: Build) -> NGram:
        return cls()

    def combine(self, hidden_TE: Tensor, aux: list[Tensor]) -> None:
        assert aux == []

    def extend(self, batch: DraftBatch) -> None:
        assert batch.features_TF is None
        for request, context in enumerate(batch.contexts):
            rows = slice(batch.query_start[request], batch.query_start[request + 1])
            assert context[batch.positions[rows] + 1].tolist() == batch.next_ids[rows].tolist()

    def draft(self, batch: DraftBatch, extended: None) -> list[list[int]]:
        return [_follow(c.tolist(), int(k)) for c, k in zip(batch.contexts, batch.num_drafts, strict=True)]


def _follow(context: list[int], num: int) -> list[int]:
    for start in range(len(context) - 3, -1, -1):
        if context[start : start + 2] == context[-2:]:
            return context[start + 2 : start + 2 + num]
    return []


class Two(NGram):
    """The same guesses, plus two layers of different geometry that it writes: two groups, one with a window."""

    kv_layers = (KVLayerSpec(2, 16, None), KVLayerSpec(1, 32, 24))
    kv_modules = (1, 1)

    def extend(self, batch: DraftBatch) -> None:
        super().extend(batch)
        attend = batch.pages.bind(np.arange(len(batch.num_drafts)), batch.positions, batch.query_start)
        for layer, spec in enumerate(self.kv_layers):
            shape = (len(batch.positions), spec.num_kv_heads, spec.head_dim)
            own = torch.from_numpy(batch.next_ids).float()[:, None, None].expand(shape)
            attend(layer, AttnRows(own, own, own, 1.0))


@pytest.fixture(params=[NGram, Two], ids=["no groups", "two groups"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(DRAFTERS, "own", f"{__name__}:{request.param.__name__}")
    return {"method": "own", "model": TARGET, "num_speculative_tokens": 3}


def run(params: SamplingParams, **settings: Any) -> list[tuple[list[int], list[int]]]:
    with LLM(TARGET, batch_invariant=True, dtype="float32", **settings) as llm:
        results = llm.generate(PROMPTS, params)
        assert engine_of(llm).core.load().num_referenced_pages == 0
        return [(r.outputs[0].token_ids, r.outputs[0].accepted) for r in results]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_method_of_ones_own_changes_no_token_and_is_accepted(method: dict[str, Any], temperature: float) -> None:
    own: Drafter = NGram()  # checked by the type checker
    assert own.needs_contexts
    # Sampled tokens only repeat if one is likely.
    bias = {50: 12.0} if temperature else None
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=4, ignore_eos=True, logit_bias=bias)
    plain, found = run(params), run(params, speculative_config=method)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain]
    assert sum(accepted for _, rounds in found for accepted in rounds) > 0
    assert run(params, speculative_config=method, max_num_batched_tokens=7, max_num_seqs=2) == found


class Faulty(NGram):
    drafts: Any = ()
    features: Tensor | None = None

    def combine(self, hidden_TE: Tensor, aux: list[Tensor]) -> Any:
        return self.features

    def extend(self, batch: DraftBatch) -> None:
        pass

    def draft(self, batch: DraftBatch, extended: None) -> Any:
        return self.drafts


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ({"drafts": [[9999]]}, r"drafts that are not token ids below \d+: \[9999\]"),
        ({"drafts": [[-1]]}, r"drafts that are not token ids below \d+: \[-1\]"),
        ({"drafts": [[0.5]]}, r"drafts that are not token ids below \d+: \[0.5\]"),
        ({"drafts": [[1, 2, 3, 4]]}, "4 drafts where at most 3 were asked for"),
        ({"drafts": [[1], [2]]}, "drafts of 2 requests, not of 1"),
        ({"features": torch.zeros(7, 4)}, r"features of shape \(7, 4\) of \d+ rows"),
    ],
    ids=["beyond the vocabulary", "negative", "no integer", "too many", "of no request", "features of other rows"],
)
def test_invalid_drafts_are_an_error_that_names_the_drafter(
    fault: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fault.items():
        monkeypatch.setattr(Faulty, name, value)
    monkeypatch.setitem(DRAFTERS, "own", f"{__name__}:Faulty")
    method = {"method": "own", "model": TARGET, "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match=f"drafter Faulty (returned|made) {why}"):
        run(SamplingParams(max_tokens=8, temperature=0.0), speculative_config=method)
