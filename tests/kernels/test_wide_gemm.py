"""Products of bfloat16 without instructions for it: right, and the same bits in every batch and on every thread."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from baton.kernels.cpu.gemm.wide_gemm import WideWeight
from baton.models.layers.linear import cancelling_operands

pytestmark = pytest.mark.usefixtures("one_thread")
# Each pass, and what is left after the tallest.
HEIGHTS = (*range(1, 14), 25)


def _operands(rows: int, outputs: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(outputs)
    x, weight = cancelling_operands(
        torch.randn(rows, columns, generator=generator), torch.randn(outputs, columns, generator=generator)
    )
    return x.bfloat16(), weight.bfloat16()


@pytest.mark.parametrize(("outputs", "columns"), [(64, 576), (192, 1536), (320, 126), (100, 64), (8, 2)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_depend_on_no_other_row_and_on_no_thread(outputs: int, columns: int, has_bias: bool) -> None:
    x, weight = _operands(530, outputs, columns)
    bias = weight[:, 0].contiguous() if has_bias else None
    made = WideWeight(weight)
    whole = made.multiply(x, bias)
    # The products cancel, so that only rounding errors remain; a lost or shifted bias shows.
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    torch.testing.assert_close(whole.double(), expected, rtol=1e-2, atol=1e-3)
    for height in HEIGHTS:
        rows = [made.multiply(block, bias) for block in torch.split(x[:26], height)]
        assert torch.equal(torch.cat(rows), whole[:26]), height
    torch.set_num_threads(2)
    try:
        assert torch.equal(made.multiply(x, bias), whole)
    finally:
        torch.set_num_threads(1)


def test_sums_run_in_order_of_the_columns() -> None:
    """1 + 2^-12 rounds to 1 in bfloat16, but 4,096 of them are another 1."""
    x = torch.tensor([[1.0, *[2.0**-12] * 4095, 2.0**-12, -1.0]]).bfloat16()
    assert WideWeight(torch.ones(1, 4098).bfloat16()).multiply(x, None).item() == 1.0
    # 2^24 + 1 is 2^24 in float32: only a sum in order loses both ones.
    lost = torch.tensor([[2.0**24, 1.0, 1.0, -(2.0**24)]]).bfloat16()
    assert WideWeight(torch.ones(1, 4).bfloat16()).multiply(lost, None).item() == 0.0


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    x, weight = _operands(7, 64, 128)
    made = WideWeight(weight)
    whole = made.multiply(x, None)
    x[2], x[5] = torch.nan, torch.inf
    spoilt = made.multiply(x, None)
    kept = [0, 1, 3, 4, 6]
    assert torch.equal(spoilt[kept], whole[kept])
    assert not spoilt[[2, 5]].isfinite().any()


def test_last_outputs_have_the_bits_of_all() -> None:
    x, weight = _operands(9, 320, 64)
    bias = weight[:, 0].contiguous()
    made = WideWeight(weight)
    assert torch.equal(made.multiply(x, bias[128:], first=128), made.multiply(x, bias)[:, 128:])


_CHOICE = """
from baton.kernels.cpu.bf16_dot import HAS_BF16_PAIRS
from baton.kernels.cpu.gemm.wide_gemm import HAS_WIDE_PRODUCTS
print(HAS_BF16_PAIRS, HAS_WIDE_PRODUCTS)
"""


@pytest.mark.parametrize(
    ("name", "features", "printed"), [("haswell", "+avx2,+fma", "False True"), ("nehalem", "+sse4.2", "False False")]
)
def test_they_are_for_a_cpu_with_fused_multiply_adds(name: str, features: str, printed: str) -> None:
    forced = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    told = subprocess.run([sys.executable, "-c", _CHOICE], env=forced, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == printed
