"""Chooses keys for sparse attention (DeepSeek-V3.2). Scores come from tiles of one shape, so a row chooses the same
keys in every batch.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import AttnBatch
from baton.engine.attention.latent import PagedLatents
from baton.kernels.cpu.index_scores import score
from baton.kernels.cpu.scalar import as_array, supports
from baton.models.layer_cache import Chosen, IndexRows, slot_error

_TILE = 64
# Rows whose scores are in memory at once.
_ROW_BLOCK = 64


def choose_keys(plane: Tensor, layer: int, batch: AttnBatch, rows: IndexRows) -> Chosen:
    """Write the rows' keys, if any, to `plane` [pages, layers, page_size, 1, D], then choose for each row that sees
    more than `top_k` keys. Raises `BatonError` for a bad slot.
    """
    latents = PagedLatents([plane], layer, batch)
    if rows.k_TD is not None:
        latents.write(rows.k_TD)
    on_cpu = supports(plane.device, plane.dtype) and rows.q_THD.device.type == "cpu"
    scores = _scores_cpu if on_cpu else _scores
    chosen: list[np.ndarray] = []
    indices: list[np.ndarray] = []
    for r, start, stop in latents.requests(batch):
        first = start + int(np.searchsorted(batch.positions[start:stop], rows.top_k))
        for begin in range(first, stop, _ROW_BLOCK):
            block = slice(begin, min(begin + _ROW_BLOCK, stop))
            positions = batch.positions[block]
            tile = scores(latents, plane[:, layer, :, 0], r, positions, rows.q_THD[block], rows.weights_TH[block])
            best = [row[: p + 1].topk(rows.top_k).indices for row, p in zip(tile, positions.tolist(), strict=True)]
            chosen.append(torch.stack(best).sort(dim=1).values.cpu().numpy())
            indices.append(np.arange(block.start, block.stop))
    if not chosen:
        return Chosen(np.empty(0, np.int64), np.empty((0, rows.top_k), np.int64))
    return Chosen(np.concatenate(indices).astype(np.int64), np.concatenate(chosen).astype(np.int64))


def _scores_cpu(
    latents: PagedLatents, keys: Tensor, request: int, positions: np.ndarray, q_NHD: Tensor, weights_NH: Tensor
) -> Tensor:
    """Scores float32 [N, S] of one request's rows; those of later keys are not set."""
    out = torch.empty(len(positions), int(positions[-1]) + 1)
    pages, queries, weights = latents.batch.page_table[request], q_NHD.float().contiguous(), weights_NH.contiguous()
    if not score(as_array(keys), pages, positions, as_array(queries), as_array(weights), as_array(out)):
        raise slot_error()
    return out


def _scores(
    latents: PagedLatents, keys: Tensor, request: int, positions: np.ndarray, q_NHD: Tensor, weights_NH: Tensor
) -> Tensor:
    limit, queries = int(positions[-1]) + 1, q_NHD.float()
    out = torch.empty(len(positions), limit, device=q_NHD.device)
    for base in range(0, limit, _TILE):
        last = min(base + _TILE, limit)
        tile = F.pad(latents.kept(request, base, last).float(), (0, 0, 0, base + _TILE - last))
        for row, (query, weights) in enumerate(zip(queries, weights_NH, strict=True)):
            out[row, base:last] = (weights @ F.relu(query @ tile.T))[: last - base]
    return out
