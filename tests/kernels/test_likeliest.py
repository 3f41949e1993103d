"""The likeliest tokens without logits are those of the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from baton.engine.executor import LocalExecutor
from baton.engine.sampling.sampler import choose_tokens
from baton.engine.step_plans import NOT_FINITE
from baton.kernels.cpu.gemm.small_gemm import MAX_ROWS
from baton.kernels.cpu.greatest import first_greatest
from baton.models.fused_head import FusedHead
from baton.models.layers.linear import Build, Linear, cancelling_operands
from baton.sampling_params import SamplingParams
from testkit.engines import request, stepped
from testkit.layers import HAS_OWN_PRODUCTS, LayerKind, skip_unless_in_place, usual_quantization

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not HAS_OWN_PRODUCTS, reason="no products of bfloat16 of our own"),
]
COLUMNS = 96
NONE = np.zeros(0, dtype=np.int64)


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
@pytest.mark.parametrize("num_rows", [1, 7, 64, 97, 530])
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
    kept = np.flatnonzero(np.arange(num_rows) % 5 == 1)
    torch.set_num_threads(threads)
    try:
        made = fused.likeliest(hidden, kept)
    finally:
        torch.set_num_threads(1)
    assert made is not None
    # With more rows the linear may be oneDNN's product.
    logits, (chosen, own) = torch.cat([lm_head(rows) for rows in hidden.split(MAX_ROWS)]).float(), made
    assert chosen.tolist() == logits.argmax(dim=-1).tolist()
    assert chosen.max() < vocab // 4, "an equal logit with a lower number is before it"
    assert torch.equal(own, logits[torch.from_numpy(kept)])


@torch.inference_mode()
def test_a_row_with_a_logit_that_is_not_finite_has_no_token() -> None:
    lm_head = make_head(256, usual_quantization())
    hidden = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(2)).bfloat16()
    hidden[1], hidden[3, 7] = torch.nan, torch.inf
    fused = FusedHead.of(lm_head)
    assert fused is not None
    made = fused.likeliest(hidden, NONE)
    assert made is not None
    chosen, expected = made[0], choose_tokens(lm_head(hidden).float(), None)
    assert (chosen == -1).tolist() == (expected == NOT_FINITE).tolist() == [False, True, False, True, False]
    assert chosen[[0, 2, 4]].tolist() == expected[[0, 2, 4]].tolist()


ASCENDING = torch.arange(64 * 9)
SHUFFLED = torch.randperm(len(ASCENDING), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("values", [ASCENDING, ASCENDING.flip(0), SHUFFLED], ids=["ascending", "descending", "mixed"])
@torch.inference_mode()
def test_later_tokens_of_each_thread_are_compared_too(values: torch.Tensor) -> None:
    """Beyond a block's logits, of all signs."""
    vocab, build = len(values), Build(torch.bfloat16, torch.device("cpu"), quantization=usual_quantization())
    lm_head = Linear(COLUMNS, vocab, build)
    assert lm_head.weight is not None
    lm_head.weight.copy_(((values - vocab // 2) / 512).round(decimals=2)[:, None].expand(vocab, COLUMNS))
    lm_head.pack()
    fused = FusedHead.of(lm_head)
    assert fused is not None
    hidden = torch.tensor([1.0, -1.0, 0.0, 0.3])[:, None].expand(4, COLUMNS).bfloat16().contiguous()
    made = fused.likeliest(hidden, NONE)
    assert made is not None
    assert made[0].tolist() == lm_head(hidden).float().argmax(dim=-1).tolist()


@torch.inference_mode()
def test_logits_have_the_bits_of_a_batch_invariant_head() -> None:
    """Of many rows oneDNN may sum the columns in another order, and then tokens would depend on the batch."""
    x, weight = cancelling_operands(*torch.randn(2, 320, 576, generator=torch.Generator().manual_seed(5)))
    lm_head = Linear(576, 320, Build(torch.bfloat16, torch.device("cpu"), batch_invariant=True))
    assert lm_head.weight is not None
    lm_head.weight.copy_(weight)
    lm_head.pack()
    fused = FusedHead.of(lm_head)
    assert fused is not None
    hidden = x[:97].bfloat16()
    made = fused.likeliest(hidden, np.arange(len(hidden)))
    assert (made is not None) == lm_head.few_rows_match()
    if made is not None:
        logits = lm_head(hidden).float()
        assert torch.equal(made[1], logits)
        assert made[0].tolist() == logits.argmax(dim=-1).tolist()


def test_heads_of_other_widths_are_left() -> None:
    assert FusedHead.of(make_head(288, usual_quantization())) is None


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 200])
@torch.inference_mode()
def test_floats_are_compared_as_torch_compares_them(columns: int) -> None:
    x = torch.randn(40, columns, generator=torch.Generator().manual_seed(4)).bfloat16().float()
    x[1], x[2], x[3] = -x[1].abs(), 0.0, -0.0
    x[2, columns // 2] = -0.0
    x[4] = torch.finfo(torch.float32).min
    x[5, columns // 2], x[6, -1], x[7, 0] = torch.nan, -torch.inf, torch.inf
    x[8, -1] = torch.finfo(torch.float32).max
    x[9] = torch.arange(columns)
    expected = x.argmax(dim=-1)
    expected[5:8] = -1
    assert first_greatest(x).tolist() == expected.tolist()


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


@pytest.mark.parametrize("num_rows", [3, 40])
def test_only_rows_that_need_logits_get_them(checkpoint: Any, num_rows: int) -> None:
    """Tokens and logprobs are those of an engine that makes logits of all rows."""
    path: Path = checkpoint("llama", torch_dtype="bfloat16", vocab_size=320)
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    others = [
        structs.replace(greedy, logprobs=2),
        structs.replace(greedy, temperature=0.8, seed=5),
        structs.replace(greedy, temperature=0.8, seed=5, logprobs=1),
        structs.replace(greedy, repetition_penalty=1.5),
    ]
    params = [others[i % 8 // 2] if i % 2 and i < 16 else greedy for i in range(num_rows)]
    prompts = [[3 + i, 90 - i, 7] for i in range(num_rows)]
    settings = {"batch_invariant": False, "quantization": usual_quantization(), "max_num_seqs": num_rows}
    assert _run(path, settings, prompts, params, True) == _run(path, settings, prompts, params, False)


def _run(
    path: Path, settings: dict[str, Any], prompts: list[list[int]], params: list[SamplingParams], fuses: bool
) -> list[Any]:
    """Results of requests that run together; some rows of a step need logits, others do not."""
    with stepped(model=str(path), speculative_config=None, **settings) as one:
        executor = one.core.executor
        assert isinstance(executor, LocalExecutor)
        whole, sizes = executor.runner.likeliest, []

        def likeliest(output: Any, rows: Any, kept: Any) -> Any:
            sizes.append((len(rows), len(kept)))
            return whole(output, rows, kept) if fuses else None

        executor.runner.likeliest = likeliest  # type: ignore[method-assign]
        streams = [one.add(request(str(i), *of)) for i, of in enumerate(zip(prompts, params, strict=True))]
        while not all(stream.ended for stream in streams):
            one.step()
        assert any(0 < kept < rows == len(prompts) for rows, kept in sizes)
        return [stream.result for stream in streams]
