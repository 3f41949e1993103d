"""With `batch_invariant`, a row's bits depend only on its own request: not on chunks, batch or page size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.attention.base import AttnBatch
from baton.engine.attention.registry import get_backend
from baton.kernels.cpu.elementwise import silu_mul
from baton.models.layer_cache import AttnRows
from baton.models.layers.headwise import invariant_headwise
from baton.models.layers.layernorm import RMSNorm
from baton.models.layers.linear import Build, Linear, block_heights, blocks, cancelling_operands
from baton.models.layers.rotary import rotate
from baton.models.loading.loader import load_model
from testkit.handoffs.paged import PagedSequence

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (100, 72), (176, 64)])
@pytest.mark.parametrize("is_packed", [True, False])
def test_linear_rows_do_not_depend_on_the_number_of_rows(
    dtype: torch.dtype, inputs: int, outputs: int, is_packed: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    layer = Linear(inputs, outputs, Build(dtype, torch.device("cpu"), batch_invariant=True), bias=True)
    assert layer.bias is not None
    assert layer.weight is not None
    layer.weight.copy_(torch.randn(outputs, inputs, generator=generator))
    layer.bias.copy_(torch.randn(outputs, generator=generator))
    x = torch.randn(333, inputs, generator=generator).to(dtype)
    weight = layer.weight.clone()
    if is_packed:
        layer.pack()
    whole = layer(x)
    # The bias is added to rounded products, so bfloat16 may differ by a rounding of a product.
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    expected = torch.nn.functional.linear(x, weight, layer.bias)
    torch.testing.assert_close(whole, expected, rtol=tolerance / 10, atol=tolerance)
    assert [
        (start, stop)
        for start, stop in [(0, 1), (5, 6), (7, 9), (10, 13), (16, 32), (1, 70), (99, 333)]
        if not torch.equal(layer(x[start:stop]), whole[start:stop])
    ] == []


def test_no_rows_give_no_rows() -> None:
    layer = Linear(64, 32, Build(torch.float32, torch.device("cpu"), batch_invariant=True))
    assert layer(torch.empty(0, 64)).shape == (0, 32)


def test_block_heights_are_usable() -> None:
    heights = block_heights(64, 64, torch.float32, torch.device("cpu"), 1)
    assert list(heights) == sorted(heights, reverse=True)
    assert all(taller % heights[-1] == 0 for taller in heights)


@given(total=st.integers(0, 2000), smallest=st.integers(0, 4), tallest=st.integers(4, 9))
def test_blocks_hold_all_rows_and_few_more(total: int, smallest: int, tallest: int) -> None:
    """Every block but the last is full, and the last one wastes little, or nothing that costs time."""
    heights = tuple(2**power for power in range(tallest, smallest - 1, -1))
    chosen = blocks(total, heights)
    assert set(chosen) <= set(heights)
    spare = sum(chosen) - total
    assert 0 <= spare <= max(16, sum(chosen) // 8)
    assert not chosen or spare < chosen[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [576, 36])
def test_rows_between_products_depend_on_nothing_else(dtype: torch.dtype, size: int) -> None:
    """Not on other rows or threads; a residual added with the norm gives the same as one added before."""
    generator = torch.Generator().manual_seed(0)
    x, delta = (torch.randn(70, size, generator=generator).to(dtype) for _ in range(2))
    norm = RMSNorm(size, 1e-5, Build(dtype, torch.device("cpu")))
    norm.weight.copy_(torch.randn(size, generator=generator))
    angles = torch.randn(70, size // 4, generator=generator)
    cos, sin = (table.to(dtype).unsqueeze(1) for table in (angles.cos(), angles.sin()))

    def rows(some: slice) -> list[Tensor]:
        total, normed = norm.add_and_norm(x[some], delta[some])
        heads = rotate(x[some].clone().view(-1, 2, size // 2), 1, cos[some], sin[some])
        return [total, normed, norm(total), silu_mul(x[some]), heads]

    whole = rows(slice(None))
    assert torch.equal(whole[0], x + delta)
    assert torch.equal(whole[1], whole[2])
    assert torch.equal(whole[4][:, 1], x.view(70, 2, -1)[:, 1])
    assert [
        some
        for some in (slice(0, 1), slice(31, 64))
        if not all(torch.equal(part, full[some]) for part, full in zip(rows(some), whole, strict=True))
    ] == []
    torch.set_num_threads(2)
    try:
        assert all(torch.equal(part, full) for part, full in zip(rows(slice(None)), whole, strict=True))
    finally:
        torch.set_num_threads(1)


def test_silu_mul_is_accurate_and_invariant() -> None:
    x = torch.randn(64, 2 * 73, generator=torch.Generator().manual_seed(0)) * 8
    gate, up = x.double().chunk(2, dim=-1)
    whole = silu_mul(x)
    torch.testing.assert_close(whole.double(), torch.nn.functional.silu(gate) * up, rtol=1e-6, atol=1e-7)
    for row in range(64):
        assert torch.equal(silu_mul(x[row : row + 1])[0], whole[row])
    extreme = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0] + [1.0] * 5])
    torch.testing.assert_close(silu_mul(extreme), torch.nn.functional.silu(extreme[:, :5]), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model_type", "overrides"), [("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 37})]
)
def test_model_rows_are_equal_to_the_bit(
    model_type: str, overrides: dict[str, Any], dtype: str, checkpoint: Any
) -> None:
    model = load_model(checkpoint(model_type, **overrides), dtype, batch_invariant=True)
    backend = get_backend("paged_cpu", "cpu")
    ids = torch.randint(0, model.vocab_size, (140,), generator=torch.Generator().manual_seed(1))

    @torch.inference_mode()
    def logits(chunks: list[int], page_size: int) -> torch.Tensor:
        sequence = PagedSequence(model.kv_layers, backend, model.build.dtype, page_size)
        rows, start = [], 0
        for size in chunks:
            hidden, _ = model(ids[start : start + size], sequence.rows(start, start + size), sequence)
            rows.append(model.compute_logits(hidden))
            start += size
        return torch.cat(rows)

    whole = logits([140], 16)
    assert torch.equal(logits([1] * 140, 16), whole)
    assert torch.equal(logits([3, 48, 48, 4, 37], 7), whole)
    assert torch.equal(logits([64, 1, 75], 1), whole)


@torch.inference_mode()
def test_requests_beside_each_other_do_not_change_bits(checkpoint: Any) -> None:
    model = load_model(checkpoint("llama"), batch_invariant=True)
    backend = get_backend("paged_cpu", "cpu")
    generator = torch.Generator().manual_seed(2)
    lengths = [1, 90, 17, 5]
    prompts = [torch.randint(0, model.vocab_size, (n,), generator=generator) for n in lengths]
    spec, page_size, per_request = model.kv_layers[0], 8, 12
    shape = (1 + 4 * per_request, 3, 2, page_size, spec.num_kv_heads, spec.head_dim)
    kv = torch.full(shape, float("nan"))
    table = np.arange(1, 1 + 4 * per_request, dtype=np.int32).reshape(4, per_request)
    positions = np.concatenate([np.arange(n) for n in lengths])
    batch = AttnBatch(np.cumsum([0, *lengths]).astype(np.int32), positions, table)

    def attend(layer: int, rows: AttnRows) -> torch.Tensor:
        return backend.write_and_attend(kv, layer, rows, batch, None)

    together, _ = model(torch.cat(prompts), torch.from_numpy(positions), attend)
    for prompt, rows in zip(prompts, together.split(lengths), strict=True):
        alone = PagedSequence(model.kv_layers, backend)
        assert torch.equal(model(prompt, alone.rows(0, len(prompt)), alone)[0], rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "inner", "columns"), [(4, 16, 32), (3, 9, 21), (2, 64, 40)])
def test_headwise_rows_do_not_depend_on_the_number_of_rows(
    heads: int, inner: int, columns: int, dtype: torch.dtype
) -> None:
    """With inputs that leave only the rounding errors of a sum, so that any other order would show."""
    generator = torch.Generator().manual_seed(3)
    x, weight = cancelling_operands(
        torch.randn(333, heads, inner, generator=generator), torch.randn(heads, columns, inner, generator=generator)
    )
    x, weight = x.to(dtype), weight.to(dtype).transpose(1, 2)
    whole = invariant_headwise(x, weight)
    assert whole.count_nonzero() > 0
    assert [
        (start, stop)
        for start, stop in [(0, 1), (5, 6), (7, 9), (10, 13), (16, 32), (1, 70), (99, 333)]
        if not torch.equal(invariant_headwise(x[start:stop], weight), whole[start:stop])
    ] == []
