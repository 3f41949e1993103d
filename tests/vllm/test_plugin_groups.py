"""The plug-in's view of vLLM's caches: groups by owner, tensors as geometries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from baton.errors import ConfigError, IncompatiblePeerError
from baton.handoff.plan.planner import plan_copies
from baton.handoff.protocol.digests import MemoryDigester
from baton.kv.interval import Interval
from baton.kv.spec import Owner
from baton.vllm.memory.geometry import (
    CacheLayout,
    Granularity,
    KernelLayout,
    WorkerHeads,
    describe_caches,
    kernel_pages,
)
from baton.vllm.memory.groups import CacheTable, is_draft, layer_index, split_tables, without_passed_blocks

HEADS, DIM = 2, 8


def names(*ids: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{i}.self_attn.attn" for i in ids)


def cpu_cache(blocks: int, block_size: int, layers: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """As vLLM allocates it: one buffer, one view `[blocks, heads, tokens, 2 * dim]` per layer."""
    buffer = torch.zeros(layers * blocks * HEADS * block_size * 2 * DIM)
    views = buffer.view(layers, blocks, HEADS, block_size, 2 * DIM)
    return buffer, {name: views[i] for i, name in enumerate(names(*range(layers)))}


def layout(
    caches: dict[str, torch.Tensor], block_size: int, target_layers: int, granularity: Granularity = "page"
) -> CacheLayout:
    table = CacheTable(0, "full", None, block_size, tuple(caches))
    kernels: dict[str, KernelLayout] = dict.fromkeys(caches, "k_by_dimension")
    return describe_caches(caches, split_tables([table], target_layers), kernels, granularity)


def fill(
    view: torch.Tensor, block_size: int, table: list[int], tokens: int, layer: int, heads: Sequence[int] = range(HEADS)
) -> None:
    """Write tokens of the model's `heads` as the `vec` kernel does: K by dimension, then V by token."""
    pages = view.view(view.shape[0], len(heads), 2 * block_size * DIM)
    for token in range(tokens):
        page, at = table[token // block_size], token % block_size
        for here, head in enumerate(heads):
            for e in range(DIM):
                value = 1.0 + layer * 1e6 + token * 100 + head * 10 + e
                pages[page, here, e * block_size + at] = value
                pages[page, here, block_size * DIM + at * DIM + e] = -value


def test_a_drafter_that_shares_a_block_table_becomes_a_group_of_its_own() -> None:
    groups = split_tables([CacheTable(0, "full", None, 32, names(0, 1, 2, 3))], num_target_layers=3)
    assert [(g.name, g.owner, g.table, g.layer_ids) for g in groups] == [
        ("target.full.0", "target", 0, (0, 1, 2)),
        ("draft.full.0", "draft", 0, (3,)),
    ]


def test_layers_of_a_draft_model_are_known_by_their_prefix() -> None:
    assert is_draft("draft_model.model.layers.0.self_attn.attn", 4)
    assert is_draft("mtp.layers.0.self_attn.attn", 4)
    assert not is_draft("model.layers.3.self_attn.attn", 4)
    assert layer_index("language_model.model.layers.17.self_attn.attn") == 17
    with pytest.raises(ConfigError, match="has no number"):
        layer_index("model.embed")


@pytest.mark.parametrize(("module", "wanted"), [(1, Interval(98, 99)), (None, Interval(99, 99))])
def test_after_a_full_hit_only_entries_that_depend_on_the_next_token_come(module: int | None, wanted: Interval) -> None:
    """Not those of a draft model or DFlash."""
    target, draft = split_tables([CacheTable(0, "full", None, 32, names(0, 1))], 1, module)
    assert (target.wanted(99, 99), draft.wanted(99, 99)) == (Interval(99, 99), wanted)


@pytest.mark.parametrize("computed", [0, 1, 31, 32, 33, 95, 96, 99])
def test_a_tile_is_final_when_all_of_it_is(computed: int) -> None:
    (group,) = split_tables([CacheTable(0, "full", None, 32, names(0))], 1)
    assert group.final(99, computed, 32) == (99 if computed == 99 else computed // 32 * 32)


def test_what_is_wanted_ends_before_the_token_that_is_computed_here() -> None:
    full, draft = split_tables([CacheTable(0, "full", None, 32, names(0, 1))], 1)
    window = split_tables([CacheTable(0, "sliding_window", 16, 32, names(0))], 1)[0]
    assert full.wanted(99, 32) == Interval(32, 99)
    assert draft.wanted(99, 32) == Interval(32, 99)
    # The next query, token 99, sees keys 84 to 99.
    assert window.wanted(99, 32) == Interval(84, 99)


@pytest.mark.parametrize(("hit", "start"), [(0, 64), (32, 64), (64, 64), (96, 96)])
def test_a_window_that_is_to_be_found_again_is_wanted_in_whole_blocks(hit: int, start: int) -> None:
    """vLLM finds whole blocks alone. With a drafter of hidden states, its entry of the last token is wanted too."""
    full, draft = split_tables([CacheTable(0, "full", None, 32, names(0, 1))], 1)
    window = CacheTable(0, "sliding_window", 16, 32, names(0, 1))
    for group in split_tables([window], 1):
        assert group.wanted(99, hit, whole=True) == Interval(start, 99)
    assert full.wanted(99, hit, whole=True) == draft.wanted(99, hit, whole=True) == Interval(hit, 99)


@pytest.mark.parametrize(("num_computed", "passed"), [(0, 0), (46, 0), (47, 1), (78, 1), (79, 2)])
def test_blocks_that_a_window_has_passed_are_nobodys(num_computed: int, passed: int) -> None:
    """Of 16 tokens, the query after 47 sees the last of the first block no more."""
    tables = [CacheTable(0, "full", None, 32, names(0)), CacheTable(1, "sliding_window", 16, 32, names(1))]
    given = ([5, 6, 7], [8, 9, 10])
    left = [0] * passed + [8, 9, 10][passed:]
    assert without_passed_blocks(given, tables, num_computed) == ([5, 6, 7], left)
    assert given == ([5, 6, 7], [8, 9, 10])


@pytest.mark.parametrize(
    ("source_size", "dest_size", "granularity"),
    [(32, 32, "page"), (64, 64, "page"), (32, 32, "token"), (32, 64, "token"), (64, 32, "token")],
)
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 65, 100])
def test_pages_hold_the_same_tokens_after_a_copy(
    source_size: int, dest_size: int, granularity: Granularity, tokens: int
) -> None:
    num_layers, target_layers = 3, 2
    source_buffer, source_caches = cpu_cache(9, source_size, num_layers)
    dest_buffer, dest_caches = cpu_cache(9, dest_size, num_layers)
    expected_buffer, expected = cpu_cache(9, dest_size, num_layers)
    source_table, dest_table = [7, 2, 5, 1], [3, 8, 4, 6]
    for layer, name in enumerate(names(*range(num_layers))):
        fill(source_caches[name], source_size, source_table, tokens, layer)
        fill(expected[name], dest_size, dest_table, tokens, layer)
    have = layout(source_caches, source_size, target_layers, granularity)
    want = layout(dest_caches, dest_size, target_layers, granularity)
    assert len(have.regions) == 1
    assert have.regions[0].ctypes.data == source_buffer.data_ptr()
    assert len(have.geometries) == 2
    assert all([p.name for p in rank.geometry.planes] == ["k", "v"] for rank in have.geometries.values())
    for name in have.geometries:
        lists = plan_copies(
            [have.geometries[name]], want.geometries[name], source_table, dest_table, Interval(0, tokens)
        )
        for copies in lists.values():
            for source, dest, nbytes in zip(copies.source_offset, copies.dest_offset, copies.nbytes, strict=True):
                want.regions[0][dest : dest + nbytes] = have.regions[0][source : source + nbytes]
    assert torch.equal(dest_buffer, expected_buffer)


def test_a_latent_cache_and_a_drafter_with_heads_share_a_block_table() -> None:
    """MLA layers, with one row of elements per token, and a drafter with K and V: two kinds of bytes, one
    block table.
    """

    def caches() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        latent, paged = 2 * 9 * 32 * 24, 9 * HEADS * 32 * 2 * DIM
        buffer = torch.zeros(latent + paged)
        views = dict(zip(names(0, 1), buffer[:latent].view(2, 9, 1, 32, 24), strict=True))
        return buffer, views | {names(2)[0]: buffer[latent:].view(9, HEADS, 32, 2 * DIM)}

    tables = [CacheTable(0, "mla", None, 32, names(0, 1)), CacheTable(0, "full", None, 32, names(2))]
    groups = split_tables(tables, num_target_layers=2)
    assert [(g.name, g.owner, g.table) for g in groups] == [("target.mla.0", "target", 0), ("draft.full.0", "draft", 0)]
    layouts, tokens = {}, 75
    for end, table in {"source": [7, 2, 5], "dest": [3, 8, 4], "expected": [3, 8, 4]}.items():
        buffer, views = caches()
        if end != "dest":
            for token in range(tokens):
                for layer in (0, 1):
                    row = torch.arange(24.0) + 1000 * token + 1e5 * layer
                    views[names(layer)[0]][table[token // 32], 0, token % 32] = row
            fill(views[names(2)[0]], 32, table, tokens, 2)
        kernels: dict[str, KernelLayout] = dict.fromkeys(names(0, 1), "tokens") | {names(2)[0]: "k_by_dimension"}
        layouts[end] = (buffer, table, describe_caches(views, groups, kernels))
    (_, source_table, have), (moved, dest_table, want) = layouts["source"], layouts["dest"]
    for name in have.geometries:
        copies = plan_copies(
            [have.geometries[name]], want.geometries[name], source_table, dest_table, Interval(0, tokens)
        )[0]
        for source, dest, nbytes in zip(copies.source_offset, copies.dest_offset, copies.nbytes, strict=True):
            want.regions[0][dest : dest + nbytes] = have.regions[0][source : source + nbytes]
    assert torch.equal(moved, layouts["expected"][0])


KV_HEADS: dict[Owner, int] = {"target": 2, "draft": 4}


class Workers:
    """The KV caches of `size` tensor-parallel workers: a target of two layers, perhaps with fewer heads than workers,
    and a drafter.
    """

    def __init__(self, size: int, block_size: int, granularity: Granularity) -> None:
        self.block_size = block_size
        self.layouts: list[CacheLayout] = []
        self.views: list[dict[str, torch.Tensor]] = []
        self.heads: list[dict[str, list[int]]] = []
        groups = split_tables([CacheTable(0, "full", None, block_size, names(0, 1, 2))], num_target_layers=2)
        for rank in range(size):
            views, heads = {}, {}
            for group in groups:
                total = KV_HEADS[group.owner]
                found = [head for head in range(total) if head * size // total == rank] or [rank * total // size]
                shape = (len(group.layers), 9, len(found), block_size, 2 * DIM)
                views |= dict(zip(group.layers, torch.zeros(shape), strict=True))
                heads |= dict.fromkeys(group.layers, found)
            worker = WorkerHeads(rank, size, KV_HEADS)
            self.layouts.append(
                describe_caches(views, groups, dict.fromkeys(views, "k_by_dimension"), granularity, worker)
            )
            self.views.append(views)
            self.heads.append(heads)

    def fill(self, table: list[int], tokens: int) -> None:
        for views, heads in zip(self.views, self.heads, strict=True):
            for layer, name in enumerate(views):
                fill(views[name], self.block_size, table, tokens, layer, heads[name])


@pytest.mark.parametrize(("dest_size", "granularity"), [(32, "page"), (64, "token")])
@pytest.mark.parametrize("num_dests", [1, 2, 4])
@pytest.mark.parametrize("num_sources", [1, 2, 4])
def test_each_worker_gets_its_heads(num_sources: int, num_dests: int, dest_size: int, granularity: Granularity) -> None:
    sources, tokens = Workers(num_sources, 32, granularity), 75
    dests, expected = (Workers(num_dests, dest_size, granularity) for _ in range(2))
    source_table, dest_table = [7, 2, 5], [3, 8, 4]
    sources.fill(source_table, tokens)
    expected.fill(dest_table, tokens)
    for want in dests.layouts:
        for name, dest in want.geometries.items():
            ranks = [have.geometries[name] for have in sources.layouts]
            for rank, copies in plan_copies(ranks, dest, source_table, dest_table, Interval(0, tokens)).items():
                have = sources.layouts[rank].regions[ranks[rank].geometry.region]
                into = want.regions[dest.geometry.region]
                for start, end, nbytes in zip(copies.source_offset, copies.dest_offset, copies.nbytes, strict=True):
                    into[end : end + nbytes] = have[start : start + nbytes]
    for found, right in zip(dests.views, expected.views, strict=True):
        assert all(torch.equal(found[name], right[name]) for name in found)


def test_heads_that_workers_do_not_share_evenly() -> None:
    third = WorkerHeads(2, 4, {"target": 8, "draft": 2})
    assert (third.first_head("target", 2), third.first_head("draft", 1)) == (4, 1)
    assert third.first_head("draft", 2) == 0  # the drafter is whole on each worker
    with pytest.raises(ConfigError, match="a worker of 4 has 3 of 8 KV heads"):
        third.first_head("target", 3)


def test_whole_pages_of_other_sizes_are_refused() -> None:
    have, want = (layout(cpu_cache(9, size, 1)[1], size, 1) for size in (32, 64))
    name = "target.full.0"
    with pytest.raises(IncompatiblePeerError, match="tile"):
        plan_copies([have.geometries[name]], want.geometries[name], [1, 2], [1], Interval(0, 40))


def test_single_tokens_can_be_digested_and_whole_pages_cannot() -> None:
    (_, caches), (_, others) = cpu_cache(9, 32, 1), cpu_cache(9, 64, 1)
    fill(caches[names(0)[0]], 32, [3, 1], 50, 0)
    fill(others[names(0)[0]], 64, [5], 50, 0)
    small, large = layout(caches, 32, 1, "token"), layout(others, 64, 1, "token")
    group = "target.full.0"
    found = MemoryDigester(small.geometries, small.regions).digests(group, [3, 1], Interval(0, 50))
    assert found == MemoryDigester(large.geometries, large.regions).digests(group, [5], Interval(0, 50))
    whole = layout(caches, 32, 1)
    with pytest.raises(ConfigError, match="integrity"):
        MemoryDigester(whole.geometries, whole.regions)


def test_layers_at_uneven_distances_are_split() -> None:
    buffer = torch.zeros(4, 5, HEADS, 32, 2 * DIM)
    caches = {name: buffer[i] for name, i in zip(names(0, 1, 2), (0, 1, 3), strict=True)}
    found = layout(caches, 32, 3)
    assert [(g.name, g.layer_ids) for g in found.groups] == [("target.full.0.0", (0, 1)), ("target.full.0.2", (2,))]


def test_a_kernel_with_an_unknown_layout_gets_whole_pages() -> None:
    _, caches = cpu_cache(5, 64, 1)
    groups = split_tables([CacheTable(0, "full", None, 64, tuple(caches))], 1)
    unknown: dict[str, KernelLayout] = dict.fromkeys(caches, "unknown")
    assert describe_caches(caches, groups, unknown).geometries["target.full.0"].geometry.tile == 64
    with pytest.raises(ConfigError, match="granularity"):
        describe_caches(caches, groups, unknown, "token")


def test_blocks_that_the_kernel_splits() -> None:
    _, caches = cpu_cache(10, 32, 1)
    groups = split_tables([CacheTable(0, "full", None, 64, tuple(caches))], 1)
    found = describe_caches(caches, groups, dict.fromkeys(caches, "k_by_dimension"))
    assert found.blocks_per_page == {"target.full.0": 2}
    assert kernel_pages([3, 0, 4], 2) == [6, 7, 0, 0, 8, 9]
    assert kernel_pages([3, 0, 4], 1) == [3, 0, 4]


def test_groups_of_one_block_table_have_the_same_list() -> None:
    """A message says a list once, however many groups have it."""
    _, caches = cpu_cache(10, 32, 3)
    groups = split_tables([CacheTable(0, "full", None, 64, tuple(caches))], 2)
    found = describe_caches(caches, groups, dict.fromkeys(caches, "k_by_dimension"))
    tables = found.kernel_tables([[3, 4]])
    assert tables == {"target.full.0": [6, 7, 8, 9], "draft.full.0": [6, 7, 8, 9]}
    assert tables["target.full.0"] is tables["draft.full.0"]
    assert set(found.shared_tables.values()) == {"0/2"}


def test_a_state_is_one_piece_of_bytes() -> None:
    cache = torch.zeros(6, 1, 1, 80, dtype=torch.int8)
    groups = split_tables([CacheTable(0, "state", None, 1, ("model.layers.0.mixer",))], 1)
    geometry = describe_caches({"model.layers.0.mixer": cache}, groups, {"model.layers.0.mixer": "tokens"}).geometries[
        "target.state.0"
    ]
    copies = plan_copies([geometry], geometry, [3], [5], Interval(0, 1))[0]
    assert np.array_equal(copies.nbytes, [80])
    assert (copies.source_offset[0], copies.dest_offset[0]) == (240, 400)
    assert groups[0].final(10, 9, 1) == 0
    assert groups[0].final(10, 10, 1) == 1


@pytest.mark.parametrize("layers", [1, 2])
def test_a_layer_with_a_cache_beside_its_latents_is_refused(layers: int) -> None:
    """DeepSeek V3.2's indexer keeps its own keys, of another width, in a cache of the same kind and number."""
    widths = {"attn": 576, "indexer.k_cache": 132}
    caches = {
        f"model.layers.{i}.self_attn.{k}": torch.zeros(3, 1, 16, w) for i in range(layers) for k, w in widths.items()
    }
    groups = split_tables([CacheTable(0, "mla", None, 16, tuple(caches))], layers)
    with pytest.raises(ConfigError, match=r"layer 0 has several caches, among them .*indexer"):
        describe_caches(caches, groups, dict.fromkeys(caches, "tokens"))


def test_memory_that_is_nowhere_is_refused() -> None:
    meta = {name: torch.zeros(2, HEADS, 32, 2 * DIM, device="meta") for name in names(0)}
    with pytest.raises(ConfigError, match="this is on meta"):
        layout(meta, 32, 1)
