"""SGLang's own pools and `KVArgs` in host memory, over unequal numbers of tensor ranks and unequal pages: every byte of
a prompt arrives, and no other byte changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from baton.handoff.plan.planner import plan_copies
from baton.plugin_base.regions import host_region
from baton.sglang.geometry import BufferLayout, RequestPages, describe_buffers
from baton.sglang.pools import RankPools, buffers

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # of imports
TOKENS, SIZE, HEADS, DIM, LAYERS = 21, 96, 4, 8, 2
LORA, ROPE, WINDOW = 12, 4, 6
KEY, VALUE, INPUTS, STATE = 8, 16, 3, 5
INDEX, SCALE = 128, 4
Kind = Literal["latents and a drafter's heads", "window", "linear attention", "sparse attention"]
KINDS: tuple[Kind, ...] = ("latents and a drafter's heads", "window", "linear attention", "sparse attention")
Cell = tuple[torch.Tensor, Any, torch.Tensor]


@dataclass(frozen=True)
class Side:
    """One engine's `page` size, and a prompt's pages there, those of its window and the slot of its state."""

    page: int
    pages: list[int]
    window: list[int]
    slot: int


SOURCE, DEST = Side(4, [6, 1, 4, 2, 7, 3], [2, 5, 1], 2), Side(2, [5, 9, 2, 14, 3, 11, 8, 1, 13, 4, 7], [6, 3, 9, 1], 3)
# SGLang's sparse attention has pages of 64 tokens.
SPARSE_SOURCE, SPARSE_DEST = Side(64, [3], [], 1), Side(64, [1], [], 1)


@dataclass(frozen=True)
class Rank:
    """A tensor rank's pools of one kind, and their description."""

    kind: Kind
    side: Side
    number: int
    count: int
    target: Any
    draft: Any
    layout: BufferLayout

    def cells(self, whole: dict[str, torch.Tensor], hit: int) -> Iterator[Cell]:
        """Where SGLang has each tensor of a prompt from token `hit` on: a tensor, an index, and the content there."""
        side, tokens = self.side, torch.arange(hit, TOKENS)
        slots = torch.tensor(side.pages)[tokens // side.page] * side.page + tokens % side.page
        own = slice(self.number * HEADS // self.count, (self.number + 1) * HEADS // self.count)
        for layer in range(LAYERS):
            if self.kind in ("latents and a drafter's heads", "sparse attention"):
                yield self.target.kv_buffer[layer], slots, whole["latent"][layer, hit:]
            else:
                yield self.target.full_kv_pool.k_buffer[layer], slots, whole["k"][layer, hit:, own]
                yield self.target.full_kv_pool.v_buffer[layer], slots, whole["v"][layer, hit:, own]
            if self.kind == "latents and a drafter's heads":
                yield self.draft.k_buffer[layer], slots, whole["draft k"][layer, hit:, own]
                yield self.draft.v_buffer[layer], slots, whole["draft v"][layer, hit:, own]
            elif self.kind == "sparse attention":
                index = self.target.index_k_with_scale_buffer[layer]
                keys, scales = index[:, : side.page * INDEX], index[:, side.page * INDEX :]
                at = (torch.tensor(side.pages)[tokens // side.page], tokens % side.page)
                yield keys.view(-1, side.page, INDEX), at, whole["index"][layer, hit:, :INDEX]
                yield scales.view(-1, side.page, SCALE), at, whole["index"][layer, hit:, INDEX:]
            elif self.kind == "window":
                last = torch.arange(max(hit, TOKENS - WINDOW), TOKENS)
                start = (TOKENS - WINDOW) // side.page
                at = torch.tensor(side.window)[last // side.page - start] * side.page + last % side.page
                pool = self.target.swa_kv_pool
                yield pool.k_buffer[layer], at, whole["window k"][layer][last][:, own]
                yield pool.v_buffer[layer], at, whole["window v"][layer][last][:, own]
            else:
                cache = self.target.mamba_pool.mamba_cache
                shares = [whole[name][layer].chunk(self.count)[self.number] for name in ("q", "key", "value")]
                yield cache.conv[0][layer], side.slot, torch.cat(shares)
                yield cache.temporal[layer], side.slot, whole["state"][layer, own]


def content() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    names = ("k", "v", "draft k", "draft v", "window k", "window v")
    found = {name: torch.rand(LAYERS, TOKENS, HEADS, DIM) for name in names}
    found["latent"] = torch.rand(LAYERS, TOKENS, 1, LORA + ROPE)
    found |= {name: torch.rand(LAYERS, KEY, INPUTS) for name in ("q", "key")}
    found |= {"value": torch.rand(LAYERS, VALUE, INPUTS), "state": torch.rand(LAYERS, HEADS, DIM, STATE)}
    found["index"] = torch.randint(1, 255, (LAYERS, TOKENS, INDEX + SCALE), dtype=torch.uint8)
    return found


def mha(heads: int, page: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    common = {"size": SIZE, "page_size": page, "dtype": torch.float32, "device": "cpu", "layer_num": LAYERS}
    return MHATokenToKVPool(head_num=heads, head_dim=DIM, enable_memory_saver=False, **common)


def make_pools(kind: Kind, heads: int, page: int) -> tuple[Any, Any]:
    """The target's and the drafter's pool."""
    from sglang.srt.mem_cache import memory_pool, swa_memory_pool

    common = {"size": SIZE, "page_size": page, "dtype": torch.float32, "device": "cpu"}
    latents = {"kv_lora_rank": LORA, "qk_rope_head_dim": ROPE, "layer_num": LAYERS, "enable_memory_saver": False}
    if kind == "latents and a drafter's heads":
        return memory_pool.MLATokenToKVPool(**common, **latents), mha(heads, page)
    if kind == "sparse attention":
        from sglang.srt.runtime_context import get_parallel

        wide = common | {"size": 4 * page}
        with get_parallel().override(attn_dcp_size=1):
            made = memory_pool.DSATokenToKVPool(**wide, **latents, index_head_dim=INDEX, kv_cache_dim=LORA + ROPE)
        return made, None
    attention = common | {"head_num": heads, "head_dim": DIM}
    if kind == "window":
        layers = {"swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1, 3]}
        return swa_memory_pool.SWAKVPool(**attention, **layers, size_swa=SIZE), None
    share = HEADS // heads
    shape = SimpleNamespace(
        conv=[((2 * KEY + VALUE) // share, INPUTS)], temporal=(heads, DIM, STATE), conv_shard_groups=[KEY, KEY, VALUE]
    )
    dtypes = SimpleNamespace(conv=torch.float32, temporal=torch.float32)
    states = memory_pool.MambaPool(
        size=4,
        spec_state_size=0,
        cache_params=SimpleNamespace(shape=shape, dtype=dtypes, is_kda=False),
        mamba_layer_ids=[0, 2],
        device="cpu",
    )
    return memory_pool.HybridLinearKVPool(**attention, full_attention_layer_ids=[1, 3], mamba_pool=states), None


def kv_args(target: Any, draft: Any, page: int) -> Any:
    """As SGLang's queues make them."""
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.utils import setup_state_kv_args

    args = KVArgs()
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = map(list, target.get_contiguous_buf_infos())
    args.num_draft_entries, args.page_size = 0, page
    if draft is not None:
        own = draft.get_contiguous_buf_infos()
        args.num_draft_entries = len(own[0])
        for known, more in zip((args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens), own, strict=True):
            known.extend(more)
    setup_state_kv_args(args, target, draft)
    return args


def engine(kind: Kind, side: Side, count: int, data_rank: int = 0) -> list[Rank]:
    found = []
    for number in range(count):
        target, draft = make_pools(kind, HEADS // count, side.page)
        pools = RankPools(target, draft, number, count, {"target": HEADS, "draft": HEADS}, WINDOW)
        described, turn = buffers(kv_args(target, draft, side.page), pools), data_rank * count + number
        layout = describe_buffers(described, side.page, number, host_region, turn)
        found.append(Rank(kind, side, number, count, target, draft, layout))
    return found


def pages_of(side: Side) -> RequestPages:
    return RequestPages(side.pages, side.window, [side.slot])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prefill", "decode"), [(1, [1]), (2, [1]), (1, [2]), (4, [2]), (1, [1, 1]), (2, [1, 1]), (4, [2, 2])]
)
def test_every_byte_of_sglangs_pools_arrives(kind: Kind, prefill: int, decode: list[int]) -> None:
    """Field class E. Tensor ranks of P, and of each data-parallel rank of D."""
    whole, hit = content(), 0 if kind == "linear attention" else 4
    sides = (SPARSE_SOURCE, SPARSE_DEST) if kind == "sparse attention" else (SOURCE, DEST)
    sources = engine(kind, sides[0], prefill)
    for source in sources:
        for tensor, index, values in source.cells(whole, 0):
            tensor[index] = values
    tables = sources[0].layout.tables(TOKENS, pages_of(sides[0]))
    latents_from = []
    for data_rank, count in enumerate(decode):
        for dest in engine(kind, sides[1], count, data_rank):
            expected: dict[int, torch.Tensor] = {}
            for tensor, index, values in dest.cells(whole, hit):
                expected.setdefault(tensor.data_ptr(), torch.zeros_like(tensor))[index] = values
            latents_from.append(copy_all(sources, tables, dest, sides[1], hit))
            cells = list(dest.cells(whole, hit))
            assert len({tensor.data_ptr() for tensor, _, _ in cells}) == len(cells)
            for tensor, _, _ in cells:
                assert torch.equal(tensor, expected[tensor.data_ptr()]), f"{kind}, rank {dest.number}"
    if kind == "latents and a drafter's heads":
        assert latents_from == [{turn % prefill} for turn in range(sum(decode))]


def copy_all(sources: list[Rank], tables: dict[str, list[int]], dest: Rank, side: Side, hit: int) -> set[int]:
    """Returns the ranks that sent latents."""
    wanted, own, latents_from = dest.layout.wanted(TOKENS, hit), dest.layout.tables(TOKENS, pages_of(side)), set()
    for name, geometry in dest.layout.geometries.items():
        have = [source.layout.geometries[name] for source in sources]
        copies = plan_copies(have, geometry, tables[name], own[name], wanted[name])
        if "latent" in name:
            latents_from |= set(copies)
        for number, copy in copies.items():
            source = np.asarray(sources[number].layout.regions[copy.source_region])
            into = np.asarray(dest.layout.regions[copy.dest_region])
            for start, end, size in zip(copy.source_offset, copy.dest_offset, copy.nbytes, strict=True):
                into[end : end + size] = source[start : start + size]
    return latents_from
