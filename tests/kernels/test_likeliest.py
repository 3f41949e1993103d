"""The likeliest tokens without logits are those of the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from baton.engine.executor import LocalExecutor
from baton.engine.sampling.sampler import choose_tokens
from baton.engine.step_plans import NOT_FINITE
from baton.models.fused_head import FusedHead
from baton.models.layers.linear import Build, Linear
from baton.sampling_params import SamplingParams
from testkit.engines import stepped
from testkit.layers import HAS_OWN_PRODUCTS, LayerKind, skip_unless_in_place, usual_quantization

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not HAS_OWN_PRODUCTS, reason="no products of bfloat16 of our own"),
]
COLUMNS = 96


def make_head(vocab: int, quantization: str | None = None) -> Linear:
    """Each output is there several times, so that the greatest logit is."""
    head = Linear(COLUMNS, vocab, Build(torch.bfloat16, torch.device("cpu"), quantization=quantization))
    assert head.weight is not None
    some = torch.randn(vocab // 4, COLUMNS, generator=torch.Generator().manual_seed(1))
    head.weight.copy_(some.repeat(4, 1))
    head.pack()
    return head


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("vocab", [256, 320])
@pytest.mark.parametrize("num_rows", [1, 7, 64])
@pytest.mark.parametrize("threads", [1, 2])
@torch.inference_mode()
def test_the_first_of_the_greatest_logits_is_chosen(
    num_rows: int, vocab: int, quantization: str | None, threads: int
) -> None:
    skip_unless_in_place(LayerKind(quantization))
    lm_head = make_head(vocab, quantization)
    hidden = torch.randn(num_rows, COLUMNS, generator=torch.Generator().manual_seed(2)).bfloat16()
    hidden[num_rows // 2] = 0.0
    fused = FusedHead.of(lm_head)
    assert fused is not None
    torch.set_num_threads(threads)
    try:
        chosen = fused.likeliest(hidden)
    finally:
        torch.set_num_threads(1)
    assert chosen is not None
    assert chosen.tolist() == choose_tokens(lm_head(hidden).float(), None).tolist()
    assert chosen.max() < vocab // 4, "an equal logit with a lower number is before it"


@torch.inference_mode()
def test_a_row_with_a_logit_that_is_not_finite_has_no_token() -> None:
    lm_head = make_head(256, usual_quantization())
    hidden = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(2)).bfloat16()
    hidden[1], hidden[3, 7] = torch.nan, torch.inf
    fused = FusedHead.of(lm_head)
    assert fused is not None
    chosen = fused.likeliest(hidden)
    assert chosen is not None
    expected = choose_tokens(lm_head(hidden).float(), None)
    assert (chosen == -1).tolist() == (expected == NOT_FINITE).tolist() == [False, True, False, True, False]
    assert chosen[[0, 2, 4]].tolist() == expected[[0, 2, 4]].tolist()


def test_heads_of_other_widths_and_many_rows_are_left() -> None:
    assert FusedHead.of(make_head(288, usual_quantization())) is None
    fused = FusedHead.of(make_head(256, usual_quantization()))
    assert fused is not None
    assert fused.likeliest(torch.zeros(65, COLUMNS, dtype=torch.bfloat16)) is None


def test_an_engine_makes_no_logits_of_greedy_rows(checkpoint: Any) -> None:
    """Else nothing but its speed would show that it does."""
    path: Path = checkpoint("llama", torch_dtype="bfloat16", vocab_size=320)
    params, prompt = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True), list(range(3, 93))

    def refuse(*_: object) -> None:
        raise AssertionError("logits were made")

    settings = {"batch_invariant": False, "quantization": usual_quantization()}
    with stepped(model=str(path), speculative_config=None, **settings) as one:
        executor = one.core.executor
        assert isinstance(executor, LocalExecutor)
        expected = one.run("a", prompt, structs.replace(params, logprobs=1))
        executor.runner.model.compute_logits = refuse  # type: ignore[method-assign]
        made = one.run("b", prompt, params)
    assert made.error is None
    assert made.token_ids == expected.token_ids
    assert len(made.token_ids) == 4
