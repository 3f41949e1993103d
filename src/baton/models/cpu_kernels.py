"""Batch-invariant elementwise functions and norms in Numba.

PyTorch's vectorised loops finish the last few elements with scalar code whose `exp` rounds differently, so a row's SiLU
depends on the number of rows. The functions here are strict IEEE multiply-adds (no reassociation, no contraction):
scalar and vector code give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic
from torch import Tensor

from baton.models.cpu_cache import compiled
from baton.models.cpu_vectors import LANES, square_sum

F = TypeVar("F", bound=Callable[..., Any])

# exp(x) = 2^n * e^r with n = round(x / ln 2). Adding _MAGIC rounds to an integer in the low mantissa bits.
_LOG2E = np.float32(1.4426950408889634)
_MAGIC = np.float32(12582912.0)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_SMALLEST = np.float32(-87.0)
_LARGEST = np.float32(88.0)
_ONE = np.float32(1.0)
# 2 sqrt(2 / pi), and the same times 0.044715.
_GELU_LINEAR = np.float32(1.5957691216057308)
_GELU_CUBIC = np.float32(0.07135481627159025)
# Minimax coefficients of (e^r - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2] (Cephes expf, Moshier 1989).
_C0 = np.float32(1.9875691500e-4)
_C1 = np.float32(1.3981999507e-3)
_C2 = np.float32(8.3334519073e-3)
_C3 = np.float32(4.1665795894e-2)
_C4 = np.float32(1.6666665459e-1)
_C5 = np.float32(5.0000001201e-1)


def jit(function: F) -> F:
    """`numba.njit` without the GIL, with strict IEEE arithmetic and the disk cache."""
    return cast(F, compiled(function, nogil=True, error_model="numpy"))


def jit_contract(function: F) -> F:
    """As `jit`, but a multiply and an add may be fused (their order is kept)."""
    return cast(F, compiled(function, nogil=True, error_model="numpy", fastmath={"contract"}))


def _to_f32(typing_context: Any, value: Any) -> Any:
    """A float32 unchanged, or the bits of a bfloat16 (uint16) widened exactly."""
    if value == numba.float32:
        return numba.float32(numba.float32), lambda context, builder, signature, args: args[0]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return numba.float32(numba.uint16), generate


def _from_f32(typing_context: Any, element: Any, value: Any) -> Any:
    """A float32 in the type of `element`: unchanged, or the bits of the nearest bfloat16 (uint16)."""
    if element == numba.float32:
        return numba.float32(element, numba.float32), lambda context, builder, signature, args: args[1]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, half = ir.IntType(32), ir.IntType(16)
        bits = builder.bitcast(args[1], word)
        even = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        rounded = builder.lshr(builder.add(builder.add(bits, ir.Constant(word, 0x7FFF)), even), ir.Constant(word, 16))
        is_nan = builder.fcmp_unordered("uno", args[1], args[1])
        return builder.select(is_nan, ir.Constant(half, 0x7FC0), builder.trunc(rounded, half))

    return numba.uint16(element, numba.float32), generate


def _power_of_two(typing_context: Any, value: Any) -> Any:
    """2^n as float32, from _MAGIC + n."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        biased = builder.add(builder.bitcast(args[0], word), ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return numba.float32(numba.float32), generate


to_f32 = cast(Callable[[Any], Any], intrinsic(_to_f32))
from_f32 = cast(Callable[[Any, Any], Any], intrinsic(_from_f32))
_exp2_of_magic = cast(Callable[[Any], Any], intrinsic(_power_of_two))


@jit
def exp32(x: Any) -> Any:
    """e^x in float32, relative error below 2e-7, x clamped to [-87, 88]. LLVM vectorises it in a caller's loop."""
    x = min(max(x, _SMALLEST), _LARGEST)
    shifted = x * _LOG2E + _MAGIC
    n = shifted - _MAGIC
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    poly = _C0
    poly = poly * r + _C1
    poly = poly * r + _C2
    poly = poly * r + _C3
    poly = poly * r + _C4
    poly = poly * r + _C5
    return (poly * (r * r) + r + _ONE) * _exp2_of_magic(shifted)


@jit
def _sigmoid(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = _ONE / (_ONE + exp32(-x[i]))


@jit
def _rms_norm_wide(x: Any, weight: Any, offset: Any, eps: Any, out: Any) -> None:
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


def fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the CPU kernels take tensors of this device and dtype."""
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)


def array(tensor: Tensor) -> Any:
    """A contiguous CPU tensor as a numpy array: float32, or the bits of bfloat16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) of a float32 CPU tensor."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _sigmoid(array(x.contiguous()).reshape(-1), array(out).reshape(-1))
    return out


def rms_norm_wide(x: Tensor, weight: Tensor, offset: np.float32, eps: np.float32) -> Tensor:
    """RMSNorm over the last dimension of a CPU tensor, times `offset` + `weight` in float32 (`layers.WideNorm`)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        flat = (-1, x.shape[-1])
        _rms_norm_wide(array(x).reshape(flat), array(weight), offset, eps, array(out).reshape(flat))
    return out


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of a CPU tensor [T, 2I], gate first: [T, I] in its dtype, computed in float32. The tanh form of
    GELU (Hendrycks & Gimpel, 2016, arXiv:1606.08415)."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    if len(out):
        _gelu_mul(array(gate_up.contiguous()), array(out))
    return out


def clamped_glu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """(up + 1) gate sigmoid(alpha gate) of a CPU tensor [T, 2I], gates at even columns: [T, I] in its dtype, computed
    in float32. Gates are clamped to at most `limit`, ups to +-`limit` (gpt-oss, arXiv:2508.10925)."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype)
    if len(out):
        _clamped_glu(array(gate_up.contiguous()), np.float32(alpha), np.float32(limit), array(out))
    return out
