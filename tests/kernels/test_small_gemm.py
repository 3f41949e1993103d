"""A few rows times a packed weight: the rows are right, and bit-identical to oneDNN's if a probe says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.kernels.cpu.gemm import small_gemm
from baton.models.layers.linear import Build, Linear, cancelling_operands, packed

pytestmark = pytest.mark.usefixtures("one_thread")


def _made(outputs: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Rows, a weight, its packed copy and the copy's address; skips the test on a CPU that cannot read it."""
    generator = torch.Generator().manual_seed(outputs)
    x, weight = cancelling_operands(
        torch.randn(small_gemm.MAX_ROWS, columns, generator=generator),
        torch.randn(outputs, columns, generator=generator),
    )
    x, weight = x.bfloat16(), weight.bfloat16()
    blocked = packed(weight)
    at = None if blocked is None else small_gemm.packed_address(weight, blocked)
    if blocked is None or at is None:
        pytest.skip("this CPU has no products of bfloat16 pairs, or packs weights otherwise")
    return x, weight, blocked, at


@pytest.mark.parametrize(("outputs", "columns"), [(64, 576), (192, 1536), (320, 128)])
def test_rows_depend_on_no_other_row_and_on_no_thread(outputs: int, columns: int) -> None:
    x, weight, _copy, at = _made(outputs, columns)
    bias = weight[:, 0].contiguous()
    whole = small_gemm.multiply_packed(x, at, outputs, bias)
    # The products cancel, so that only rounding errors remain; a lost or shifted bias shows.
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole.double(), expected, rtol=1e-2, atol=1e-3)
    for height in (1, 2, 3, 5, 8, 13):
        rows = [small_gemm.multiply_packed(block, at, outputs, bias) for block in torch.split(x, height)]
        assert torch.equal(torch.cat(rows), whole), height
    torch.set_num_threads(2)
    try:
        assert torch.equal(small_gemm.multiply_packed(x, at, outputs, bias), whole)
    finally:
        torch.set_num_threads(1)


def test_a_layer_uses_it_and_keeps_its_bits_beyond_its_rows() -> None:
    """With batch invariance a row of a tall block, which oneDNN multiplies, has the same bits."""
    x, weight, _, _ = _made(128, 1536)
    layer = Linear(1536, 128, Build(torch.bfloat16, torch.device("cpu"), batch_invariant=True))
    assert layer.weight is not None
    layer.weight.copy_(weight)
    layer.pack()
    tall = layer(x.repeat(3, 1))
    assert torch.equal(layer(x[5:6]), tall[5:6])
    assert torch.equal(layer(x[:40]), tall[:40])
    # Non-contiguous rows are multiplied too.
    assert torch.equal(layer(x.repeat(1, 2)[:3, :1536]), tall[:3])


@pytest.mark.parametrize(("first", "rows"), [(64, 1), (192, 7), (192, 192), (100, 9)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layers_last_outputs_have_the_bits_of_all(bias: bool, first: int, rows: int) -> None:
    x, weight, _, _ = _made(320, 1536)
    layer = Linear(1536, 320, Build(torch.bfloat16, torch.device("cpu"), batch_invariant=True), bias)
    assert layer.weight is not None
    layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.copy_(weight[:, 0])
    layer.pack()
    x = x.repeat(3, 1)[:rows]
    expected = layer(x)[:, first:]
    assert torch.equal(layer.outputs_from(x, first), expected)
    assert torch.equal(layer.outputs_from(x.repeat(1, 2)[:, :1536], first), expected)


def test_a_copy_that_lies_otherwise_is_not_read() -> None:
    """Neither with sizes that would be padded, nor with another weight's numbers."""
    _, weight, _, _ = _made(64, 576)
    other = packed(weight.flip(0))
    assert other is not None
    assert small_gemm.packed_address(weight, other) is None


@pytest.mark.parametrize("shape", [(100, 64), (64, 37)])
def test_a_shape_without_whole_blocks_is_not_read(shape: Any) -> None:
    odd = torch.randn(*shape).bfloat16()
    if (blocked := packed(odd)) is None:
        pytest.skip("oneDNN has no products of bfloat16 on this CPU")
    assert small_gemm.packed_address(odd, blocked) is None
