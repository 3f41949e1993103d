"""What vLLM's workers tell each other, and stages with a drafter, which vLLM's own runner does not compute on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from baton.errors import ConfigError
from baton.handoff.plan.planner import plan_copies
from baton.handoff.protocol.fingerprint import compare_fingerprints, geometry_fields
from baton.handoff.protocol.gather import pairs_of
from baton.kv.interval import Interval
from baton.plugin_base.ranks import JoinedWorkers, WorkerPart, join_workers, joined_addresses
from baton.vllm.memory.geometry import CacheLayout, WorkerHeads, describe_caches
from baton.vllm.memory.groups import CacheTable, split_tables
from tests.vllm.test_plugin_groups import DIM, HEADS, fill, names

BLOCKS, SIZE, DRAFTER = 9, 32, 4  # the drafter's layer follows the target's four


def stages(*held: Sequence[int]) -> tuple[list[CacheLayout], list[dict[str, torch.Tensor]]]:
    """Workers with these layers each, every layer in its own tensor, as on CPUs."""
    views = [{name: torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM) for name in names(*layers)} for layers in held]
    layouts = []
    for caches in views:
        groups = split_tables([CacheTable(0, "full", None, SIZE, tuple(caches))], DRAFTER)
        kernels = dict.fromkeys(caches, "k_by_dimension")
        layouts.append(describe_caches(caches, groups, kernels, num_stages=len(held)))  # type: ignore[arg-type]
    return layouts, views


def part(rank: int, layout: CacheLayout, **changes: object) -> WorkerPart:
    found = WorkerPart(
        rank=rank,
        incarnation=f"of {rank}",
        geometries=layout.geometries,
        facts={"model": "m", **{f"group.{group.name}.window": "None" for group in layout.groups}},
        has_states=False,
    )
    return msgspec.structs.replace(found, **changes)


def joined(parts: Sequence[WorkerPart], rank: int = 0) -> JoinedWorkers:
    told = [msgspec.msgpack.encode(each) for each in parts]

    def all_gather(own: bytes) -> list[bytes]:
        assert own == told[rank]
        return told

    return join_workers(parts[rank], all_gather)


@pytest.mark.parametrize(
    ("held", "wanted"),
    [([(0, 1), (2, 3, 4)], [(0, 1, 2, 3, 4)]), ([(0, 1, 2, 3, 4)], [(0,), (1, 2), (3, 4)]), ([(0, 1, 2), (3, 4)],) * 2],
)
def test_stages_with_a_drafter_bring_every_layer(held: list[Sequence[int]], wanted: list[Sequence[int]]) -> None:
    """A target of four layers and the drafter of the last stage; layer names do not depend on which worker
    holds them.
    """
    (have, sources), (want, dests), (_, right) = stages(*held), stages(*wanted), stages(*wanted)
    p, d = (joined([part(rank, each) for rank, each in enumerate(every)]) for every in (have, want))
    assert (p.incarnation, p.instance.apart, d.instance.apart) == ("of 0", len(held) > 1, len(wanted) > 1)
    assert compare_fingerprints({**p.facts, **geometry_fields(p.instance)}, {**d.facts, **geometry_fields(d.instance)})
    tables, tokens = ([7, 2, 5], [3, 8, 4]), 75
    for views, table in ((sources, tables[0]), (right, tables[1])):
        for view in views:
            for layer in range(DRAFTER + 1):
                if (name := names(layer)[0]) in view:
                    fill(view[name], SIZE, table, tokens, layer)
    pairs = pairs_of(p.instance, d.instance)
    for rank, into in enumerate(want):
        own = joined([part(at, each) for at, each in enumerate(want)], rank).instance.own
        for name, dest in own.items():
            for source, copies in plan_copies(p.instance.groups[name], dest, *tables, Interval(0, tokens)).items():
                assert name in pairs[source, rank]
                memory = have[source].regions[have[source].geometries[name].geometry.region]
                for start, end, count in zip(copies.source_offset, copies.dest_offset, copies.nbytes, strict=True):
                    into.regions[dest.geometry.region][end : end + count] = memory[start : start + count]
    # Whole blocks are moved, in which both sides have written only the same tokens.
    for found, expected in zip(dests, right, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def latents(rank: int, size: int, heads: int = 2) -> CacheLayout:
    """A worker of a target with latents, which each worker has whole, and of a drafter with heads, in one
    block table.
    """
    views = {name: torch.zeros(BLOCKS, 1, SIZE, 24) for name in names(0, 1)}
    views |= {name: torch.zeros(BLOCKS, max(heads // size, 1), SIZE, 2 * DIM) for name in names(2)}
    tables = [CacheTable(0, "mla", None, SIZE, names(0, 1)), CacheTable(0, "full", None, SIZE, names(2))]
    kernels = dict.fromkeys(names(0, 1), "tokens") | dict.fromkeys(names(2), "k_by_dimension")
    worker = WorkerHeads(rank, size, {"target": 1, "draft": heads})
    return describe_caches(views, split_tables(tables, 2), kernels, worker=worker)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sources", "dests", "of_latents", "of_heads"),
    [
        (2, 1, {(0, 0)}, {(0, 0), (1, 0)}),
        (1, 2, {(0, 0), (0, 1)}, {(0, 0), (0, 1)}),
        (2, 2, {(0, 0), (1, 1)}, {(0, 0), (1, 1)}),
        (4, 2, {(0, 0), (1, 1)}, {(0, 0), (3, 1)}),
        (2, 4, {(0, 0), (1, 1), (0, 2), (1, 3)}, {(0, 0), (0, 1), (1, 2), (1, 3)}),
    ],
)
def test_latents_have_one_sender_for_each_receiver(
    sources: int, dests: int, of_latents: set[tuple[int, int]], of_heads: set[tuple[int, int]]
) -> None:
    p, d = (joined([part(rank, latents(rank, size)) for rank in range(size)]) for size in (sources, dests))
    pairs = pairs_of(p.instance, d.instance)
    for group, expected in (("target.mla", of_latents), ("draft.full", of_heads)):
        found = [pair for pair, names in pairs.items() if any(name.startswith(group) for name in names)]
        assert sorted(found) == sorted(expected)


def test_workers_that_contradict_each_other() -> None:
    layouts, _ = stages((0, 1), (2, 3))
    first, second = (part(rank, layout) for rank, layout in enumerate(layouts))
    with pytest.raises(ConfigError, match=r"model: worker 1 has 'other', another 'm'"):
        joined([first, msgspec.structs.replace(second, facts={"model": "other"})])
    with pytest.raises(ConfigError, match=r"workers call themselves \[0, 0\]"):
        joined([first, msgspec.structs.replace(second, rank=0)])
    assert joined([first, msgspec.structs.replace(second, has_states=True)]).has_states


def test_addresses_of_all_workers() -> None:
    assert joined_addresses([(1, "b"), (0, "a")], 2) == ["a", "b"]


@pytest.mark.parametrize("found", [[(0, "a")], [(0, "a"), (0, "b")], [(0, "a"), (2, "b")]])
def test_addresses_of_other_workers_are_refused(found: Any) -> None:
    with pytest.raises(ConfigError, match="2 workers"):
        joined_addresses(found, 2)
