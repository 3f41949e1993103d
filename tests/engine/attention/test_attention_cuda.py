"""The Triton kernel on a CUDA device: against a plain reference, and its rows bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from baton.engine.attention.registry import get_backend
from baton.models.layer_cache import AttnRows
from tests.engine.attention.test_attention import LAYER, Pool, naive, random_qkv

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

TOKENS = 201
# Query heads, KV heads, head size, page size.
SHAPES = [(6, 1, 20, 7), (9, 3, 64, 16), (16, 2, 128, 16)]
WINDOWS = [None, 1, 7, 64, 100]


def pool_of(shape: tuple[int, int, int, int], dtype: torch.dtype, more: int = 0) -> Pool:
    _, groups, size, page_size = shape
    pool = Pool(groups, size, page_size + more, [TOKENS], dtype)
    pool.kv = pool.kv.cuda()
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape: tuple[int, int, int, int], window: int | None, dtype: torch.dtype) -> None:
    heads, groups, size, _ = shape
    q, k, v = (part.to(dtype) for part in random_qkv(TOKENS, heads, groups, size, seed=1))
    expected = naive(q, k, v, size**-0.5, window)
    pool, backend = pool_of(shape, dtype), get_backend("triton", "cuda")
    close = {"rtol": 1e-5, "atol": 5e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for start, stop in [(0, 130), (130, 131), (131, TOKENS)]:
        rows = (part[start:stop].cuda() for part in (q, k, v))
        out = backend.write_and_attend(
            pool.kv, LAYER, AttnRows(*rows, size**-0.5), pool.batch({0: (start, stop)}), window
        )
        torch.testing.assert_close(out.double().cpu(), expected[start:stop], **close)
    # Nothing else was written: not other layers, the null page or free slots.
    assert pool.kv[:, [0, 2]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_batch_invariant(shape: tuple[int, int, int, int], window: int | None, dtype: torch.dtype) -> None:
    """Alone, in a batch, with another page size, with and without sinks."""
    heads, groups, size, _ = shape
    q, k, v = (part.to("cuda", dtype) for part in random_qkv(TOKENS, heads, groups, size, seed=2))
    backend = get_backend("triton", "cuda")
    for sinks in (None, torch.randn(heads, generator=torch.Generator().manual_seed(0)).cuda()):
        found = []
        for more, cuts in ((0, [0, TOKENS]), (3, [0, 1, 2, 77, 80, TOKENS])):
            pool = pool_of(shape, dtype, more)
            parts = [
                backend.write_and_attend(
                    pool.kv, LAYER, AttnRows(q[a:b], k[a:b], v[a:b], 0.3, sinks), pool.batch({0: (a, b)}), window
                )
                for a, b in itertools.pairwise(cuts)
            ]
            found.append(torch.cat(parts))
        assert torch.equal(*found)


def test_sinks_are_as_those_of_sdpa() -> None:
    q, k, v = (part.cuda() for part in random_qkv(TOKENS, 4, 2, 16, seed=3))
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1)).cuda()
    made = []
    for name in ("triton", "sdpa"):
        pool = pool_of((4, 2, 16, 7), torch.float32)
        batch = pool.batch({0: (0, TOKENS)})
        made.append(
            get_backend(name, "cuda").write_and_attend(pool.kv, LAYER, AttnRows(q, k, v, 0.3, sinks), batch, 64)
        )
    torch.testing.assert_close(*made, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_reaches_no_earlier_row(value: float, window: int | None, dtype: torch.dtype) -> None:
    heads, groups, size, _ = shape = SHAPES[1]
    q, k, v = (part.to("cuda", dtype) for part in random_qkv(TOKENS, heads, groups, size, seed=2))
    for spoils_keys, spoils_values in ((False, True), (True, False), (True, True)):
        found = []
        for bad in (False, True):
            keys, values = k.clone(), v.clone()
            if bad and spoils_keys:
                keys[150:, :, 3] = value
            if bad and spoils_values:
                values[150:, :, 3] = value
            rows, batch = AttnRows(q, keys, values, 0.3), pool_of(shape, dtype).batch({0: (0, TOKENS)})
            kv = pool_of(shape, dtype).kv
            found.append(get_backend("triton", "cuda").write_and_attend(kv, LAYER, rows, batch, window))
        assert torch.equal(found[0][:150], found[1][:150])
        assert not found[1][150].isfinite().flatten().all()
