"""CPU kernels of gated delta nets, row by row: neither other rows nor chunks change a bit.

Shapes: T rows of R requests, H value heads of V numbers, J key heads of K numbers, each for H / J value heads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from baton.jit_cache import jit_contract
from baton.kernels.cpu.scalar import exp32, from_f32, softplus32, to_f32
from baton.kernels.cpu.scan_steps import recall, update
from baton.kernels.cpu.simd import LANES

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
# Added in the L2 norm of queries and keys, as in transformers.
_EPS = np.float32(1e-6)


@jit_contract
def _scale_to(length: Any, row: Any, start: int, out: Any) -> None:
    total = _EPS
    for n in range(len(out)):
        total += row[start + n] * row[start + n]
    factor = length / np.sqrt(total)
    for n in range(len(out)):
        out[n] = row[start + n] * factor


@jit_contract
def _step(s: Any, decays: Any, k: Any, v: Any, beta: Any, q: Any, u: Any, o: Any) -> None:
    """A row of `scan`. `decays` [1 or K]; `u` [V] is scratch space."""
    size, width, per_key = len(u), len(k), 4 if len(decays) > 1 else 0
    state_at, decays_at, k_at = np.int64(s.ctypes.data), np.int64(decays.ctypes.data), np.int64(k.ctypes.data)
    q_at, u_at, o_at = np.int64(q.ctypes.data), np.int64(u.ctypes.data), np.int64(o.ctypes.data)
    rest = size - size % LANES
    recall(state_at, width, size, decays_at, per_key, k_at, u_at)
    for p in range(rest, size):
        u[p] = _ZERO
        for n in range(width):
            u[p] += s[n * size + p] * decays[min(n, len(decays) - 1)] * k[n]
    for p in range(size):
        u[p] = (v[p] - u[p]) * beta
        o[p] = _ZERO
    update(state_at, width, size, decays_at, per_key, u_at, k_at, q_at, o_at)
    for p in range(rest, size):
        for n in range(width):
            decayed = s[n * size + p] * decays[min(n, len(decays) - 1)]
            s[n * size + p] = decayed + u[p] * k[n]
            o[p] += s[n * size + p] * q[n]


@jit_contract
def scan(
    rows: Any, first: Any, mixed: Any, key_heads: Any, state: Any, rate: Any, dt_bias: Any, query_start: Any,
    kept: Any, out: Any, kept_states: Any,
) -> None:  # fmt: skip
    """The gated delta rule. Per row and value head: S = S exp(rate softplus(a + dt_bias)), u = sigmoid(b) (v - S^T k),
    S = S + k u^T, o = S^T q, with q and k of unit length and q divided by sqrt(K).

    q | k | v = `mixed` float32 [T, 2 J K + H V]; `rows` has b [H], then a, from column `first` on: one for each head
    [H], or for each channel of its key [H K], as `dt_bias`; o goes to `out` float32 [T, H V]. `state` float32
    [R, H, K V] is S before the rows, and is overwritten. S after each of the rows `kept` (ascending) goes to
    `kept_states` [len(kept), H, K V].
    """
    heads, num_decays = len(rate), len(dt_bias) // len(rate)
    size = out.shape[1] // heads
    width = state.shape[2] // size
    q, k = np.empty(width, np.float32), np.empty(width, np.float32)
    u, o, decays = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(num_decays, np.float32)
    scale = _ONE / np.sqrt(np.float32(width))
    first_kept = 0
    for r in range(len(query_start) - 1):
        begin, stop = query_start[r], query_start[r + 1]
        next_kept = first_kept
        for h in range(heads):
            s = state[r, h]
            q_at = h // (heads // key_heads) * width
            k_at = key_heads * width + q_at
            v_at = 2 * key_heads * width + h * size
            next_kept = first_kept
            for t in range(begin, stop):
                _scale_to(scale, mixed[t], q_at, q)
                _scale_to(_ONE, mixed[t], k_at, k)
                beta = _ONE / (_ONE + exp32(-to_f32(rows[t, first + h])))
                for n in range(num_decays):
                    at = h * num_decays + n
                    dt = softplus32(to_f32(rows[t, first + heads + at]) + dt_bias[at])
                    decays[n] = np.float32(math.exp(dt * rate[h]))
                _step(s, decays, k, mixed[t, v_at : v_at + size], beta, q, u, o)
                for p in range(size):
                    out[t, h * size + p] = o[p]
                if next_kept < len(kept) and kept[next_kept] == t:
                    for i in range(len(s)):
                        kept_states[next_kept, h, i] = s[i]
                    next_kept += 1
        first_kept = next_kept


@jit_contract
def _norm_factor(row: Any, start: int, size: int, element: Any, eps: Any) -> Any:
    """One over the root mean square, of numbers rounded to the dtype of `element`."""
    total = np.float32(0.0)
    for i in range(size):
        value = to_f32(from_f32(element, row[start + i]))
        total += value * value
    return _ONE / np.sqrt(total / np.float32(size) + eps)


@jit_contract
def gated_norm(o: Any, rows: Any, weight: Any, eps: Any, out: Any) -> None:
    """RMSNorm of each head of `o` float32 [T, H V] times `weight` [V], then times silu(gate), to `out` [T, H V]. Gates
    are the first columns of `rows`. Rounds to the dtype of `out` where transformers does."""
    size = len(weight)
    element = weight[0]
    for t in range(o.shape[0]):
        row = o[t]
        for start in range(0, o.shape[1], size):
            factor = _norm_factor(row, start, size, element, eps)
            for i in range(size):
                value = to_f32(from_f32(element, o[t, start + i]))
                normed = to_f32(from_f32(element, value * factor))
                scaled = to_f32(from_f32(element, to_f32(weight[i]) * normed))
                gate = to_f32(rows[t, start + i])
                out[t, start + i] = from_f32(element, scaled * (gate / (_ONE + exp32(-gate))))


@jit_contract
def sigmoid_gated_norm(o: Any, gates: Any, weight: Any, eps: Any, out: Any) -> None:
    """RMSNorm of each head of `o` float32 [T, H V], rounded to the dtype of `out` first, times `weight` [V], then times
    sigmoid of `gates` [T, H V], to `out` [T, H V]."""
    size = len(weight)
    element = weight[0]
    for t in range(o.shape[0]):
        row = o[t]
        for start in range(0, o.shape[1], size):
            factor = _norm_factor(row, start, size, element, eps)
            for i in range(size):
                value = to_f32(from_f32(element, o[t, start + i])) * factor * to_f32(weight[i])
                gate = _ONE / (_ONE + exp32(-to_f32(gates[t, start + i])))
                out[t, start + i] = from_f32(element, value * gate)
