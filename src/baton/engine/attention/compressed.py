"""Attention to a window of tokens and to compressed entries (DeepSeek-V4, 2026), batch-invariant on any device.

A row's sink, tokens and entries are gathered side by side and attended to as absorbed latents, in an order that depends
only on its position. Shapes: T rows, H heads, D elements of a token or entry.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import AttnBatch
from baton.engine.attention.latent import PagedLatents, attend_own
from baton.engine.attention.sparse import choose_keys
from baton.models.layer_cache import ENTRY, INDEX, OPEN, TOKEN, Chosen, Compressed, IndexRows, WindowRows

_ROW_BLOCK = 16
# Key columns that carry a sink: three bfloat16 numbers add up to any float32.
_SINK_PARTS = 3


def attend_window(parts: Mapping[str, PagedLatents], rows: WindowRows) -> Tensor:
    """As `LayerCache.attend_window`, over a layer's planes by name. Raises `BatonError` for a bad slot."""
    tokens = parts[TOKEN]
    tokens.write(rows.kept_TD)
    batch = tokens.batch
    counts = np.diff(batch.query_start)
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.maximum(batch.positions - rows.window + 1, 0)
    entries, chosen = None, {}
    num_entries = np.zeros(len(owner), dtype=np.int64)
    if (compressed := rows.compressed) is not None:
        _write_entries(parts, compressed)
        num_entries = num_complete(batch, compressed.rate)
        seen = AttnBatch(batch.query_start, num_entries - 1, parts[ENTRY].batch.page_table)
        entries = parts[ENTRY].by_entries(compressed.rate, seen)
        if compressed.index is not None:
            best = _best(parts[INDEX], compressed.rate, seen, compressed.index)
            chosen = dict(zip(best.rows.tolist(), best.positions, strict=True))
    q = _with_sinks(rows)
    outs = []
    for begin in range(0, len(owner), _ROW_BLOCK):
        block = range(begin, min(begin + _ROW_BLOCK, len(owner)))
        in_window = [np.arange(first[t], batch.positions[t] + 1) for t in block]
        of_entries = [chosen[t] if t in chosen else np.arange(num_entries[t]) for t in block]
        kept, lengths = _side_by_side(tokens, entries, owner[block.start : block.stop], in_window, of_entries, q.dtype)
        outs.append(attend_own(kept, lengths, q[block.start : block.stop], rows.kept_TD.shape[1], rows.scale))
    return torch.cat(outs) if outs else torch.empty_like(rows.q_THD)


def num_complete(batch: AttnBatch, rate: int) -> np.ndarray:
    """[T]: the number of entries whose tokens a row sees in full."""
    counts: np.ndarray = (batch.positions + 1) // rate
    return counts


def _side_by_side(
    tokens: PagedLatents,
    entries: PagedLatents | None,
    owner: np.ndarray,
    in_window: list[np.ndarray],
    of_entries: list[np.ndarray],
    dtype: torch.dtype,
) -> tuple[Tensor, np.ndarray]:
    """The rows' keys [N, S, D + 3] (sink, tokens, entries), and how many of the S each row has [N]."""
    size = tokens.planes[0].shape[-1]
    num_tokens, num_entries = (np.array([len(some) for some in each]) for each in (in_window, of_entries))
    lengths = 1 + num_tokens + num_entries
    device = tokens.planes[0].device
    kept = torch.zeros(len(owner), int(lengths.max()), size + _SINK_PARTS, dtype=dtype, device=device)
    kept[:, 0, size:] = 1.0
    for source, positions, counts, before in (
        (tokens, in_window, num_tokens, np.ones_like(num_tokens)),
        (entries, of_entries, num_entries, 1 + num_tokens),
    ):
        if source is None or not counts.sum():
            continue
        row = np.repeat(np.arange(len(owner)), counts)
        place = np.concatenate([begin + np.arange(count) for begin, count in zip(before, counts, strict=True)])
        gathered = source.kept_at(owner[row], np.concatenate(positions))
        kept[torch.from_numpy(row).to(device), torch.from_numpy(place).to(device), :size] = gathered[:, :size].to(dtype)
    return kept, lengths


def _with_sinks(rows: WindowRows) -> Tensor:
    """Queries [T, H, D + 3] whose product with the sink's key, times the scale, is the sink."""
    rest = (rows.sinks_H / rows.scale).float()
    columns = []
    for _ in range(_SINK_PARTS):
        columns.append(rest.to(rows.q_THD.dtype))
        rest = rest - columns[-1].float()
    return torch.cat((rows.q_THD, torch.stack(columns, dim=1).expand(len(rows.q_THD), -1, -1)), dim=-1)


def _write_entries(parts: Mapping[str, PagedLatents], compressed: Compressed) -> None:
    """Write the open plane's rows, and the entries that they complete."""
    opened, rate = parts[OPEN], compressed.rate
    opened.write(compressed.open_TO)
    batch = opened.batch
    windows: list[Tensor] = []
    numbers: list[int] = []
    query_start = [0]
    for start, stop in zip(batch.query_start[:-1], batch.query_start[1:], strict=True):
        whole = range(0)
        if start < stop:
            whole = range(int(batch.positions[start]) // rate, (int(batch.positions[stop - 1]) + 1) // rate)
        if whole:
            begin = max(whole.start * rate - compressed.overlap, 0)
            kept = opened.kept(len(query_start) - 1, begin, whole.stop * rate)
            for number in whole:
                windows.append(kept[max(number * rate - compressed.overlap, 0) - begin : (number + 1) * rate - begin])
            numbers += whole
        query_start.append(len(numbers))
    if not numbers:
        return
    at = np.array(numbers, dtype=np.int64)
    made_entries = compressed.compress(windows, torch.from_numpy(at).to(opened.planes[0].device))
    for name in (ENTRY, INDEX):
        if name in parts:
            written = AttnBatch(np.array(query_start, dtype=np.int32), at, parts[name].batch.page_table)
            entries = parts[name].by_entries(rate, written)
            width = entries.planes[0].shape[-1]
            entries.write(F.pad(made_entries[name], (0, width - made_entries[name].shape[-1])))


def _best(part: PagedLatents, rate: int, seen: AttnBatch, index: IndexRows) -> Chosen:
    """The entries chosen by rows that see more than `top_k`."""
    keys = part.by_entries(rate, seen)
    size = index.q_THD.shape[-1]
    return choose_keys(keys.planes[0][..., :size], keys.layer, seen, index)
