"""Triton kernels of layers with states: a request's rows in turn in one program, so neither other rows nor chunks
change a bit. For the arithmetic see `kernels/cpu`.

`begins` int32 [R + 1]: the first row of each request. `kept` int32 [T]: the number of the state to keep after a row, -1
for none.
"""

import triton
import triton.language as tl


@triton.jit
def convolve(
    rows, state, weight, bias, owner, begins, out, row_stride, channels,
    TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A causal convolution, then SiLU, of one row and some channels. `rows` [T, channels] of a stride, `state`
    [R, channels, TAPS - 1], `weight` float32 [TAPS, channels], `owner` int32 [T]: the request of a row."""
    t, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    request = tl.load(owner + t)
    begin = tl.load(begins + request)
    mixed = tl.load(bias + c, mask=inside, other=0.0)
    for tap in tl.static_range(TAPS):
        at = t - (TAPS - 1) + tap
        now = tl.load(rows + at.to(tl.int64) * row_stride + c, mask=inside & (at >= begin), other=0.0)
        before = state + (request.to(tl.int64) * channels + c) * (TAPS - 1) + (at - begin + TAPS - 1)
        then = tl.load(before, mask=inside & (at < begin), other=0.0)
        value = tl.where(at >= begin, now.to(tl.float32), then.to(tl.float32))
        mixed += value * tl.load(weight + tap * channels + c, mask=inside, other=0.0)
    tl.store(out + t.to(tl.int64) * channels + c, mixed / (1.0 + tl.exp(-mixed)), mask=inside)


@triton.jit
def gated_delta(
    mixed, beta, decay, state, begins, kept, out, kept_states, heads, width, size, scale, eps,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """The gated delta rule of one request, one value head and some of its numbers. `mixed`: q | k | v, float32; `beta`
    float32 [T, heads]; `decay` float32 [T, heads], or [T, heads, width] if `BY_CHANNEL`; states [heads, width, size];
    `GROUP` value heads share a key head."""
    request, head = tl.program_id(0), tl.program_id(1)
    n, p = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_size, wide, narrow = heads // GROUP * width, n < width, p < size
    lanes = n[:, None] * size + p[None, :]
    inside = wide[:, None] & narrow[None, :]
    s = tl.load(state + (request * heads + head).to(tl.int64) * width * size + lanes, mask=inside, other=0.0)
    begin = tl.load(begins + request)
    row = mixed + begin.to(tl.int64) * (2 * key_size + heads * size)
    to = out + begin.to(tl.int64) * heads * size + head * size + p
    for t in range(begin, tl.load(begins + request + 1)):
        q = tl.load(row + head // GROUP * width + n, mask=wide, other=0.0)
        k = tl.load(row + key_size + head // GROUP * width + n, mask=wide, other=0.0)
        v = tl.load(row + 2 * key_size + head * size + p, mask=narrow, other=0.0)
        q = q / tl.sqrt(tl.sum(q * q, axis=0) + eps) * scale
        k = k / tl.sqrt(tl.sum(k * k, axis=0) + eps)
        if BY_CHANNEL:
            s = s * tl.load(decay + (t * heads + head).to(tl.int64) * width + n, mask=wide, other=0.0)[:, None]
        else:
            s = s * tl.load(decay + t * heads + head)
        u = (v - tl.sum(s * k[:, None], axis=0)) * tl.load(beta + t * heads + head)
        s += k[:, None] * u[None, :]
        o = tl.sum(s * q[:, None], axis=0)
        tl.store(to, o, mask=narrow)
        number = tl.load(kept + t)
        if number >= 0:
            tl.store(kept_states + (number * heads + head).to(tl.int64) * width * size + lanes, s, mask=inside)
        row += 2 * key_size + heads * size
        to += heads * size


@triton.jit
def mamba2(
    mixed, step, decay, skip, state, begins, kept, out, kept_states, heads, width, size,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Mamba-2's recurrence of one request, one head and some of its channels. `mixed`: x | B | C, float32; `step` and
    `decay` float32 [T, heads]; states [heads, width, size]; `GROUP` heads share a B and a C."""
    request, head = tl.program_id(0), tl.program_id(1)
    n, p = tl.arange(0, BLOCK_N), tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    groups, wide, narrow = heads // GROUP, n < width, p < size
    lanes = n[:, None] * size + p[None, :]
    inside = wide[:, None] & narrow[None, :]
    s = tl.load(state + (request * heads + head).to(tl.int64) * width * size + lanes, mask=inside, other=0.0)
    factor = tl.load(skip + head)
    begin = tl.load(begins + request)
    row = mixed + begin.to(tl.int64) * (heads * size + 2 * groups * width)
    to = out + begin.to(tl.int64) * heads * size + head * size + p
    for t in range(begin, tl.load(begins + request + 1)):
        x = tl.load(row + head * size + p, mask=narrow, other=0.0)
        b = tl.load(row + heads * size + head // GROUP * width + n, mask=wide, other=0.0)
        c = tl.load(row + heads * size + (groups + head // GROUP) * width + n, mask=wide, other=0.0)
        scaled = x * tl.load(step + t * heads + head)
        s = s * tl.load(decay + t * heads + head) + b[:, None] * scaled[None, :]
        y = tl.sum(s * c[:, None], axis=0) + x * factor
        tl.store(to, y, mask=narrow)
        number = tl.load(kept + t)
        if number >= 0:
            tl.store(kept_states + (number * heads + head).to(tl.int64) * width * size + lanes, s, mask=inside)
        row += heads * size + 2 * groups * width
        to += heads * size
