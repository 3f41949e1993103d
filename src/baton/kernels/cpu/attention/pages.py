"""Where the keys and values of tokens lie: kv [pages, layers, 2, page_size, G, D]."""

from __future__ import annotations

from typing import Any

import numpy as np

from baton.jit_cache import jit
from baton.kernels.cpu.attention.online_softmax import TILE
from baton.kernels.cpu.simd import LANES, LINE_BYTES, touch
from baton.kernels.cpu.transposes import copy_line

# Bytes read ahead at once, which a core's cache keeps until all heads have used them.
_BYTES_AHEAD = 1 << 18


@jit
def page_of(kv: Any, position: Any, pages: Any) -> Any:
    """The page of a position's slot; 0 for a bad one."""
    column = position // kv.shape[3]
    return page_at(kv, position, pages) if 0 <= column < len(pages) else 0


@jit
def page_at(kv: Any, position: Any, pages: Any) -> Any:
    """Of a position with a column."""
    page = np.int64(pages[position // kv.shape[3]])
    return page if 0 < page < kv.shape[0] else 0


@jit
def are_valid_slots(kv: Any, positions: Any, query_start: Any, page_table: Any) -> bool:
    for r in range(len(query_start) - 1):
        for row in range(query_start[r], query_start[r + 1]):
            if page_of(kv, positions[row], page_table[r]) == 0:
                return False
    return True


@jit
def find_keys(kv: Any, layer: int, head: int, pages: Any, begin: int, first: int, last: int, rows: Any) -> bool:
    """The addresses of the keys of tokens [begin, begin + 16), of which some are in [first, last): others repeat one of
    these. Values are `kv.strides[2]` bytes after keys. Returns False for a bad page id."""
    page_size, of_head = kv.shape[3], np.int64(kv.ctypes.data) + layer * kv.strides[1] + head * kv.strides[4]
    token, page = max(begin, first), 0
    column, earlier = token // page_size, -1
    slot = token - column * page_size
    for j in range(LANES):
        if first < begin + j < last and j > 0:
            slot += 1
            if slot == page_size:
                column, slot = column + 1, 0
        if column != earlier:
            page, earlier = np.int64(pages[column]), column
            if page <= 0 or page >= kv.shape[0]:
                return False
        rows[j] = of_head + page * kv.strides[0] + slot * kv.strides[3]
    return True


@jit
def copy_keys(rows: Any, row_bytes: int, to: Any) -> None:
    """16 keys at the addresses `rows`, one after another."""
    for j in range(LANES):
        for offset in range(0, row_bytes, LINE_BYTES):
            copy_line(rows[j] + offset, to + j * row_bytes + offset)


@jit
def read_ahead(kv: Any, layer: int, head: int, num_heads: int, pages: Any, base: int, oldest: int, limit: int) -> None:
    """Before the tile at `base`, now and then: bring the next of tokens [oldest, limit) of `num_heads` heads (0: none)
    into this core's cache. Contiguous bytes come faster."""
    if num_heads == 0:
        return
    count = max(1, _BYTES_AHEAD // (2 * TILE * num_heads * kv.strides[4])) * TILE
    if (base - oldest // TILE * TILE) % count == 0:
        _read(kv, layer, head, num_heads, pages, max(base, oldest), min(base + count, limit))


@jit
def _read(kv: Any, layer: int, head: int, num_heads: int, pages: Any, first: int, last: int) -> None:
    page_size = kv.shape[3]
    token = first
    while token < last:
        column = token // page_size
        slot, page = token - column * page_size, np.int64(pages[column])
        if page <= 0 or page >= kv.shape[0]:
            return
        count = min(page_size - slot, last - token)
        keys_at = np.int64(kv.ctypes.data) + page * kv.strides[0] + layer * kv.strides[1] + head * kv.strides[4]
        for at in (keys_at, keys_at + kv.strides[2]):
            for j in range(slot, slot + count):
                for offset in range(0, num_heads * kv.strides[4], LINE_BYTES):
                    touch(at + j * kv.strides[3] + offset)
        token += count
