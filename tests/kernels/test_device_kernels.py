"""The Triton kernels of norms and of layers with states, on a CUDA device: against PyTorch, and rows to the bit."""

from __future__ import annotations

import itertools
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.kernels.device import square_sums
from baton.models.layer_cache import ScanRows
from baton.models.layers.causal_conv import CausalConv
from baton.models.layers.gated_delta import DeltaRule, GatedDeltaSpec
from baton.models.layers.layernorm import Fp32RMSNorm, RMSNorm
from baton.models.layers.linear import Build
from baton.models.layers.mamba2 import Mamba2, Mamba2Spec
from baton.models.layers.parallel import Share

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

L = TypeVar("L", bound=torch.nn.Module)
CUDA = torch.device("cuda")
STARTS = np.array([0, 1, 4, 9, 70], dtype=np.int32)
KEPT = np.array([0, 2, 3, 8, 30, 69])
MAMBA = Mamba2Spec(6, 8, 3, 12, 4)
DELTA = GatedDeltaSpec(2, 12, 4, 10, 4)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(layer: L) -> L:
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(0.5 * numbers(*parameter.shape, seed=seed))
    return layer


def norm_of(kind: str, size: int, dtype: torch.dtype) -> RMSNorm | Fp32RMSNorm:
    build = Build(dtype, CUDA)
    norm = RMSNorm(size, 1e-6, build) if kind == "rounded first" else Fp32RMSNorm(size, 1e-6, 1.0, build)
    norm.weight.data.copy_(1.0 + 0.1 * numbers(size))
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rounded first", "rounded once"])
@pytest.mark.parametrize("shape", [(5, 60), (1, 60), (5, 3, 20), (1, 3, 20)])
def test_norms_of_views_equal_those_of_copies(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows of a view do not lie side by side, whatever their number."""
    size = shape[-1]
    norm = norm_of(kind, size, dtype)
    view = numbers(*shape[:-1], 2 * size + 7, seed=1).to(CUDA, dtype)[..., 3 : 3 + size]
    wide = view.float() * torch.rsqrt(view.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    by_weight = norm.weight * wide.to(dtype) if kind == "rounded first" else (wide * (1.0 + norm.weight)).to(dtype)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1.6e-2, "atol": 1e-2}
    torch.testing.assert_close(norm(view), by_weight, **close)
    assert torch.equal(norm(view), norm(view.clone()))
    torch.testing.assert_close(square_sums(view), view.float().pow(2).sum(-1, keepdim=True))


@pytest.mark.parametrize("size", [60, 576, 4096])
def test_a_norm_does_not_depend_on_other_rows(size: int) -> None:
    norm = RMSNorm(size, 1e-6, Build(torch.float32, CUDA))
    norm.weight.data.copy_(numbers(size))
    rows = numbers(130, size, seed=1).to(CUDA)
    assert torch.equal(norm(rows), torch.cat([norm(row) for row in rows.split(1)]))
    assert torch.equal(norm(rows), torch.cat([norm(row) for row in rows.split(17)]))


def run(kind: str, where: torch.device, begin: int, stop: int, state: Tensor, kept: np.ndarray) -> tuple[Tensor, ...]:
    """Rows `begin` to `stop` of four requests on a device, those of a cut request after its `state`."""
    starts = np.clip(STARTS, begin, stop) - begin
    rows = ScanRows(starts.astype(np.int32), kept)
    on_device, before, build = where.type == "cuda", state.to(where), Build(torch.float32, where, True)
    if kind == "conv":
        conv = filled(CausalConv({"x": Share(0, 10, 10)}, 4, True, build))
        mixed, last = conv(numbers(70, 14, seed=9)[begin:stop].to(where), 2, before, rows)
        return mixed, last
    # b and a after the rows of the convolution; a for each channel of a key in "kimi".
    ends = {"mamba2": (48, 6), "delta": (40, 8), "kimi": (0, 4 + 4 * 12)}
    wide, (first, heads) = sum((MAMBA if kind == "mamba2" else DELTA).conv_sizes), ends[kind]
    mixed = numbers(70, wide, seed=8)[begin:stop].to(where)
    projected = numbers(70, first + wide + heads, seed=9)[begin:stop].to(where)
    if kind == "mamba2":
        mamba = filled(Mamba2(MAMBA, 32, 1e-6, 0, build))
        return (mamba._scan_torch if on_device else mamba._scan_cpu)(projected, mixed, before, rows)
    rate, dt_bias = -numbers(4, seed=6).exp().to(where), numbers(heads - 4, seed=7).to(where)
    first = projected.shape[1] - heads
    return DeltaRule(DELTA, rate, dt_bias)(projected, first, mixed, before, rows, not on_device)


SHAPES = {"conv": (4, 10, 3), "mamba2": (4, 6, 96), "delta": (4, 4, 120), "kimi": (4, 4, 120)}


@pytest.mark.parametrize("kind", SHAPES)
def test_recurrences_equal_those_of_the_cpu(kind: str) -> None:
    state = numbers(*SHAPES[kind], seed=5)
    here, there = (run(kind, where, 0, 70, state.clone(), KEPT) for where in (CUDA, torch.device("cpu")))
    for made, wanted in zip(here, there, strict=True):
        torch.testing.assert_close(made.cpu(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_recurrence_does_not_depend_on_where_steps_end(kind: str) -> None:
    state = numbers(*SHAPES[kind], seed=5)
    whole, _ = run(kind, CUDA, 0, 70, state, np.array([0, 3, 8, 69]))
    parts, now = [], state
    for begin, stop in itertools.pairwise([0, 2, 3, 20, 21, 70]):
        last = np.minimum(STARTS[1:], stop) - 1 - begin
        runs = (np.minimum(STARTS[1:], stop) > np.maximum(STARTS[:-1], begin)).nonzero()[0]
        part, after = run(kind, CUDA, begin, stop, now, last[runs])
        now = now.clone()
        now[runs] = after.cpu()
        parts.append(part)
    assert torch.equal(whole, torch.cat(parts))
