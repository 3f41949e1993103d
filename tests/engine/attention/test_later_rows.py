"""A row depends on no token that it does not see, and on no other request, even if these are not finite.

A draft whose forward overflows is in the batch beside known tokens. Excluding its keys by a weight of 0 is not enough:
0 times NaN is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.attention.base import AttnBatch
from baton.engine.attention.latent import PagedLatentAttention
from baton.engine.attention.registry import get_backend
from baton.models.layer_cache import AttnRows, LatentRows
from baton.models.layers import mamba2_torch
from baton.models.layers.headwise import headwise, invariant_headwise
from baton.models.layers.linear import Build, Linear
from baton.models.layers.moe import MoE
from baton.models.layers.specs import MoESpec
from testkit.recurrences import HIDDEN, begin, run
from tests.models import test_mamba2 as mamba2

pytestmark = pytest.mark.usefixtures("one_thread")
BAD = [math.nan, math.inf, -math.inf]
NUM_TRIALS = 12
# Maps the rows of two requests [T, ...] to a layer's output.
Layer = Callable[[Tensor], Tensor]


def normal(random: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(random.standard_normal(shape)).to(dtype)


@dataclass(frozen=True)
class Cut:
    """Two requests' rows [0, split) and [split, total); the first's rows from `bad` on are not finite."""

    bad: int
    split: int
    total: int

    @classmethod
    def random(cls, random: np.random.Generator, most: int) -> Cut:
        split = int(random.integers(2, most))
        return cls(int(random.integers(1, split)), split, split + int(random.integers(1, 9)))

    @property
    def starts(self) -> np.ndarray:
        return np.array([0, self.split, self.total], dtype=np.int32)

    def spoil(self, x: Tensor, value: float, part: float, random: np.random.Generator) -> Tensor:
        """Replace some of each bad row's elements by `value`."""
        rows = x[self.bad : self.split]
        hit = torch.from_numpy(random.random(rows.shape) < part)
        hit.view(len(rows), -1)[:, 0] = True
        x = x.clone()
        x[self.bad : self.split] = rows.masked_fill(hit, value)
        return x

    def check(self, clean: Tensor, spoiled: Tensor) -> None:
        assert torch.equal(spoiled[: self.bad], clean[: self.bad])
        assert torch.equal(spoiled[self.split :], clean[self.split :])
        # A non-finite row stays non-finite.
        assert not spoiled[self.bad : self.split].flatten(1).isfinite().all(dim=1).any()


def cases() -> list[tuple[int, float, float]]:
    return [(seed, BAD[seed % 3], (0.1, 1.0)[seed % 2]) for seed in range(NUM_TRIALS)]


def pages(cut: Cut, page_size: int, batch_positions: tuple[int, int] = (0, 0)) -> AttnBatch:
    """Rows of both requests, which begin at these positions; page ids ascend."""
    first, second = batch_positions
    ends = first + cut.split, second + cut.total - cut.split
    columns = -(-max(ends) // page_size)
    table = np.arange(1, 2 * columns + 1, dtype=np.int32).reshape(2, columns)
    return AttnBatch(cut.starts, np.concatenate((np.arange(first, ends[0]), np.arange(second, ends[1]))), table)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", ["paged_cpu", "sdpa"])
def test_later_rows_do_not_change_attention(name: str, group: int) -> None:
    for seed, value, part in cases():
        _attention(name, group, np.random.default_rng((seed, group)), value, part)


def _attention(name: str, group: int, random: np.random.Generator, value: float, part: float) -> None:
    dtype = (torch.float32, torch.bfloat16)[int(random.integers(2))]
    size, page_size = int(random.choice([16, 20, 32, 50, 100])), int(random.choice([1, 7, 16]))
    cut, heads = Cut.random(random, 100), int(random.integers(1, 3))
    window = int(random.integers(1, 80)) if random.random() < 0.4 else None
    sinks = normal(random, heads * group) if random.random() < 0.3 else None
    q = normal(random, cut.total, heads * group, size, dtype=dtype)
    k, v = (normal(random, cut.total, heads, size, dtype=dtype) for _ in range(2))
    batch = pages(cut, page_size, (int(random.integers(0, 70)), int(random.integers(0, 70))))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = torch.full((batch.page_table.size + 1, 1, 2, page_size, heads, size), 0.5, dtype=dtype)
        return get_backend(name, "cpu").write_and_attend(kv, 0, AttnRows(q, k, v, 0.3, sinks), batch, window)

    clean = attend(q, k, v)
    for spoiled in (
        attend(*(cut.spoil(whole, value, part, random) for whole in (q, k, v))),
        attend(q, k, cut.spoil(v, math.nan, part, random)),
    ):
        assert torch.equal(spoiled[: cut.bad], clean[: cut.bad])
        assert torch.equal(spoiled[cut.split :], clean[cut.split :])
    spoiled = attend(q, cut.spoil(k, math.nan, 1.0, random), v)
    assert spoiled[cut.bad : cut.split].isnan().all()
    if window is not None:
        # Nor on a token that its window has passed.
        k, v = k.clone(), v.clone()
        k[cut.bad - 1], v[cut.bad - 1] = value, value
        after = cut.bad - 1 + window
        assert torch.equal(attend(q, k, v)[after:], clean[after:])


@pytest.mark.parametrize("window", [None, 3, 66])
@pytest.mark.parametrize(("rows", "group"), [(2, 3), (4, 3), (5, 3), (2, 8), (16, 1)])
def test_later_rows_do_not_change_a_verification(rows: int, group: int, window: int | None) -> None:
    """Few rows go through a tile of keys together."""
    for start, page_size, bad in [(64, 16, 1), (62, 16, rows - 1), (70, 7, 1), (0, 1, 1), (127, 32, 1)]:
        _verification(Cut(bad, rows, 2 * rows), start, page_size, group, window)


def _verification(cut: Cut, start: int, page_size: int, group: int, window: int | None) -> None:
    random, dtype = np.random.default_rng((cut.split, group)), torch.bfloat16
    batch = pages(cut, page_size, (start, start))
    q = normal(random, cut.total, 2 * group, 64, dtype=dtype)
    k, v = (normal(random, cut.total, 2, 64, dtype=dtype) for _ in range(2))
    known = normal(random, batch.page_table.size + 1, 1, 2, page_size, 2, 64, dtype=dtype)

    def attend(v: Tensor) -> Tensor:
        return get_backend("paged_cpu", "cpu").write_and_attend(known.clone(), 0, AttnRows(q, k, v, 0.3), batch, window)

    cut.check(attend(v), attend(cut.spoil(v, math.nan, 0.5, random)))
    if window is not None:
        # Nor does a token that only the first row sees.
        at, clean = max(start - window + 1, 0), attend(v)
        known[batch.page_table[0, at // page_size], 0, 1, at % page_size] = math.nan
        assert torch.equal(attend(v)[1:], clean[1:]) or at == 0


@dataclass(frozen=True)
class Heads:
    """One matrix for K and V of all heads, as `LatentHeads`."""

    weight_HWD: Tensor
    value_dim: int
    always_absorbed: bool = False

    def expand(self, kept_SW: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.einsum("sw,hwd->shd", kept_SW, self.weight_HWD)
        return made, made[..., : self.value_dim]

    def absorb(self, q_THD: Tensor) -> Tensor:
        raise AssertionError

    def values(self, latent_THC: Tensor) -> Tensor:
        raise AssertionError


@pytest.mark.parametrize("expands", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_later_rows_do_not_change_latent_attention(dtype: torch.dtype, expands: bool) -> None:
    """Absorbed float64 uses PyTorch's operations, as on other devices."""
    for seed, value, part in cases():
        _latents(dtype, expands, np.random.default_rng(seed), value, part)


def _latents(dtype: torch.dtype, expands: bool, random: np.random.Generator, value: float, part: float) -> None:
    cut, num_heads, width, rope = Cut.random(random, 100), int(random.integers(1, 6)), 20, 12
    page_size = int(random.choice([1, 7, 16]))
    heads = Heads(normal(random, num_heads, width + rope, 24, dtype=dtype), 16) if expands else None
    q = normal(random, cut.total, num_heads, 24 if expands else width + rope, dtype=dtype)
    latent, keys = (normal(random, cut.total, n, dtype=dtype) for n in (width, rope))
    # A prompt from its start is causal without a mask.
    batch = pages(cut, page_size, (0, 0) if random.random() < 0.5 else (30, 30))

    def attend(q: Tensor, latent: Tensor, keys: Tensor) -> Tensor:
        plane = torch.full((batch.page_table.size + 1, 1, page_size, 1, width + rope), 0.5, dtype=dtype)
        latents = PagedLatentAttention([plane], 0, batch)
        latents._is_cheaper_expanded = lambda *_: True  # type: ignore[method-assign]
        return latents.attend(LatentRows(q, latent, keys, 0.2, heads))

    clean = attend(q, latent, keys)
    cut.check(clean, attend(q, cut.spoil(latent, value, part, random), keys))
    cut.check(clean, attend(*(cut.spoil(whole, value, part, random) for whole in (q, latent, keys))))


@pytest.mark.parametrize("form", ["compiled", "by row", "by chunk"])
@pytest.mark.parametrize("name", mamba2.SPECS)
def test_later_rows_do_not_change_states(form: str, name: str) -> None:
    spec = mamba2.SPECS[name]
    one = mamba2.layer(spec)
    one._on_cpu, one._by_row = form == "compiled", form == "by row"
    for seed, value, part in cases()[:4]:
        random = np.random.default_rng(seed)
        cut = Cut.random(random, 100)
        x = normal(random, cut.total, HIDDEN)
        states, kept = begin(spec.state_spec, torch.float32, 2), [cut.bad - 1, cut.split - 1, cut.total - 1]
        clean, clean_states = run(one, x, states, cut.starts.tolist(), kept)
        spoiled, spoiled_states = run(one, cut.spoil(x, value, part, random), states, cut.starts.tolist(), kept)
        if form == "by chunk":
            # Then the rows are computed one after the other, which rounds differently.
            torch.testing.assert_close(spoiled[: cut.bad], clean[: cut.bad], rtol=1e-4, atol=1e-5)
            assert torch.equal(spoiled[cut.split :], clean[cut.split :])
            assert not spoiled[cut.bad : cut.split].isfinite().all(dim=1).any()
        else:
            cut.check(clean, spoiled)
        for after, expected in zip(spoiled_states, clean_states, strict=True):
            torch.testing.assert_close(after[[0, 2]], expected[[0, 2]], rtol=1e-4, atol=1e-5)


def test_chunks_that_are_not_finite_are_computed_by_row() -> None:
    random = np.random.default_rng(0)
    x, decay, b, c = (normal(random, 90, 2, *more) for more in ((5,), (), (3,), (3,)))
    for number, part in enumerate((x, decay, b, c)):
        spoiled = [p.clone() for p in (x, decay, b, c)]
        spoiled[number][70] = math.nan
        rows = torch.tensor([69, 89])
        begin = torch.zeros(2, 3, 5)
        out, states = mamba2_torch.by_chunk(*spoiled, begin, rows)
        assert out[:70].isfinite().all(), part.shape
        assert states[0].isfinite().all()
        assert out[70].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_packed", [True, False])
def test_later_rows_do_not_change_products(dtype: torch.dtype, is_packed: bool) -> None:
    random = np.random.default_rng(3)
    for inputs, outputs in [(64, 128), (100, 72), (176, 64)]:
        one = Linear(inputs, outputs, Build(dtype, torch.device("cpu"), batch_invariant=True), bias=True)
        assert one.bias is not None
        assert one.weight is not None
        one.weight.copy_(normal(random, outputs, inputs))
        one.bias.copy_(normal(random, outputs))
        if is_packed:
            one.pack()
        for seed, value, part in cases():
            cut = Cut.random(np.random.default_rng(seed), 60)
            x = normal(random, cut.total, inputs, dtype=dtype)
            cut.check(one(x), one(cut.spoil(x, value, part, random)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_later_rows_do_not_change_experts(dtype: torch.dtype, scores: str) -> None:
    """To whichever expert a non-finite row goes, it changes no other row there."""
    random = np.random.default_rng(5)
    spec = MoESpec(
        num_experts=8, top_k=2, intermediate_size=32, shared_size=32, layers=(True,), scores=scores, num_groups=4,
        top_groups=2, group_score="best", renormalise=True, scale=1.5, has_choice_bias=False,
    )  # fmt: skip
    one = MoE(spec, 64, Build(dtype, torch.device("cpu"), batch_invariant=True))
    for parameter in one.parameters():
        parameter.copy_(normal(random, *parameter.shape) * 0.2)
    for seed, value, part in cases():
        cut = Cut.random(np.random.default_rng(seed), 60)
        x = normal(random, cut.total, 64, dtype=dtype)
        cut.check(one(x), one(cut.spoil(x, value, part, random)))


@pytest.mark.parametrize("inner", [32, 100, 176])
@pytest.mark.parametrize("multiply", [headwise, invariant_headwise])
def test_later_rows_do_not_change_products_of_heads(inner: int, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
    random = np.random.default_rng(7)
    weight = normal(random, 3, inner, 64, dtype=torch.bfloat16)
    for seed, value, part in cases():
        cut = Cut.random(np.random.default_rng(seed), 60)
        x = normal(random, cut.total, 3, inner, dtype=torch.bfloat16)
        cut.check(multiply(x, weight), multiply(cut.spoil(x, value, part, random), weight))
