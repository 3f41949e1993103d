"""Products with int8 weights: the rounded weight's, with the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baton.errors import ConfigError
from baton.kernels.cpu.int8_gemm import HAS_INT8_PRODUCTS, Int8Weight
from baton.models.layers.linear import Build, Linear
from baton.models.loading.dtypes import check_quantization
from baton.models.loading.loader import load_model
from testkit.int8 import kept_rows, kept_weight

pytestmark = pytest.mark.skipif(not HAS_INT8_PRODUCTS, reason="this CPU has no AVX-512 BF16 and VNNI")
DEMO = "models/baton-demo-llama"


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize(("outputs", "columns"), [(64, 64), (192, 576), (100, 33), (1, 1), (65, 10), (128, 130)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_of_any_batch_are_the_rounded_weights_products(outputs: int, columns: int, has_bias: bool) -> None:
    weight, x, bias = normal(outputs, columns), normal(25, columns), normal(outputs) if has_bias else None
    one = Int8Weight(weight)
    whole = one.multiply(x, bias)
    expected = kept_rows(x) @ kept_weight(weight).T + (0 if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), expected, rtol=2**-7, atol=2**-9)
    assert [
        height
        for height in (1, 2, 3, 4, 6, 11, 12, 13)
        if not torch.equal(torch.cat([one.multiply(part, bias) for part in x.split(height)]), whole)
    ] == []


def test_a_weight_is_kept_within_half_a_step_of_its_group_and_zeros_stay() -> None:
    weight = torch.zeros(3, 200).bfloat16()
    weight[0, 1], weight[1, 2], weight[1, 130:] = 3.0, -0.5, normal(70)[:70] / 1000
    made = Int8Weight(weight).multiply(torch.eye(200).bfloat16(), None).T.double()
    peak = F.pad(weight.abs(), (0, 56)).view(3, 4, 64).amax(dim=2).repeat_interleave(64, 1)[:, :200].double()
    assert bool(((made - weight.double()).abs() <= peak * (0.5 / 127 + 2**-8)).all())
    assert made[2].count_nonzero() == 0


def test_numbers_of_a_row_are_exact_from_a_64th_of_their_groups_largest_on() -> None:
    x = torch.zeros(2, 128).bfloat16()
    x[0, :4], x[1, 3], x[1, 64:] = torch.tensor([1.9921875, 0.0312255859375, -1.0, 0.03125]), -1e30, normal(64) / 1e4
    assert torch.equal(kept_rows(x[:1]), x[:1].double())
    one = Int8Weight((torch.eye(128) * 127).bfloat16())
    assert torch.equal(one.multiply(x, None).double(), kept_rows(x).mul(127).bfloat16().double())


def test_a_row_that_is_not_finite_changes_no_other() -> None:
    one, x = Int8Weight(normal(70, 30)), normal(14, 30)
    clean = one.multiply(x, None)
    x[5] = torch.nan
    made = one.multiply(x, None)
    assert made[5].isnan().all()
    others = [row for row in range(14) if row != 5]
    assert torch.equal(made[others], clean[others])


def test_a_layer_keeps_no_other_copy_of_its_weight() -> None:
    layer = Linear(64, 128, Build(torch.bfloat16, torch.device("cpu"), quantization="int8"))
    assert layer.weight is not None
    layer.weight.copy_(normal(128, 64))
    weight, x = layer.weight.detach().clone(), normal(5, 64)
    layer.pack()
    assert layer.weight is None
    assert layer._own is not None
    assert layer._own.nbytes == 128 * 64 + 2 * 128
    assert torch.equal(layer(x), Int8Weight(weight).multiply(x, None))


def test_int8_is_refused_for_other_dtypes_and_cpus() -> None:
    with pytest.raises(ConfigError, match="dtype: must be bfloat16 with quantization int8, is float32"):
        load_model(DEMO, "float32", quantization="int8")
    with pytest.raises(ConfigError, match="quantization: int8 needs a CPU with AVX-512 BF16 and VNNI"):
        check_quantization("int8", torch.bfloat16, has_products=False)
