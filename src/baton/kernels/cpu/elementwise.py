"""Batch-invariant CPU kernels between a layer's matrix products: norms, rotary embedding, gated activations.

PyTorch's vectorised loops finish the last few elements with scalar code whose `exp` rounds differently, so a row's SiLU
depends on the number of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from baton.jit_cache import jit, jit_inline
from baton.kernels.cpu.omp import Kernel, arguments, float_bits, float_of, pointer, take, threads_for
from baton.kernels.cpu.scalar import as_array, exp32, from_f32, to_f32
from baton.kernels.cpu.simd import LANES, added, scaled, silu_times, square_sum

_ONE = np.float32(1.0)
# Numbers per thread. Below half of it a kernel keeps the GIL.
_PARALLEL_NUMBERS = 1 << 14
# 2 sqrt(2 / pi), and the same times 0.044715.
_GELU_LINEAR = np.float32(1.5957691216057308)
_GELU_CUBIC = np.float32(0.07135481627159025)
# Rows that a thread takes at a time.
_BLOCK = 16
# Arguments of a kernel: the counter of `take`, then its own.
_NUM_ARGUMENTS = 9


@jit
def add_row(element: Any, left_at: Any, right_at: Any, size: Any, out_at: Any) -> None:
    """left + right, each rounded once."""
    left, right = carray(pointer(left_at, element), (size,)), carray(pointer(right_at, element), (size,))
    out, whole = carray(pointer(out_at, element), (size,)), size - size % LANES
    for at in range(0, whole * out.itemsize, LANES * out.itemsize):
        added(element, left_at + at, right_at + at, out_at + at)
    for i in range(whole, size):
        out[i] = from_f32(element, to_f32(left[i]) + to_f32(right[i]))


@jit
def norm_row(element: Any, x_at: Any, weight_at: Any, size: Any, eps: Any, out_at: Any) -> None:
    """RMSNorm of `size` numbers. `out_at` may be `x_at`."""
    x, weight = carray(pointer(x_at, element), (size,)), carray(pointer(weight_at, element), (size,))
    out, whole = carray(pointer(out_at, element), (size,)), size - size % LANES
    total = square_sum(element, x_at, whole)
    for i in range(whole, size):
        total += to_f32(x[i]) * to_f32(x[i])
    factor = _ONE / np.sqrt(total / np.float32(size) + eps)
    for at in range(0, whole * out.itemsize, LANES * out.itemsize):
        scaled(element, x_at + at, factor, weight_at + at, out_at + at)
    for i in range(whole, size):
        rounded = to_f32(from_f32(element, to_f32(x[i]) * factor))
        out[i] = from_f32(element, to_f32(weight[i]) * rounded)


@jit
def gate_row(element: Any, gates_at: Any, ups_at: Any, width: Any, out_at: Any) -> None:
    """silu(gate) * up; `width` is at least 16."""
    size = carray(pointer(out_at, element), (1,)).itemsize
    for at in range(0, (width - width % LANES) * size, LANES * size):
        silu_times(element, gates_at + at, ups_at + at, out_at + at)
    if width % LANES:
        # The last vector overlaps the one before: rounding must not depend on a number's column, since tensor ranks cut
        # rows anywhere.
        at = (width - LANES) * size
        silu_times(element, gates_at + at, ups_at + at, out_at + at)


@jit
def rotate_row(element: Any, heads: Any, cos: Any, sin: Any) -> None:
    """Rotate the first dimensions of `heads` [H, D] by `cos` and `sin` [at most D / 2]."""
    half = len(cos)
    for h in range(len(heads)):
        for i in range(half):
            first, second = to_f32(heads[h, i]), to_f32(heads[h, half + i])
            c, s = to_f32(cos[i]), to_f32(sin[i])
            left, right = to_f32(from_f32(element, first * c)), to_f32(from_f32(element, second * s))
            heads[h, i] = from_f32(element, left - right)
            left, right = to_f32(from_f32(element, second * c)), to_f32(from_f32(element, first * s))
            heads[h, half + i] = from_f32(element, left + right)


@jit_inline
def _norms(arguments: Any, element: Any) -> None:
    a = carray(arguments, _NUM_ARGUMENTS)
    num_rows, size, x_at, weight_at, eps, out_at = a[1], a[2], a[3], a[4], float_of(a[5]), a[6]
    row_bytes = size * carray(pointer(out_at, element), (1,)).itemsize
    block = take(arguments)
    while block * _BLOCK < num_rows:
        for t in range(block * _BLOCK, min((block + 1) * _BLOCK, num_rows)):
            source_at = x_at + t * row_bytes
            if a[7] != 0:
                source_at = a[8] + t * row_bytes
                add_row(element, x_at + t * row_bytes, a[7] + t * row_bytes, size, source_at)
            norm_row(element, source_at, weight_at, size, eps, out_at + t * row_bytes)
        block = take(arguments)


@jit_inline
def _gates(arguments: Any, element: Any) -> None:
    a = carray(arguments, _NUM_ARGUMENTS)
    num_rows, width, gates_at, out_at = a[1], a[2], a[3], a[4]
    row_bytes = width * carray(pointer(out_at, element), (1,)).itemsize
    block = take(arguments)
    while block * _BLOCK < num_rows:
        for t in range(block * _BLOCK, min((block + 1) * _BLOCK, num_rows)):
            gates = gates_at + 2 * t * row_bytes
            gate_row(element, gates, gates + row_bytes, width, out_at + t * row_bytes)
        block = take(arguments)


@jit_inline
def _rotations(arguments: Any, element: Any) -> None:
    a = carray(arguments, _NUM_ARGUMENTS)
    num_rows, count, half = a[1], a[2], a[5]
    heads = carray(pointer(a[3], element), (num_rows, a[4], a[6]))
    cos, sin = carray(pointer(a[7], element), (num_rows, half)), carray(pointer(a[8], element), (num_rows, half))
    block = take(arguments)
    while block * _BLOCK < num_rows:
        for t in range(block * _BLOCK, min((block + 1) * _BLOCK, num_rows)):
            rotate_row(element, heads[t, :count], cos[t], sin[t])
        block = take(arguments)


def _norms_f32(arguments: Any) -> None:
    _norms(arguments, _ONE)


def _norms_bf16(arguments: Any) -> None:
    _norms(arguments, np.uint16(0))


def _gates_f32(arguments: Any) -> None:
    _gates(arguments, _ONE)


def _gates_bf16(arguments: Any) -> None:
    _gates(arguments, np.uint16(0))


def _rotations_f32(arguments: Any) -> None:
    _rotations(arguments, _ONE)


def _rotations_bf16(arguments: Any) -> None:
    _rotations(arguments, np.uint16(0))


_NORMS = (Kernel(_norms_f32), Kernel(_norms_bf16))
_GATES = (Kernel(_gates_f32), Kernel(_gates_bf16))
_ROTATIONS = (Kernel(_rotations_f32), Kernel(_rotations_bf16))


@jit
def _sigmoid(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = _ONE / (_ONE + exp32(-x[i]))


@jit
def _rms_norm_fp32(x: Any, weight: Any, offset: Any, eps: Any, out: Any) -> None:
    rows, size = x.shape
    element, whole = x[0, 0], size - size % LANES
    for t in range(rows):
        total = square_sum(element, np.int64(x.ctypes.data) + t * x.strides[0], whole)
        for i in range(whole, size):
            total += to_f32(x[t, i]) * to_f32(x[t, i])
        factor = _ONE / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            out[t, i] = from_f32(element, to_f32(x[t, i]) * factor * (offset + weight[i]))


@jit
def _gelu_mul(gate_up: Any, out: Any) -> None:
    rows, width = out.shape
    element = gate_up[0, 0]
    for t in range(rows):
        for i in range(width):
            gate = to_f32(gate_up[t, i])
            # tanh(y) is 2 / (1 + e^-2y) - 1.
            twice = gate * (_GELU_LINEAR + _GELU_CUBIC * gate * gate)
            out[t, i] = from_f32(element, gate / (_ONE + exp32(-twice)) * to_f32(gate_up[t, width + i]))


@jit
def _clamped_glu(gate_up: Any, alpha: Any, limit: Any, out: Any) -> None:
    rows, width = out.shape
    element = gate_up[0, 0]
    for t in range(rows):
        for i in range(width):
            gate = min(to_f32(gate_up[t, 2 * i]), limit)
            up = min(max(to_f32(gate_up[t, 2 * i + 1]), -limit), limit)
            out[t, i] = from_f32(element, (up + _ONE) * (gate / (_ONE + exp32(-alpha * gate))))


def _run(kernels: tuple[Kernel, Kernel], like: Tensor, *values: int) -> None:
    kernel, numbers = kernels[like.dtype == torch.bfloat16], like.numel()
    given = arguments(*values, *[0] * (_NUM_ARGUMENTS - 1 - len(values)))
    if numbers < _PARALLEL_NUMBERS // 2:
        kernel.call_inline(given)
    else:
        kernel.call(given, threads_for(numbers, _PARALLEL_NUMBERS))


def rms_norm(x: Tensor, weight: Tensor, eps: np.float32) -> Tensor:
    """RMSNorm over the last dimension, rounded as in `layernorm.RMSNorm`."""
    x, size = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    if x.numel():
        _run(_NORMS, x, x.numel() // size, size, x.data_ptr(), weight.data_ptr(), float_bits(eps), out.data_ptr())
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: np.float32) -> tuple[Tensor, Tensor]:
    """x + delta, and its `rms_norm`, of contiguous tensors."""
    total, out, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    if x.numel():
        shape = x.numel() // size, size
        where = x.data_ptr(), weight.data_ptr(), float_bits(eps), out.data_ptr(), delta.data_ptr(), total.data_ptr()
        _run(_NORMS, x, *shape, *where)
    return total, out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2I], gate first: [T, I] in its dtype, computed in float32."""
    width = gate_up.shape[1] // 2
    if 0 < width < LANES:
        # The kernel takes whole vectors.
        parts = gate_up.reshape(len(gate_up), 2, width)
        return silu_mul(F.pad(parts, (0, LANES - width)).flatten(1))[:, :width]
    gate_up = gate_up.contiguous()
    out = torch.empty(gate_up.shape[0], width, dtype=gate_up.dtype)
    if out.numel():
        _run(_GATES, gate_up, out.shape[0], width, gate_up.data_ptr(), out.data_ptr())
    return out


def rotate_in_place(heads: Tensor, count: int, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first `count` heads of contiguous [T, H, D] by cos and sin [T, 1, at most D/2] of the same dtype, to
    which products are rounded."""
    num_rows, num_heads, size = heads.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    if num_rows:
        tables = cos.data_ptr(), sin.data_ptr()
        _run(_ROTATIONS, heads, num_rows, count, heads.data_ptr(), num_heads, cos.shape[2], size, *tables)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) of float32."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _sigmoid(as_array(x.contiguous()).reshape(-1), as_array(out).reshape(-1))
    return out


def rms_norm_fp32(x: Tensor, weight: Tensor, offset: np.float32, eps: np.float32) -> Tensor:
    """RMSNorm over the last dimension, times `offset` + `weight` in float32, rounded once."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        flat = (-1, x.shape[-1])
        _rms_norm_fp32(as_array(x).reshape(flat), as_array(weight), offset, eps, as_array(out).reshape(flat))
    return out


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of [T, 2I], gate first: [T, I] in its dtype, computed in float32. The tanh form of GELU
    (Hendrycks & Gimpel, 2016, arXiv:1606.08415)."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    if len(out):
        _gelu_mul(as_array(gate_up.contiguous()), as_array(out))
    return out


def clamped_glu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) gate sigmoid(alpha gate) of [T, 2I], gates at even columns: [T, I] in its dtype, computed in float32.
    Gates are clamped to at most `limit`, ups to +-`limit` (gpt-oss, arXiv:2508.10925)."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    if len(out):
        _clamped_glu(as_array(gate_up.contiguous()), np.float32(alpha), np.float32(limit), as_array(out))
    return out
