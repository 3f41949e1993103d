"""The small kernels of SGLang's speculation on a CPU, in PyTorch: they move and compare indices. What each must do is
read from its callers; `topk` 1 makes a chain of drafts, more a tree.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

QLEN_ONLY = 1


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, target: Tensor, source: Tensor) -> None:
    """In each buffer, copy rows `source` to rows `target`, which may overlap. `strides`: bytes of a row."""
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * stride, stride) for row in source.tolist()]
        for row, content in zip(target.tolist(), rows, strict=True):
            ctypes.memmove(address + row * stride, content, stride)


def assign_extend_cache_locs_cpu(
    requests: Tensor, slots: Tensor, starts: Tensor, ends: Tensor, out: Tensor, width: int
) -> None:
    """Slots [start, end) of each request's row, one request after the other."""
    at = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        out[at : at + end - start] = slots[row, start:end].to(out.dtype)
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, slots: Tensor, lengths: Tensor, out: Tensor, width: int, topk: int, num_steps: int
) -> None:
    """The `topk * num_steps` slots after each request's tokens."""
    count = topk * num_steps
    found = [slots[row, start : start + count] for row, start in zip(requests.tolist(), lengths.tolist(), strict=True)]
    out.view(-1)[: len(found) * count] = torch.cat(found).to(out.dtype)


def fill_bonus_tokens_cpu(tokens: Tensor, num_accepted: Tensor, out: Tensor, stride: int) -> None:
    """The last accepted token of each request."""
    flat = tokens.reshape(-1)
    rows = torch.arange(num_accepted.numel())
    out[: num_accepted.numel()] = flat[rows * stride + num_accepted - 1].to(out.dtype)


def fill_accept_out_cache_loc_cpu(accepted: Tensor, slots: Tensor, out: Tensor) -> None:
    """The slots of the accepted entries; entries of -1 were not accepted."""
    kept = accepted[accepted > -1]
    out[: kept.numel()] = slots[kept.long()].to(out.dtype)


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    selected: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    depth: int,
    num_tokens: int,
    mode: int,
) -> None:
    """Link each request's drafts to their parents. Node 0 is the last known token, node i the draft `selected[i - 1]`.
    `mask`: the nodes on the path to each node."""
    if int(mode) != QLEN_ONLY:
        raise NotImplementedError(f"tree mask mode {mode}")
    for request, length in enumerate(lengths.tolist()):
        chosen, above = selected[request].tolist(), parents[request].tolist()
        up = [-1] * num_tokens
        for node in range(1, num_tokens):
            group = chosen[node - 1] // topk
            up[node] = 0 if group == 0 else chosen.index(above[group]) + 1
        rows = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
        for node in range(num_tokens):
            path = [node]
            while up[path[-1]] >= 0:
                path.append(up[path[-1]])
            rows[node, path] = True
            rows[node, 0] = True
            positions.view(-1)[request * num_tokens + node] = length + len(path) - 1
            index[request, node] = request * num_tokens + node
        mask.view(-1)[request * num_tokens**2 : (request + 1) * num_tokens**2] = rows.view(-1).to(mask.dtype)
        for node in range(num_tokens - 1, 0, -1):
            first = int(next_token[request, up[node]])
            if first != -1:
                next_sibling[request, node] = first
            next_token[request, up[node]] = node


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
    **further: Any,
) -> None:
    """Follow the drafts that the target would have chosen. `accept_index`: their nodes; `predicts`: the target's token
    after each of them."""
    targets = target_predict.reshape(-1)
    for request in range(candidates.shape[0]):
        node, accepted = 0, 0
        last = int(retrive_index[request, 0])
        accept_index[request, 0] = last
        for _ in range(1, accept_index.shape[1]):
            child = int(retrive_next_token[request, node])
            while child != -1 and int(candidates[request, child]) != int(targets[last]):
                child = int(retrive_next_sibling[request, child])
            if child == -1:
                break
            predicts[last] = targets[last].to(predicts.dtype)
            node, accepted = child, accepted + 1
            last = int(retrive_index[request, child])
            accept_index[request, accepted] = last
        accept_token_num[request] = accepted
        predicts[last] = targets[last].to(predicts.dtype)


def assign_req_to_token_pool_cpu(
    requests: Tensor, slots: Tensor, starts: Tensor, ends: Tensor, found: Tensor, width: int, *further: Any
) -> None:
    """Write the newly allocated slots `found` to [start, end) of each request's row, one request after the other."""
    at = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[row, start:end] = found[at : at + end - start].to(slots.dtype)
        at += end - start
