"""Scalar functions for Numba kernels: conversion between bfloat16 and float32, and `exp32`.

`exp32` is strict IEEE multiply-adds (no reassociation, no contraction), so scalar and vector code give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic
from torch import Tensor

from baton.jit_cache import jit

# exp(x) = 2^n * e^r with n = round(x / ln 2). Adding _MAGIC rounds to an integer in the low mantissa bits.
_LOG2E = np.float32(1.4426950408889634)
_MAGIC = np.float32(12582912.0)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_SMALLEST = np.float32(-87.0)
_LARGEST = np.float32(88.0)
_ONE = np.float32(1.0)
# Above this softplus(x) is x, as in PyTorch.
_LINEAR = np.float32(20.0)
# Minimax coefficients of (e^r - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2] (Cephes expf, Moshier 1989).
_C0 = np.float32(1.9875691500e-4)
_C1 = np.float32(1.3981999507e-3)
_C2 = np.float32(8.3334519073e-3)
_C3 = np.float32(4.1665795894e-2)
_C4 = np.float32(1.6666665459e-1)
_C5 = np.float32(5.0000001201e-1)


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
def softplus32(x: Any) -> Any:
    """log(1 + e^x) in float32, computed in float64."""
    return np.float32(math.log1p(math.exp(x))) if x <= _LINEAR else x


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)


def as_array(tensor: Tensor) -> Any:
    """A contiguous CPU tensor: float32, or the bits of bfloat16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
