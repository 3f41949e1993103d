"""SGLang's KV pools as buffers: those that `KVArgs` names by address, with shapes from the pool's tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import ConfigError
from baton.kv.spec import Cut, Owner
from baton.sglang.geometry import KvBuffer, PagePart, rules_of

# Address, bytes, and bytes of a page.
_Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class RankPools:
    """The pools of tensor rank `rank` of `num_ranks`. `num_kv_heads`: the models'. `window`: number of tokens before a
    query that a windowed layer attends to.
    """

    target: Any
    draft: Any
    rank: int
    num_ranks: int
    num_kv_heads: Mapping[Owner, int]
    window: int | None = None

    def first_head(self, owner: Owner, num_heads: int) -> int:
        """The model's index of this rank's first head, if it has `num_heads`. Raises `ConfigError` if that is no
        share."""
        size, total = self.num_ranks, self.num_kv_heads[owner]
        if size == 1 or num_heads == total:
            return 0
        if num_heads != max(total // size, 1):
            raise ConfigError("tp_size", f"a rank of {size} has {num_heads} of {total} KV heads")
        return self.rank * min(size, total) // size * num_heads


def buffers(args: Any, pools: RankPools) -> list[KvBuffer]:
    """The target's KV, the drafter's, then states. Raises `ConfigError` for others."""
    places = _places(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
    split, target, drafter = len(places) - args.num_draft_entries, pools.target, pools.draft
    kv_buffers = _attention(places[:split], _full(target), "target", pools)
    if places[split:]:
        kv_buffers += _attention(places[split:], drafter, "draft", pools)
    for index, kind in enumerate(args.state_types):
        places = _places(args.state_data_ptrs[index], args.state_data_lens[index], args.state_item_lens[index])
        name = str(kind.value)
        if name == "swa" and _is_exactly(target, "SWAKVPool") and pools.window is not None:
            kv_buffers += _attention(places, target.swa_kv_pool, "target", pools, pools.window + 1)
        elif name == "mamba" and _is_exactly(target, "HybridLinearKVPool"):
            kv_buffers += _states(places, pools, args.state_conv_shard_groups[index])
        elif name == "dsa" and _is_exactly(target, "DSATokenToKVPool"):
            num_target = len(target.get_state_buf_infos()[0])
            kv_buffers += _index(places[:num_target], target, "target")
            kv_buffers += _index(places[num_target:], drafter, "draft")
        else:
            raise ConfigError("model", f"the plug-in does not hand off state {name!r} of {type(target).__name__}")
    return kv_buffers


def _places(addresses: Sequence[int], sizes: Sequence[int], pages: Sequence[int]) -> list[_Place]:
    places = zip(addresses, sizes, pages, strict=True)
    return [(int(address), int(size), int(page)) for address, size, page in places]


def _is_exactly(pool: Any, name: str) -> bool:
    """Exact types: a subclass's buffers may hold other data."""
    return type(pool).__name__ == name


def _full(pool: Any) -> Any:
    return pool.full_kv_pool if _is_exactly(pool, "SWAKVPool") or _is_exactly(pool, "HybridLinearKVPool") else pool


def _attention(
    places: Sequence[_Place], pool: Any, owner: Owner, pools: RankPools, window: int | None = None
) -> list[KvBuffer]:
    """Buffers of K, then of V, or of latents, layer by layer. `window`: as in `Rules`."""
    tensors = {"MHATokenToKVPool": ("k", "v"), "MLATokenToKVPool": ("kv",), "DSATokenToKVPool": ("kv",)}
    if (names := tensors.get(type(pool).__name__)) is None:
        raise ConfigError("model", f"the plug-in does not support the {owner}'s KV pool {type(pool).__name__}")
    if (layout := getattr(pool, "kv_cache_layout", "nhd")) != "nhd":
        raise ConfigError("kv_cache_layout", f"the plug-in supports KV by token, then head, got {layout}")
    latent = names == ("kv",)
    num_layers, kv_buffers = len(places) // len(names), []
    for entry, place in enumerate(places):
        name, layer = names[entry // num_layers], entry % num_layers
        tensor = getattr(pool, f"{name}_buffer")[layer]
        heads, dim = (1, tensor.shape[-1]) if latent else (int(tensor.shape[-2]), int(tensor.shape[-1]))
        first = 0 if latent else pools.first_head(owner, heads)
        part = PagePart("latent" if latent else name, _dtype(tensor), "whole" if latent else "heads", heads, dim, first)
        kind = "mla" if latent else "full" if window is None else "sliding_window"
        group = part.name if window is None else f"window_{part.name}"
        number = int(pool.start_layer or 0) + layer
        kv_buffers.append(KvBuffer(owner, group, number, *place, (part,), rules_of(owner, kind, window)))  # type: ignore[arg-type]
    return kv_buffers


def _index(places: Sequence[_Place], pool: Any, owner: Owner) -> list[KvBuffer]:
    """Sparse attention's index keys: in a page all keys, then all scales."""
    if places and (int(pool.index_kpool) != 1 or any(pool.skip_topk_layers)):
        raise ConfigError("model", "the plug-in supports sparse attention with a key per token in each layer")
    kv_buffers = []
    for layer, place in enumerate(places):
        dim = int(pool.index_head_dim)
        keys = PagePart("index", "uint8", "whole", 1, dim)
        scales = PagePart("scale", "float32", "whole", 1, dim // int(pool.quant_block_size))
        number = int(pool.start_layer or 0) + layer
        kv_buffers.append(KvBuffer(owner, "index", number, *place, (keys, scales), rules_of(owner, "mla")))
    return kv_buffers


def _states(places: Sequence[_Place], pools: RankPools, conv_parts: Sequence[Sequence[int] | None]) -> list[KvBuffer]:
    """Inputs of convolutions `[slots, channels, inputs]`, and recurrent states `[slots, heads, ...]`. `conv_parts`: per
    buffer, the model's channels of q, k and v, each shared by the ranks; None: one block."""
    rank, num_ranks = pools.rank, pools.num_ranks
    states: list[KvBuffer] = []
    # SGLang's own iterator for making `places`.
    entries = list(pools.target.mamba_pool._iter_transfer_state_entries())
    for place, parts, (field, tensor, axis, layer) in zip(places, conv_parts, entries, strict=True):
        whole, channels = axis is None, int(tensor.shape[1])
        if (axis or not tensor.is_contiguous()) and num_ranks > 1:
            raise ConfigError("tp_size", f"the plug-in cannot cut {field} of a state over tensor ranks")
        shares = [int(part) // num_ranks for part in parts] if parts else [channels]
        if sum(shares) != channels:
            raise ConfigError("model", f"{channels} channels of {field} are not {shares}")
        cut: Cut = "whole" if whole else "channels" if field == "conv" else "heads"
        dim = math.prod(tensor.shape[2:])
        page_parts = [
            PagePart(f"{field}.{number}", _dtype(tensor), cut, share, dim, 0 if whole else rank * share)
            for number, share in enumerate(shares)
        ]
        same = sum(other.layer == layer and other.name.rstrip("0123456789") == field for other in states)
        states.append(
            KvBuffer("target", f"{field}{same}", int(layer), *place, tuple(page_parts), rules_of("target", "state"))
        )
    return states


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
