"""One function per kernel family: run a random shape, and compare it with a float64 reference.

Inputs that must not affect a result are NaN: unwritten slots of the KV cache, tokens that a row does not see, and
scratch memory (under the guard allocator, which fills what it allocates).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.drafters.eagle3 import Eagle3
from baton.engine.attention.base import AttnBatch
from baton.engine.attention.latent_cpu import attend_latents
from baton.engine.attention.registry import get_backend
from baton.kernels.cpu import causal_conv, elementwise, gated_delta, mamba2
from baton.kernels.cpu.bf16_dot import HAS_BF16_PAIRS
from baton.kernels.cpu.gemm import small_gemm, wide_gemm
from baton.kernels.cpu.gemm.int8_gemm import HAS_INT8_PRODUCTS, Int8Weight
from baton.kernels.cpu.gemm.tile_gemm import BLOCK as TILE_BLOCK
from baton.kernels.cpu.index_scores import score
from baton.kernels.cpu.scalar import as_array
from baton.kernels.cpu.tiles import TILE_COLUMNS, may_use_tiles
from baton.kv.geometry import CopyList
from baton.models.fused_head import FusedHead
from baton.models.fused_layers import FusedLayers
from baton.models.layer_cache import AttnRows
from baton.models.layers.decoder_layer import DecoderLayer
from baton.models.layers.linear import Build, Linear
from baton.models.layers.rotary import Rotary
from baton.transports.copying import copy_runs
from testkit.heads import HeadKind, make_batch, make_head, one_by_one
from testkit.int8 import PATHS, kept_rows, kept_weight, multiply_on
from testkit.layers import HAS_OWN_PRODUCTS, ROPE, LayerKind, PagedRequests, make_layers, usual_quantization

Random = np.random.Generator
DTYPES = (torch.float32, torch.bfloat16)
# Shapes of rows with each draw of weights, which take longer to make than to use.
BATCHES = 8
# Relative error of one rounding to the dtype.
_EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}


class Guard:
    """Turns the guard allocator on while inputs and outputs are allocated and while a kernel runs. It is off while
    references are computed, because it would make them many times slower. Does nothing until `switch` is set.
    """

    def __init__(self) -> None:
        self.switch: Callable[[int], object] = lambda on: None

    def __enter__(self) -> None:
        self.switch(1)

    def __exit__(self, *_: object) -> None:
        self.switch(0)


guard = Guard()


def _normal(random: Random, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.from_numpy(random.standard_normal(shape, dtype=np.float32))
    with guard:
        return numbers.to(dtype, copy=True)


def _empty(*shape: int, fill: float = math.nan, dtype: torch.dtype = torch.float32) -> Tensor:
    with guard:
        return torch.full(shape, fill, dtype=dtype)


def _dtype(random: Random) -> torch.dtype:
    return DTYPES[int(random.integers(2))]


def _compare(made: Tensor, expected: Tensor, dtype: torch.dtype, magnitude: Tensor | float, steps: int) -> None:
    """Allow one rounding of the result, and float32 rounding errors of `steps` additions of terms up to `magnitude`."""
    expected = expected.double()
    bound = 2 * _EPSILON[dtype] * expected.abs() + 2.0**-22 * math.sqrt(steps + 1) * torch.as_tensor(magnitude) + 1e-30
    wrong = ~((made.double() - expected).abs() <= bound)
    if bool(wrong.any()):
        place = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(f"{int(wrong.sum())} wrong, at {place}: {made[place]} instead of {expected[place]}")


def _batch(random: Random, page_size: int, most: int) -> tuple[AttnBatch, list[tuple[int, int]], int]:
    """A ragged batch, the (start, stop) of each request's rows, and the number of pages without the null page."""
    spans = []
    for _ in range(int(random.integers(1, 5))):
        stop = int(random.integers(1, most))
        rows = int(random.choice([1, min(stop, 5), stop, int(random.integers(1, stop + 1))]))
        spans.append((stop - rows, stop))
    columns = max(-(-stop // page_size) for _, stop in spans)
    num_pages = columns * len(spans)
    table = random.permutation(np.arange(1, num_pages + 1)).astype(np.int32).reshape(len(spans), columns)
    starts = np.cumsum([0, *(stop - start for start, stop in spans)]).astype(np.int32)
    return AttnBatch(starts, np.concatenate([np.arange(*span) for span in spans]), table), spans, num_pages


def _attend(
    q_THD: Tensor, k_SHD: Tensor, v_SHC: Tensor, scale: float, window: int, sinks_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of the last T of S tokens in float64: outputs [T, H, C], and the magnitude of the terms of each."""
    q, k, v = q_THD.double().transpose(0, 1), k_SHD.double().permute(1, 2, 0), v_SHC.double().transpose(0, 1)
    seen = torch.ones(len(q_THD), len(k_SHD), dtype=torch.bool).tril(len(k_SHD) - len(q_THD))
    if window:
        positions = torch.arange(len(k_SHD))
        seen &= positions > positions[len(k_SHD) - len(q_THD) :, None] - window
    scores = ((q @ k) * scale).masked_fill(~seen, -math.inf)
    if sinks_H is not None:
        scores = torch.cat((scores, sinks_H.double()[:, None, None].expand(-1, len(q_THD), 1)), dim=2)
    weights = scores.softmax(-1)[..., : len(k_SHD)]
    # An error of a score is an error of its weight.
    reach = 1 + q.norm(dim=2).amax() * k.norm(dim=1).amax() * abs(scale)
    return (weights @ v).transpose(0, 1), v.abs().amax() * reach


def paged(random: Random) -> None:
    """Paged attention: ragged batches, windows, sinks, and NaN in tokens that a row does not see."""
    dtype, group = _dtype(random), int(random.integers(1, 10))
    kv_heads, size = int(random.integers(1, 4)), int(random.choice([1, 5, 16, 20, 32, 48, 64, 80, 96, 128]))
    page_size, window = int(random.choice([1, 3, 7, 16, 32])), int(random.choice([0, 0, 1, 5, 64, 100]))
    batch, spans, num_pages = _batch(random, page_size, 150)
    kv = _empty(num_pages + 1, 2, 2, page_size, kv_heads, size, dtype=dtype)
    rows, scale = len(batch.positions), 1 / math.sqrt(size)
    sinks = _normal(random, kv_heads * group) if random.random() < 0.25 else None
    q = _normal(random, rows, kv_heads * group, size, dtype=dtype)
    keys, values = [], []
    k_rows, v_rows = _empty(rows, kv_heads, size, dtype=dtype), _empty(rows, kv_heads, size, dtype=dtype)
    for r, (start, stop) in enumerate(spans):
        k, v = (_normal(random, stop, kv_heads, size, dtype=dtype) for _ in range(2))
        tokens = np.arange(start)
        pages = torch.from_numpy(batch.page_table[r, tokens // page_size]).long()
        kv[pages, 1, :, torch.from_numpy(tokens % page_size)] = torch.stack((k[:start], v[:start]), dim=1)
        at = int(batch.query_start[r])
        k_rows[at : at + stop - start], v_rows[at : at + stop - start] = k[start:], v[start:]
        keys.append(k.repeat_interleave(group, 1))
        values.append(v.repeat_interleave(group, 1))
    # The last row of a request may be a draft whose forward failed: it must not affect earlier rows.
    broken = {int(batch.query_start[r + 1]) - 1 for r in range(len(spans)) if random.random() < 0.3}
    for row in broken:
        k_rows[row], v_rows[row] = (math.nan, math.inf) if random.random() < 0.5 else (math.inf, math.nan)
    asked = AttnRows(q, k_rows, v_rows, scale, sinks)
    with guard:
        out = get_backend("paged_cpu", "cpu").write_and_attend(kv, 1, asked, batch, window or None)
    for r, (start, _) in enumerate(spans):
        begin, end = int(batch.query_start[r]), int(batch.query_start[r + 1])
        num = end - begin - (end - 1 in broken)
        if num:
            total = start + num
            made = _attend(q[begin : begin + num], keys[r][:total], values[r][:total], scale, window, sinks)
            _compare(out[begin : begin + num], made[0], dtype, made[1], size + total)


def latent(random: Random) -> None:
    """Absorbed latent attention over one plane, or over latents and rope keys in two."""
    dtype, heads = _dtype(random), int(random.integers(1, 9))
    width, rope = int(random.choice([8, 16, 20, 32, 64])), int(random.choice([4, 8, 16, 32]))
    page_size = int(random.choice([1, 5, 16, 32]))
    batch, spans, num_pages = _batch(random, page_size, 120)
    widths = (width + rope,) if random.random() < 0.5 else (width, rope)
    planes = [_empty(num_pages + 1, 2, page_size, 1, w, dtype=dtype) for w in widths]
    rows, scale = len(batch.positions), 1 / math.sqrt(width + rope)
    q = _normal(random, rows, heads, width + rope, dtype=dtype)
    kept, broken = [], []
    tokens = np.arange(max(stop for _, stop in spans))
    for r, (start, stop) in enumerate(spans):
        k = _normal(random, stop, width + rope, dtype=dtype)
        broken.append(stop - start > 1 and random.random() < 0.3)
        if broken[-1]:
            k[-1] = math.nan
        pages, slots = batch.page_table[r, tokens[:stop] // page_size], tokens[:stop] % page_size
        for plane, part in zip(planes, k.split(list(widths), dim=1), strict=True):
            plane[torch.from_numpy(pages).long(), 1, torch.from_numpy(slots), 0] = part
        kept.append(k)
    with guard:
        out = attend_latents(planes, 1, q, width, scale, batch)
    for r, (start, stop) in enumerate(spans):
        begin, num = int(batch.query_start[r]), stop - start - broken[r]
        k = kept[r][: start + num, None].expand(-1, heads, -1)
        made = _attend(q[begin : begin + num], k, k[..., :width], scale, 0, None)
        _compare(out[begin : begin + num], made[0], dtype, made[1], width + rope + stop)


def index(random: Random) -> None:
    """Scores of an indexer. Slots that no row sees are NaN."""
    heads, size, page_size = (int(random.integers(1, most)) for most in (6, 40, 20))
    dtype, length, count = _dtype(random), int(random.integers(1, 200)), int(random.integers(1, 6))
    columns = -(-length // page_size)
    plane = _empty(columns + 2, 1, page_size, 1, size, dtype=dtype)
    pages = random.permutation(np.arange(1, columns + 2, dtype=np.int32))[:columns]
    keys = _normal(random, length, size, dtype=dtype)
    at = np.arange(length)
    plane[pages[at // page_size].astype(np.int64), 0, at % page_size, 0] = keys
    positions = np.sort(random.integers(0, length, count)).astype(np.int64)
    queries, weights = _normal(random, count, heads, size), _normal(random, count, heads)
    out = _empty(count, int(positions[-1]) + 1)
    with guard:
        is_fine = score(
            as_array(plane[:, 0, :, 0]), pages, positions, as_array(queries), as_array(weights), as_array(out)
        )
    if not is_fine:
        raise AssertionError("a page is refused")
    dots = torch.einsum("thd,sd->ths", queries.double(), keys.double()[: out.shape[1]])
    expected = torch.einsum("th,ths->ts", weights.double(), dots.clamp_min(0))
    reach = torch.einsum("thd,sd->ths", queries.double().abs(), keys.double()[: out.shape[1]].abs())
    magnitude = torch.einsum("th,ths->ts", weights.double().abs(), reach)
    for row, position in enumerate(positions):
        seen = slice(0, int(position) + 1)
        _compare(out[row, seen], expected[row, seen], torch.float32, magnitude[row, seen], heads * size)


def rows(random: Random) -> None:
    """Norms, gates and rotations of `elementwise`."""
    dtype, count, size = _dtype(random), int(random.integers(1, 70)), int(random.integers(1, 200))
    x, weight = _normal(random, count, size, dtype=dtype), _normal(random, size, dtype=dtype)
    if count > 1 and random.random() < 0.3:
        x[-1] = math.nan
    eps = 1e-5
    delta = _normal(random, count, size, dtype=dtype)
    total = x + delta
    with guard:
        normed_x = elementwise.rms_norm(x, weight, np.float32(eps))
        normed_total = elementwise.add_rms_norm(x, delta, weight, np.float32(eps))[1]
    for source, made in ((x, normed_x), (total, normed_total)):
        wide = source.double()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(dtype).double()
        expected = normed * weight.double()
        fine = ~expected.isnan().any(dim=1)
        # The normed row is rounded once before it is multiplied; either neighbour may be right.
        magnitude = expected.abs()[fine] * (2.0**15 if dtype is torch.bfloat16 else 4.0)
        _compare(made[fine], expected[fine], dtype, magnitude, size)
    gates = _normal(random, count, 2 * size, dtype=dtype)
    wide = gates.double()
    expected = F.silu(wide[:, :size]) * wide[:, size:]
    with guard:
        made = elementwise.silu_mul(gates)
    _compare(made, expected, dtype, expected.abs(), 16)
    half, num_heads = int(random.integers(1, 40)), int(random.integers(1, 6))
    heads = _normal(random, count, num_heads, 2 * half + int(random.integers(0, 5)), dtype=dtype)
    turned = int(random.integers(1, num_heads + 1))
    cos, sin = _normal(random, count, 1, half, dtype=dtype), _normal(random, count, 1, half, dtype=dtype)
    before = heads.double()
    with guard:
        elementwise.rotate_in_place(heads, turned, cos, sin)
    first, second = before[:, :turned, :half], before[:, :turned, half : 2 * half]
    expected = before.clone()
    expected[:, :turned, :half] = first * cos.double() - second * sin.double()
    expected[:, :turned, half : 2 * half] = second * cos.double() + first * sin.double()
    largest = (1 + before.abs().amax()) * (1 + cos.double().abs().amax() + sin.double().abs().amax())
    _compare(heads, expected, dtype, largest * (2.0**14 if dtype is torch.bfloat16 else 4.0), 2)


def wide(random: Random) -> None:
    """float32 norms, gelu and clamped gates, sigmoids."""
    dtype, count, size = _dtype(random), int(random.integers(1, 40)), int(random.integers(1, 150))
    x, weight = _normal(random, count, size, dtype=dtype), _normal(random, size)
    offset, eps = float(random.integers(2)), 1e-6
    expected = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + eps) * (offset + weight.double())
    with guard:
        made = elementwise.rms_norm_fp32(x, weight, np.float32(offset), np.float32(eps))
    magnitude = x.double().abs() * (offset + weight.double().abs()) * 4
    _compare(made, expected, dtype, magnitude + expected.abs(), size)
    gates = _normal(random, count, 2 * size, dtype=dtype) * 3
    both = gates.double()
    expected = F.gelu(both[:, :size], approximate="tanh") * both[:, size:]
    magnitude = 64 * (both[:, :size].abs() * both[:, size:].abs() + expected.abs())
    with guard:
        made = elementwise.gelu_mul(gates)
    _compare(made, expected, dtype, magnitude, 16)
    alpha, limit = 1.702, 2.5
    gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
    expected = (up + 1) * gate * torch.sigmoid(alpha * gate)
    with guard:
        made = elementwise.clamped_glu(gates, alpha, limit)
    _compare(made, expected, dtype, 4 * gate.abs() * (1 + up.abs()), 16)
    some = _normal(random, count, size) * 8
    with guard:
        made = elementwise.sigmoid(some)
    _compare(made, torch.sigmoid(some.double()), torch.float32, 4.0, 1)


def products(random: Random) -> None:
    """A few rows of bfloat16 times a weight in oneDNN's blocked layout, or any number times one of our own."""
    count, outputs = int(random.integers(1, 65)), 64 * int(random.integers(1, 6))
    step, block = (TILE_COLUMNS, TILE_BLOCK) if may_use_tiles() else (2, 64)
    columns = step * int(random.integers(1, 1400 // step))
    x, weight = (_normal(random, n, columns, dtype=torch.bfloat16) for n in (count, outputs))
    blocked = weight.view(-1, block, columns // 2, 2).permute(0, 2, 1, 3).contiguous()
    bias = _normal(random, outputs, dtype=torch.bfloat16) if random.random() < 0.5 else None
    if count > 1 and random.random() < 0.3:
        x[-1] = math.nan
    with guard:
        if HAS_BF16_PAIRS:
            made = small_gemm.multiply_packed(x, blocked.data_ptr(), outputs, bias)
        else:
            made = wide_gemm.WideWeight(weight).multiply(x, bias)
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    magnitude = x.double().abs() @ weight.double().abs().T
    fine = ~expected.isnan().any(dim=1)
    _compare(made[fine], expected[fine], torch.bfloat16, magnitude[fine], columns)


def int8(random: Random) -> None:
    """Rows of bfloat16 times int8 weights, beside rows that are not finite, on every path."""
    count, outputs, columns = int(random.integers(1, 70)), int(random.integers(1, 200)), int(random.integers(1, 700))
    x, weight = (_normal(random, n, columns, dtype=torch.bfloat16) for n in (count, outputs))
    bias = _normal(random, outputs, dtype=torch.bfloat16) if random.random() < 0.5 else None
    if count > 1 and random.random() < 0.3:
        x[-1] = math.nan
    with guard:
        made = [Int8Weight(weight).multiply(x, bias)]
        made += [multiply_on(path, x, weight, bias) for path in PATHS.values()]
    rows, rounded = kept_rows(x), kept_weight(weight)
    expected = rows @ rounded.T
    if bias is not None:
        expected += bias.double()
    magnitude = rows.abs() @ rounded.abs().T
    fine = ~expected.isnan().any(dim=1)
    for out in made:
        _compare(out[fine], expected[fine], torch.bfloat16, magnitude[fine], columns)
        assert torch.equal(out.view(torch.int16), made[0].view(torch.int16)), "paths differ"


def _quantization(random: Random) -> str | None:
    return "int8" if HAS_INT8_PRODUCTS and random.random() < 0.3 else usual_quantization()


def layers(random: Random) -> None:
    """Decoder layers in one call: the bits of the layers one by one, which the other families check."""
    kv_heads, size = int(random.integers(1, 4)), int(random.choice([16, 32, 64, 96, 128]))
    heads, hidden = kv_heads * int(random.integers(1, 4)), 64 * int(random.integers(1, 5))
    if (heads + 2 * kv_heads) * size % 64:
        heads, kv_heads = 4 * heads, 4 * kv_heads
    shape = heads, kv_heads, size
    kind = LayerKind(
        quantization=_quantization(random),
        qk_norm=random.random() < 0.3,
        bias=random.random() < 0.3,
        rotary_dim=size // 2 if random.random() < 0.3 else None,
        windows=(None, 20) if random.random() < 0.3 else (None, None),
    )
    made = make_layers(kind, hidden, shape, 64 * int(random.integers(1, 5)), int(random.integers(1 << 30)))
    fused = FusedLayers.of(made, [0, 0])
    if fused is None:
        raise AssertionError("the layers are not fused")
    for _ in range(BATCHES):
        _rows_of_layers(random, kind, shape, made, fused)


def _rows_of_layers(
    random: Random, kind: LayerKind, shape: tuple[int, int, int], made: list[DecoderLayer], fused: FusedLayers
) -> None:
    cache = PagedRequests(kind, shape, _spans(random), int(random.integers(1 << 30)))
    x = _normal(random, len(cache.positions), made[0].input_layernorm.weight.shape[0], dtype=torch.bfloat16)
    rotary = Rotary(ROPE, kind.rotary_dim or shape[2], 256, torch.bfloat16, x.device)
    cos_sin = rotary.at(torch.from_numpy(cache.positions))
    expected, kept = [x], {1: _empty(*x.shape, dtype=torch.bfloat16)}
    for layer in made:
        expected.append(layer(expected[-1], cos_sin, copy.deepcopy(cache)))
    with guard:
        out = x.clone()
        fused.run(out, [rotary], cache.regions(), kept)
    if not (torch.equal(out, expected[2]) and torch.equal(kept[1], expected[1])):
        raise AssertionError("other bits than those of the layers one by one")


def _spans(random: Random) -> list[tuple[int, int]]:
    """The rows of some requests."""
    stops = [int(random.integers(1, 150)) for _ in range(int(random.integers(1, 7)))]
    return [(max(0, stop - int(random.choice([1, 1, 4, 10]))), stop) for stop in stops]


def likeliest(random: Random) -> None:
    """An LM head and the choice of its greatest logits: those of the products, which another family checks."""
    quantization = _quantization(random)
    build = Build(torch.bfloat16, torch.device("cpu"), quantization=quantization)
    lm_head = Linear(64 * int(random.integers(1, 6)), 64 * int(random.integers(1, 12)), build)
    assert lm_head.weight is not None
    lm_head.weight.copy_(_normal(random, *lm_head.weight.shape))
    lm_head.pack()
    for _ in range(BATCHES):
        hidden = _normal(random, int(random.choice([1, 8, 39, 64, 100])), lm_head.in_features, dtype=torch.bfloat16)
        expected = [token for rows in hidden.split(32) for token in lm_head(rows).float().argmax(dim=-1).tolist()]
        kept = np.flatnonzero(random.random(len(hidden)) < 0.2)
        if random.random() < 0.3:
            hidden[-1], expected[-1] = math.nan, -1
        head = FusedHead.of(lm_head)
        with guard:
            made = None if head is None else head.likeliest(hidden, kept)
        if made is None or made[0].tolist() != expected:
            raise AssertionError("other tokens than those of the logits")


def drafts(random: Random) -> None:
    """Passes of an EAGLE-3 head in one call: the drafts and the keys of its modules one by one."""
    kv_heads, size = 2 * int(random.integers(1, 3)), int(random.choice([32, 64]))
    heads, hidden = kv_heads * int(random.integers(1, 4)), 64 * int(random.integers(1, 4))
    shape = heads, kv_heads, size
    layers = LayerKind(
        quantization=_quantization(random),
        bias=random.random() < 0.3,
        windows=(None, 20) if random.random() < 0.3 else (None,),
    )
    kind = HeadKind(
        layers,
        draft_vocab=64 * int(random.integers(1, 5)) if random.random() < 0.7 else None,
        norm_before_residual=random.random() < 0.5,
        norm_output=random.random() < 0.5,
    )
    head = make_head(kind, hidden, shape, 64 * int(random.integers(1, 5)), int(random.integers(1 << 30)))
    for _ in range(BATCHES):
        _passes_of_drafts(random, layers, shape, head)


def _passes_of_drafts(random: Random, layers: LayerKind, shape: tuple[int, int, int], head: Eagle3) -> None:
    spans = _spans(random)
    pages = PagedRequests(layers, shape, spans, int(random.integers(1 << 30)), ahead=4)
    counts = [int(random.integers(0, 5)) for _ in spans]
    temperatures = [float(random.choice([0.0, 0.7])) for _ in spans]
    batch = make_batch(head, pages, counts, temperatures, int(random.integers(1 << 30)))
    other = copy.deepcopy(pages)
    expected, margins = one_by_one(head, batch, other)
    with guard:
        made = head.extend(batch)
    if not isinstance(made, list):
        raise AssertionError("the passes were not fused")
    same = [torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(pages.kv, other.kv, strict=True)]
    if made != expected or not np.array_equal(cast(Any, batch.margins), margins) or not all(same):
        raise AssertionError("other drafts, margins or keys than those of the modules one by one")


def states(random: Random) -> None:
    """Convolution, scan and gated norms of Mamba-2."""
    groups, size, width = (int(random.integers(1, most)) for most in (3, 90, 20))
    heads, taps, dtype = groups * int(random.integers(1, 4)), int(random.integers(2, 5)), _dtype(random)
    counts = [int(random.integers(1, 12)) for _ in range(int(random.integers(1, 4)))]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    total, inner, channels = int(starts[-1]), heads * size, heads * size + 2 * groups * width
    rows_TX = _normal(random, total, inner + channels + heads, dtype=dtype)
    conv = _normal(random, len(counts), channels, taps - 1, dtype=dtype)
    weight_KC, bias_C = _normal(random, taps, channels), _normal(random, channels)
    mixed = _empty(total, channels)
    with guard:
        causal_conv.convolve(
            as_array(rows_TX), inner, as_array(conv), as_array(weight_KC), as_array(bias_C), starts, as_array(mixed)
        )
    kept = np.flatnonzero(random.random(total) < 0.5).astype(np.int64)
    last = _empty(len(kept), channels, taps - 1, dtype=dtype)
    with guard:
        causal_conv.last_inputs(as_array(rows_TX), inner, as_array(conv), starts, kept, as_array(last))
    state = _normal(random, len(counts), heads, width * size)
    rate, dt_bias, skip = -_normal(random, heads).abs(), _normal(random, heads), _normal(random, heads)
    out, kept_states = _empty(total, inner), _empty(len(kept), heads, width * size)
    before = state.double().clone()
    with guard:
        mamba2.scan(
            as_array(rows_TX), inner + channels, as_array(mixed), groups, as_array(state), as_array(rate),
            as_array(dt_bias), as_array(skip), starts, kept, as_array(out), as_array(kept_states),
        )  # fmt: skip
    place = {int(row): i for i, row in enumerate(kept)}
    for r, count in enumerate(counts):
        begin = int(starts[r])
        inputs = torch.cat((conv[r].double(), rows_TX[begin : begin + count, inner : inner + channels].double().T), 1)
        s, grown = before[r].view(heads, width, size).clone(), before[r].abs().amax()
        for t in range(count):
            taken = inputs[:, t : t + taps]
            plain = bias_C.double() + (taken * weight_KC.double().T).sum(1)
            reach = bias_C.double().abs() + (taken.abs() * weight_KC.double().T.abs()).sum(1)
            _compare(mixed[begin + t], F.silu(plain), torch.float32, 4 * reach, taps)
            row = mixed[begin + t].double()
            dt = F.softplus(rows_TX[begin + t, inner + channels :].double() + dt_bias.double())
            x = row[:inner].view(heads, size)
            b, c = (
                row[inner + i * groups * width :][: groups * width]
                .view(groups, width)
                .repeat_interleave(heads // groups, 0)
                for i in range(2)
            )
            s = s * (dt * rate.double()).exp()[:, None, None] + b[:, :, None] * (x * dt[:, None])[:, None]
            grown = torch.maximum(grown, s.abs().amax())
            y = (s * c[:, :, None]).sum(1) + x * skip.double()[:, None]
            magnitude = 16 * (1 + grown * (1 + c.abs().amax()) * width + x.abs().amax() * skip.double().abs().amax())
            _compare(out[begin + t], y.flatten(), torch.float32, magnitude, count * width)
            if (i := place.get(begin + t)) is not None:
                _compare(kept_states[i], s.flatten(1), torch.float32, 16 * (1 + grown), count)
                if not torch.equal(last[i].double(), inputs[:, t + 1 : t + taps]):
                    raise AssertionError("the convolution's state is not its last inputs")
    _gated(random, dtype)


def _gated(random: Random, dtype: torch.dtype) -> None:
    count, groups, size = int(random.integers(1, 20)), int(random.integers(1, 4)), int(random.integers(1, 40))
    y, rows_TX = _normal(random, count, groups * size), _normal(random, count, groups * size + 3, dtype=dtype)
    weight = _normal(random, groups * size, dtype=dtype)
    out, eps = _empty(count, groups * size, dtype=dtype), 1e-5
    with guard:
        mamba2.gated_norm(as_array(y), as_array(rows_TX), as_array(weight), groups, np.float32(eps), as_array(out))
    gated = (y.double() * F.silu(rows_TX[:, : groups * size].double())).view(count, groups, size)
    squares = gated.pow(2).mean(-1, keepdim=True)
    expected = (gated * torch.rsqrt(squares + eps)).flatten(1) * weight.double()
    _compare(out, expected, dtype, 8 * weight.double().abs() * size, size)
    made, sums = _empty(count, groups * size), _empty(count, groups)
    with guard:
        mamba2.gated_squares(as_array(y), as_array(rows_TX), as_array(made), as_array(sums))
    _compare(made, gated.flatten(1), torch.float32, 8 * y.double().abs(), 4)
    _compare(sums, gated.pow(2).sum(-1), torch.float32, 8 * gated.pow(2).sum(-1), size)
    factors = torch.rsqrt(squares[..., 0] + eps).float()
    with guard:
        mamba2.scale_rows(as_array(made), as_array(factors), as_array(weight), as_array(out))
    expected = (made.double().view(count, groups, size) * factors.double()[..., None]).flatten(1) * weight.double()
    _compare(out, expected, dtype, 8 * expected.abs(), 2)


def deltas(random: Random) -> None:
    """Recurrence and gated norms of gated delta nets, with a decay for each head or for each channel of its key. For
    the convolution see `states`."""
    key_heads, each, dtype = int(random.integers(1, 3)), int(random.integers(1, 4)), _dtype(random)
    size, width, heads = int(random.integers(1, 90)), int(random.integers(1, 20)), key_heads * each
    counts = [int(random.integers(1, 12)) for _ in range(int(random.integers(1, 4)))]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    total, inner, keys = int(starts[-1]), heads * size, key_heads * width
    num_decays = heads * int(random.choice([1, width]))
    rows_TX = _normal(random, total, inner + heads + num_decays, dtype=dtype)
    mixed, state = _normal(random, total, 2 * keys + inner), _normal(random, len(counts), heads, width * size)
    rate, dt_bias = -_normal(random, heads).abs(), _normal(random, num_decays)
    kept = np.flatnonzero(random.random(total) < 0.5).astype(np.int64)
    out, kept_states = _empty(total, inner), _empty(len(kept), heads, width * size)
    before = state.double().clone()
    with guard:
        gated_delta.scan(
            as_array(rows_TX), inner, as_array(mixed), key_heads, as_array(state), as_array(rate), as_array(dt_bias),
            starts, kept, as_array(out), as_array(kept_states),
        )  # fmt: skip
    place = {int(row): i for i, row in enumerate(kept)}
    b, a = rows_TX[:, inner:].double().split([heads, num_decays], dim=1)
    steps = F.softplus(a + dt_bias.double()).view(total, heads, -1)
    beta, decay = b.sigmoid(), (steps * rate.double()[:, None]).exp()
    q, k, v = mixed.double().split([keys, keys, inner], dim=1)
    q, k = (
        (part / (part.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(each, dim=1)
        for part in (q.view(total, key_heads, width), k.view(total, key_heads, width))
    )
    q, v = q * width**-0.5, v.view(total, heads, size)
    for r, count in enumerate(counts):
        s, grown = before[r].view(heads, width, size).clone(), before[r].abs().amax()
        for t in range(int(starts[r]), int(starts[r]) + count):
            s = s * decay[t][:, :, None]
            new = (v[t] - (s * k[t][:, :, None]).sum(1)) * beta[t][:, None]
            s = s + k[t][:, :, None] * new[:, None]
            grown = torch.maximum(grown, s.abs().amax()) + v[t].abs().amax()
            magnitude = 16 * (1 + grown) * (1 + width)
            _compare(out[t], (s * q[t][:, :, None]).sum(1).flatten(), torch.float32, magnitude, count * width)
            if (i := place.get(t)) is not None:
                _compare(kept_states[i], s.flatten(1), torch.float32, magnitude, count * width)
    weight, normed, eps = _normal(random, size, dtype=dtype), _empty(total, inner, dtype=dtype), 1e-5
    with guard:
        gated_delta.gated_norm(as_array(out), as_array(rows_TX), as_array(weight), np.float32(eps), as_array(normed))
    by_head = out.double().view(total, heads, size)
    by_head = by_head * torch.rsqrt(by_head.pow(2).mean(-1, keepdim=True) + eps) * weight.double()
    _norm_of_deltas(by_head.flatten(1), F.silu(rows_TX[:, :inner].double()), weight, normed, heads)
    gates = _normal(random, total, inner, dtype=dtype)
    with guard:
        gated_delta.sigmoid_gated_norm(
            as_array(out), as_array(gates), as_array(weight), np.float32(eps), as_array(normed)
        )
    _norm_of_deltas(by_head.flatten(1), gates.double().sigmoid(), weight, normed, heads)


def _norm_of_deltas(by_head: Tensor, gates: Tensor, weight: Tensor, normed: Tensor, heads: int) -> None:
    size, dtype, expected = len(weight), weight.dtype, by_head * gates
    # Rounded to the dtype three more times on the way, which weighs more than the additions.
    magnitude = 8 * (weight.double().abs() * size).repeat(heads) * (1 + gates.abs())
    magnitude += 2.0**22 * 4 * _EPSILON[dtype] * expected.abs()
    _compare(normed, expected, dtype, magnitude, size)


def copies(random: Random) -> None:
    """Copies of byte runs: every run arrives, and no other byte changes."""
    lengths = random.integers(1, int(random.choice([40, 600, 9000])), int(random.integers(1, 40)))
    gaps = random.integers(0, 50, len(lengths) + 1)
    begins = np.cumsum(lengths + gaps[:-1]) - lengths
    total = int(begins[-1] + lengths[-1] + gaps[-1])
    with guard:
        source = random.integers(0, 256, total, dtype=np.uint8)
        dest = random.integers(0, 256, total, dtype=np.uint8)
    order = random.permutation(len(lengths))
    # Runs of equal length may swap places.
    from_begins = begins.copy()
    for length in np.unique(lengths):
        alike = np.flatnonzero(lengths == length)
        from_begins[alike] = begins[random.permutation(alike)]
    expected = dest.copy()
    for a, b, n in zip(from_begins, begins, lengths, strict=True):
        expected[b : b + n] = source[a : a + n]
    runs = CopyList(
        0, 0, *(np.ascontiguousarray(part[order], dtype=np.int64) for part in (from_begins, begins, lengths))
    )
    flags = np.zeros(2, dtype=np.int64)
    if copy_runs(source, dest, runs, flags) != len(lengths) or not np.array_equal(dest, expected):
        raise AssertionError("bytes differ")


FAMILIES: dict[str, Callable[[Random], None]] = {
    "paged": paged,
    "latent": latent,
    "index": index,
    "rows": rows,
    "wide": wide,
    "states": states,
    "deltas": deltas,
    "copies": copies,
    **({"products": products, "layers": layers, "likeliest": likeliest, "drafts": drafts} if HAS_OWN_PRODUCTS else {}),
    **({"int8": int8} if HAS_INT8_PRODUCTS else {}),
}
