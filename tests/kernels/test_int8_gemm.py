"""Products with int8 weights: the rounded weight's, with the same bits in every batch and on every CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from baton.errors import ConfigError
from baton.kernels.cpu.gemm.int8_avx2 import AVX2
from baton.kernels.cpu.gemm.int8_gemm import HAS_INT8_PRODUCTS, Int8Weight, multiply_narrowed, narrow_piece
from baton.kernels.cpu.tiles import may_use_tiles
from baton.models.layers.linear import Build, Linear
from baton.models.loading.dtypes import check_quantization
from baton.models.loading.loader import load_model
from testkit.int8 import PATHS, exact_products, kept_rows, multiply_on

pytestmark = pytest.mark.skipif(not HAS_INT8_PRODUCTS, reason="this CPU has no AVX2")
DEMO = "models/baton-demo-llama"


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize(("outputs", "columns"), [(64, 64), (192, 576), (100, 33), (1, 1), (65, 10), (128, 130)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_of_any_batch_are_the_rounded_weights_products(outputs: int, columns: int, has_bias: bool) -> None:
    weight, x, bias = normal(outputs, columns), normal(25, columns), normal(outputs) if has_bias else None
    one = Int8Weight(weight)
    whole = one.multiply(x, bias)
    assert torch.equal(whole, exact_products(x, weight, bias))
    assert [
        height
        for height in (1, 2, 3, 4, 6, 11, 12, 13)
        if not torch.equal(torch.cat([one.multiply(part, bias) for part in x.split(height)]), whole)
    ] == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("outputs", "columns"), [(64, 64), (128, 576), (192, 100), (100, 33)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_path_has_the_bits_of_exact_sums(path: str, outputs: int, columns: int, has_bias: bool) -> None:
    weight, x, bias = normal(outputs, columns), normal(13, columns), normal(outputs) if has_bias else None
    expected = exact_products(x, weight, bias)
    for num_rows in (1, 2, 3, 4, 5, 6, 13):
        assert torch.equal(multiply_on(PATHS[path], x[:num_rows], weight, bias), expected[:num_rows]), num_rows


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("outputs", "columns"), [(64, 64), (96, 100), (33, 7)])
def test_every_number_of_rows_has_the_same_bits(path: str, outputs: int, columns: int) -> None:
    weight, x, bias = normal(outputs, columns), normal(65, columns), normal(outputs)
    expected = exact_products(x, weight, bias)
    assert [
        count
        for count in range(1, len(x) + 1)
        if not torch.equal(multiply_on(PATHS[path], x[:count], weight, bias), expected[:count])
    ] == []


def test_paths_agree_for_the_smallest_and_largest_numbers() -> None:
    """Also where a product is subnormal, zero or infinite."""
    powers = torch.arange(-133, 127, 4)
    x = torch.ldexp(normal(len(powers), 192).float(), powers[:, None]).bfloat16()
    x[3], x[:, 64:128] = 0.0, torch.ldexp(x[:, 64:128].float(), powers.flip(0)[:, None] // 2).bfloat16()
    weight = torch.ldexp(normal(128, 192).float(), torch.arange(128)[:, None] - 64).bfloat16()
    made = {name: multiply_on(path, x, weight, None).view(torch.int16) for name, path in PATHS.items()}
    first = next(iter(made.values()))
    assert [name for name, bits in made.items() if not torch.equal(bits, first)] == []


@pytest.mark.parametrize("path", PATHS)
def test_the_largest_numbers_do_not_overflow(path: str) -> None:
    signs = torch.ones(4, 128).bfloat16()
    signs[1], signs[2, ::2], signs[3, 64:] = -1, -1, -1
    x, weight = 1.9921875 * signs, 127 * signs.repeat(16, 1)
    assert torch.equal(multiply_on(PATHS[path], x, weight, None), (x.double() @ weight.double().T).bfloat16())


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


@pytest.mark.parametrize("path", PATHS)
def test_a_row_that_is_not_finite_changes_no_other(path: str) -> None:
    weight, x = normal(70, 30), normal(20, 30)
    clean = multiply_on(PATHS[path], x, weight, None)
    x[5], x[17, 3], x[18, 29] = torch.nan, torch.inf, -torch.inf
    made = multiply_on(PATHS[path], x, weight, None)
    bad = [5, 17, 18]
    assert made[bad].isnan().all()
    others = [row for row in range(20) if row not in bad]
    assert torch.equal(made[others], clean[others])


@pytest.mark.parametrize("num_rows", [1, 11, 12, 37])
def test_the_choice_of_a_path_by_rows_and_permission_changes_no_bit(num_rows: int) -> None:
    weight, x = normal(128, 130), normal(num_rows, 130)
    usual = PATHS.get("vnni", AVX2)
    for tiles in {0, int(may_use_tiles())}:
        narrow, multiply = (partial(one, tiles) for one in (narrow_piece, multiply_narrowed))
        path = replace(usual, narrow_piece=narrow, multiply_narrowed=multiply)
        assert torch.equal(multiply_on(path, x, weight, None), exact_products(x, weight, None)), tiles


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
    with pytest.raises(ConfigError, match="quantization: int8 needs a CPU with AVX2"):
        check_quantization("int8", torch.bfloat16, has_products=False)
