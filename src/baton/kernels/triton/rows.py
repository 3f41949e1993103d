"""Triton kernels of norms. One program computes a row, in one order of summation, so other rows do not change its bits:
PyTorch's sums on a GPU depend on the number of rows."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x, weight, out, size, eps, offset, BLOCK: tl.constexpr, ROUNDS_FIRST: tl.constexpr
):  # fmt: skip
    """RMSNorm of one of the contiguous rows [size]. `ROUNDS_FIRST`: to the dtype of `out`, then times the weight; else
    times weight + `offset` in float32."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = lanes < size
    wide = tl.load(x + row * size + lanes, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / size + eps)
    own = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    if ROUNDS_FIRST:
        made = own * (wide * factor).to(out.dtype.element_ty).to(tl.float32)
    else:
        made = wide * factor * (own + offset)
    tl.store(out + row * size + lanes, made.to(out.dtype.element_ty), mask=inside)


@triton.jit
def square_sums(x, out, size, BLOCK: tl.constexpr):
    """The sum of squares of one of the contiguous float32 rows [size]."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wide = tl.load(x + row * size + lanes, mask=lanes < size, other=0.0)
    tl.store(out + row, tl.sum(wide * wide, axis=0))
