"""Register tiles differ between CPUs, and bits must not."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from baton.kernels.cpu.attention.online_softmax import ROW_BLOCK
from baton.kernels.cpu.scan_steps import recall, update, update_fused
from baton.kernels.cpu.simd import CHUNKS, LANES, chunks_at_once, products
from baton.kernels.cpu.transposes import transpose

Random = np.random.Generator


def _multiplier(num_rows: int, num_chunks: int) -> Any:
    def multiply(left: Any, row_bytes: Any, right: Any, steps: Any, width: Any, factors: Any, out: Any) -> None:
        products(num_rows, num_chunks, left, row_bytes, right, 4 * width, steps, width, factors, out, 4 * width)

    return numba.njit(multiply)


def _sums(multiply: Any, left: Any, right: Any, factors: Any, before: Any) -> np.ndarray:
    out: np.ndarray = before.copy()
    at = 0 if factors is None else factors.ctypes.data
    multiply(left.ctypes.data, left.strides[0], right.ctypes.data, len(right), right.shape[1], at, out.ctypes.data)
    return out


@pytest.mark.parametrize("num_rows", range(1, ROW_BLOCK + 1))
def test_every_tiling_gives_the_same_bits(num_rows: int) -> None:
    random = np.random.default_rng(num_rows)
    single = _multiplier(1, 1)
    tilings = {n: _multiplier(num_rows, n) for n in {*range(1, CHUNKS + 1), chunks_at_once(num_rows)}}
    for _ in range(40):
        steps, width = int(random.integers(0, 140)), LANES * int(random.integers(1, 12))
        left = random.standard_normal((num_rows, steps + 3), dtype=np.float32)
        right = random.standard_normal((steps, width), dtype=np.float32)
        before = random.standard_normal((num_rows, width), dtype=np.float32)
        factors = random.random(num_rows, dtype=np.float32) if random.random() < 0.7 else None
        expected = np.concatenate(
            [
                _sums(single, left[row:], right, None if factors is None else factors[row:], before[row : row + 1])
                for row in range(num_rows)
            ]
        )
        exact = left[:, :steps].astype(np.float64) @ right
        if factors is not None:
            exact += before.astype(np.float64) * factors[:, None]
        np.testing.assert_allclose(expected, exact, rtol=1e-5, atol=1e-4)
        for tiling in tilings.values():
            made = _sums(tiling, left, right, factors, before)
            assert np.array_equal(made.view(np.int32), expected.view(np.int32))


@numba.njit
def _transpose(element: Any, rows: Any, start: Any, out: Any, stride: Any) -> None:
    transpose(element, rows, start, out, stride)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_blocks_are_transposed_exactly(dtype: Any) -> None:
    random = np.random.default_rng(0)
    kept = random.integers(0, 1 << 16, (40, 96), dtype=np.uint16).view(dtype)
    order = random.permutation(40)[:LANES]
    rows = np.array([kept[row].ctypes.data for row in order], dtype=np.int64)
    out = np.zeros((LANES, 3 * LANES), np.float32)
    _transpose(dtype(0), rows.ctypes.data, 5 * kept.itemsize, out[:, LANES:].ctypes.data, out.strides[0])
    block = kept[order, 5 : 5 + LANES].T
    bits = block.astype(np.uint32) << 16 if dtype is np.uint16 else np.ascontiguousarray(block).view(np.uint32)
    assert np.array_equal(out[:, LANES : 2 * LANES].view(np.uint32), bits)
    assert not out[:, :LANES].any()
    assert not out[:, 2 * LANES :].any()


@numba.njit
def _scan_step(fused: Any, state: Any, width: Any, size: Any, decays: Any, keys: Any, x: Any, sums: Any) -> None:
    if fused:
        update_fused(state, width, size, decays, 4, x, keys, keys, sums)
    else:
        recall(state, width, size, decays, 4, keys, x)
        update(state, width, size, decays, 4, x, keys, keys, sums)


@pytest.mark.parametrize("fused", [False, True])
def test_columns_of_a_state_have_the_same_bits_alone(fused: bool) -> None:
    random, width, size = np.random.default_rng(0), 37, 5 * LANES
    state, x, sums = (random.standard_normal((n, size), dtype=np.float32) for n in (width, 1, 1))
    decays, keys = random.random(width, dtype=np.float32), random.standard_normal(width, dtype=np.float32)

    def step(columns: slice) -> list[np.ndarray]:
        parts = [part[:, columns].copy() for part in (state, x, sums)]
        places = [part.ctypes.data for part in parts]
        _scan_step(fused, places[0], width, parts[0].shape[1], decays.ctypes.data, keys.ctypes.data, *places[1:])
        return parts

    together = step(slice(None))
    for first in range(0, size, LANES):
        alone = step(slice(first, first + LANES))
        for some, part in zip(alone, together, strict=True):
            assert np.array_equal(some.view(np.int32), part[:, first : first + LANES].copy().view(np.int32))
    after = state.astype(np.float64) * decays[:, None] + keys[:, None] * together[1].astype(np.float64)
    np.testing.assert_allclose(together[0], after, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(together[2], sums + keys @ after, rtol=1e-4, atol=1e-4)
    if not fused:
        np.testing.assert_allclose(together[1][0], (keys * decays) @ state.astype(np.float64), rtol=1e-4, atol=1e-4)
