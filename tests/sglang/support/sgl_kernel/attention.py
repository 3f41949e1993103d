"""SGLang's two attention kernels for CPUs (`--attention-backend intel_amx`), in PyTorch, registered as operators.

K and V of a request are in the slots of its row of `req_to_token`. Each query attends to its own slot and those before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """`query` [n, heads, d] are the last n of the tokens of `keys` and `values` [tokens, KV heads, d]."""
    count, total = query.shape[0], keys.shape[0]
    repeat = query.shape[1] // keys.shape[1]
    k, v = (each.repeat_interleave(repeat, dim=1).transpose(0, 1).to(query.dtype) for each in (keys, values))
    mask = torch.ones(count, total, dtype=torch.bool).tril(total - count)
    scores = (query.transpose(0, 1) @ k.transpose(1, 2) * scale).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def _check(logit_cap: float, cross: bool, window: int, sinks: Any, mask: Any) -> None:
    if logit_cap or cross or window > 0 or sinks is not None or mask is not None:
        raise NotImplementedError("the stand-in knows causal attention without caps, windows, sinks and trees")


def extend_attention(
    query: Tensor, k: Any, v: Any, out: Tensor, keys: Tensor, values: Tensor, k_scale: float, v_scale: float,
    slots: Tensor, rows: Tensor, lengths: Tensor, new_lengths: Tensor, starts: Tensor, longest: int, scale: float,
    logit_cap: float, cross: bool, window: int, encoder: Any, sinks: Any, mask: Any, causal: bool,
) -> None:  # fmt: skip
    """New tokens, whose K and V are in the cache already."""
    _check(logit_cap, cross, window, sinks, mask)
    for row, length, new, start in zip(
        rows.tolist(), lengths.tolist(), new_lengths.tolist(), starts.tolist(), strict=True
    ):
        at = slots[row, :length].long()
        out[start : start + new] = _attend(query[start : start + new], keys[at], values[at], scale)


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, k_scale: float, v_scale: float, out: Tensor, k: Any, v: Any,
    places: Tensor, logits: Tensor, slots: Tensor, rows: Tensor, lengths: Tensor, scale: float, logit_cap: float,
    cross: bool, window: int, encoder: Any, sinks: Any,
) -> None:  # fmt: skip
    """One token per request, whose K and V are written first."""
    _check(logit_cap, cross, window, sinks, None)
    if k is not None:
        keys[places.long()] = k.view(-1, *keys.shape[1:]).to(keys.dtype)
        values[places.long()] = v.view(-1, *values.shape[1:]).to(values.dtype)
    for index, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        at = slots[row, :length].long()
        out[index : index + 1] = _attend(query[index : index + 1], keys[at], values[at], scale)


def build_draft_decode_metadata_cpu(
    slots: Tensor, rows: Tensor, lengths: Tensor, topk: int, num_steps: int, width: int
) -> Tensor:
    """A row of slots for each of a request's `topk` branches: its tokens, then the branch's own draft slots."""
    found = slots[rows.long()].repeat_interleave(topk, dim=0).clone()
    for index, length in enumerate(lengths.tolist()):
        for branch in range(topk):
            start = length + branch * num_steps
            own = slots[rows[index], start : start + num_steps]
            found[index * topk + branch, length : length + own.numel()] = own
    return found


_LIBRARY.define(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, Tensor v_buffer, "
    "float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap, "
    "bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, "
    "bool is_causal) -> ()"
)
_LIBRARY.define(
    "decode_attention_cpu(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, float v_scale, "
    "Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn, "
    "int sliding_window_size, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_LIBRARY.impl("extend_attention_cpu", extend_attention, "CPU")
_LIBRARY.impl("decode_attention_cpu", decode_attention, "CPU")
