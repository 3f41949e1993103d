"""Triton kernels of `attention.triton`. `kept` is one layer of a group's pages: [pages, 2, page_size, G, D]."""

import triton
import triton.language as tl


@triton.jit
def write(
    kept, keys, values, slots,
    kept_page, kept_plane, kept_slot, kept_head,
    key_row, key_head, value_row, value_head,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write one row's key and value of one head to its slot.

    A non-finite token becomes a key of NaN and a value of 0: `attend` masks the scores that a row does not see, but
    multiplies values by weights of 0.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    lanes = tl.arange(0, BLOCK_D)
    inside = lanes < D
    to = kept + (slot // PAGE) * kept_page + (slot % PAGE) * kept_slot + head * kept_head + lanes
    k = tl.load(keys + row * key_row + head * key_head + lanes, mask=inside, other=0.0)
    v = tl.load(values + row * value_row + head * value_head + lanes, mask=inside, other=0.0)
    finite = (tl.abs(k.to(tl.float32)) < float("inf")) & (tl.abs(v.to(tl.float32)) < float("inf"))
    spoiled = tl.min(finite.to(tl.int32), axis=0) == 0
    tl.store(to, tl.where(spoiled, float("nan"), k).to(k.dtype), mask=inside)
    tl.store(to + kept_plane, tl.where(spoiled, 0.0, v).to(v.dtype), mask=inside)


@triton.jit
def attend(
    queries, kept, out, page_table, tiles, query_start, positions, sinks,
    scale, window, query_row, query_head,
    kept_page, kept_plane, kept_slot, kept_head, table_row, out_row, out_head,
    PAGE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The rows of one tile, with the query heads of one KV head."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    request, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    stop = tl.load(query_start + request + 1)
    m = tl.arange(0, BLOCK_M)
    row = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    lanes = tl.arange(0, BLOCK_D)
    wide = lanes < D
    here = (m < (BLOCK_M // GROUP) * GROUP) & (row < stop)
    position = tl.load(positions + row, mask=here, other=-1).to(tl.int32)
    at = row.to(tl.int64)[:, None]
    q = tl.load(queries + at * query_row + head[:, None] * query_head + lanes[None, :],
                mask=here[:, None] & wide[None, :], other=0.0)  # fmt: skip
    if HAS_SINKS:
        peak = tl.load(sinks + head, mask=here, other=0.0).to(tl.float32)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    last = tl.max(position, axis=0) + 1
    begin = 0
    if HAS_WINDOW:
        lowest = tl.load(positions + first).to(tl.int32) - window + 1
        begin = (tl.maximum(lowest, 0) // BLOCK_N) * BLOCK_N
    n = tl.arange(0, BLOCK_N)
    for base in range(begin, last, BLOCK_N):
        key = base + n
        known = key < last
        page = tl.load(page_table + request * table_row + key // PAGE, mask=known, other=0).to(tl.int64)
        from_ = kept + page[:, None] * kept_page + (key % PAGE)[:, None] * kept_slot + kv_head * kept_head
        # Other slots may hold anything, and NaN times 0 is NaN: they are not read.
        reads = known[:, None] & wide[None, :]
        if HAS_WINDOW:
            reads = reads & (key >= lowest)[:, None]
        k = tl.load(from_ + lanes[None, :], mask=reads, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        sees = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            sees = sees & (key[None, :] > position[:, None] - window)
        scores = tl.where(sees, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp(scores - anchor[:, None])
        rescale = tl.exp(peak - anchor)
        total = total * rescale + tl.sum(weights, axis=1)
        v = tl.load(from_ + kept_plane + lanes[None, :], mask=reads, other=0.0)
        sums = sums * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = highest
    total = tl.where(here, total, 1.0)
    made = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at * out_row + head[:, None] * out_head + lanes[None, :], made, mask=here[:, None] & wide[None, :])
