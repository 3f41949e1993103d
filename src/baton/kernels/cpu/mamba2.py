"""CPU kernels of Mamba-2: selective scan and gated norm, row by row. For the convolution see `causal_conv`.

Neither other rows nor chunks change a bit. Chunks of matrix products are slower: a head's state stays in the L1 cache.

Shapes: T rows of R requests, H heads of P channels, N state numbers per channel.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from baton.jit_cache import jit_contract
from baton.kernels.cpu.scalar import exp32, from_f32, softplus32, to_f32
from baton.kernels.cpu.scan_steps import update_fused
from baton.kernels.cpu.simd import LANES

_ONE = np.float32(1.0)


@jit_contract
def _step(s: Any, decay: Any, x: Any, b: Any, c: Any, y: Any) -> None:
    size, width = len(x), len(b)
    state_at, decay_at, x_at = np.int64(s.ctypes.data), np.int64(decay.ctypes.data), np.int64(x.ctypes.data)
    b_at, c_at, y_at = np.int64(b.ctypes.data), np.int64(c.ctypes.data), np.int64(y.ctypes.data)
    update_fused(state_at, width, size, decay_at, 0, x_at, b_at, c_at, y_at)
    for n in range(width if size % LANES else 0):
        for p in range(size - size % LANES, size):
            value = s[n * size + p] * decay[0] + b[n] * x[p]
            s[n * size + p] = value
            y[p] += value * c[n]


@jit_contract
def scan(
    rows: Any, first: Any, mixed: Any, num_groups: Any, state: Any, rate: Any, dt_bias: Any, skip: Any,
    query_start: Any, kept: Any, out: Any, kept_states: Any,
) -> None:  # fmt: skip
    """The state-space recurrence. Per row and head: dt = softplus(rows[t, first + h] + dt_bias), S = S exp(dt rate) +
    dt B x^T, y = S^T C + skip x, with x | B | C = `mixed` [T, H P + 2 G N]; y goes to `out` [T, H P].

    `state` float32 [R, H, N P] is S before the rows, and is overwritten. S after each of the rows `kept` (ascending)
    goes to `kept_states` [len(kept), H, N P].
    """
    heads = len(rate)
    size = out.shape[1] // heads
    width = state.shape[2] // size
    x_scaled, y, decay = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(1, np.float32)
    first_kept = 0
    for r in range(len(query_start) - 1):
        begin, stop = query_start[r], query_start[r + 1]
        next_kept = first_kept
        for h in range(heads):
            s = state[r, h]
            b_at = heads * size + h // (heads // num_groups) * width
            c_at = b_at + num_groups * width
            next_kept = first_kept
            for t in range(begin, stop):
                dt = softplus32(to_f32(rows[t, first + h]) + dt_bias[h])
                decay[0] = np.float32(math.exp(dt * rate[h]))
                for p in range(size):
                    x = mixed[t, h * size + p]
                    x_scaled[p] = x * dt
                    y[p] = x * skip[h]
                _step(s, decay, x_scaled, mixed[t, b_at : b_at + width], mixed[t, c_at : c_at + width], y)
                for p in range(size):
                    out[t, h * size + p] = y[p]
                if next_kept < len(kept) and kept[next_kept] == t:
                    for i in range(len(s)):
                        kept_states[next_kept, h, i] = s[i]
                    next_kept += 1
        first_kept = next_kept


@jit_contract
def gated_norm(y: Any, rows: Any, weight: Any, num_groups: Any, eps: Any, out: Any) -> None:
    """RMSNorm of y silu(gate) over each of `num_groups` equal parts of a row. Gates are the first columns of `rows`."""
    size = y.shape[1] // num_groups
    element = weight[0]
    gated = np.empty(size, np.float32)
    for t in range(y.shape[0]):
        for start in range(0, size * num_groups, size):
            total = np.float32(0.0)
            for i in range(size):
                gate = to_f32(rows[t, start + i])
                gated[i] = y[t, start + i] * (gate / (_ONE + exp32(-gate)))
            for i in range(size):
                total += gated[i] * gated[i]
            factor = _ONE / np.sqrt(total / np.float32(size) + eps)
            for i in range(size):
                out[t, start + i] = from_f32(element, to_f32(weight[start + i]) * (gated[i] * factor))


@jit_contract
def gated_squares(y: Any, rows: Any, gated: Any, sums: Any) -> None:
    """y silu(gate) to `gated` float32 [T, I], and its sums of squares over equal pieces of a row to `sums` float32
    [T, pieces]. Gates as in `gated_norm`."""
    size = y.shape[1] // sums.shape[1]
    for t in range(y.shape[0]):
        for piece in range(sums.shape[1]):
            start = piece * size
            total = np.float32(0.0)
            for i in range(start, start + size):
                gate = to_f32(rows[t, i])
                gated[t, i] = y[t, i] * (gate / (_ONE + exp32(-gate)))
            for i in range(start, start + size):
                total += gated[t, i] * gated[t, i]
            sums[t, piece] = total


@jit_contract
def scale_rows(gated: Any, factors: Any, weight: Any, out: Any) -> None:
    """`gated` [T, I] times the factor of its piece of the row (`factors` [T, pieces]), times `weight` [I]."""
    size = gated.shape[1] // factors.shape[1]
    element = weight[0]
    for t in range(gated.shape[0]):
        for piece in range(factors.shape[1]):
            factor = factors[t, piece]
            for i in range(piece * size, (piece + 1) * size):
                out[t, i] = from_f32(element, to_f32(weight[i]) * (gated[t, i] * factor))
