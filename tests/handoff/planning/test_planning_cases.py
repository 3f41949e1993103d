"""The planner over random geometries: a slice of `python -m simulation.planning.check`, and broken planners that it
detects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.handoff.plan import planner, runs, topology
from baton.handoff.protocol import digests, gather
from baton.kv.geometry import Geometry
from baton.kv.interval import Interval
from simulation.planning import engines
from simulation.planning.check import play

Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def nothing_cached() -> Iterator[None]:
    for end in range(2):
        topology.assign.cache_clear()
        digests.share.cache_clear()
        if not end:
            yield


def test_plans_of_random_geometries_move_each_wanted_byte_once() -> None:
    tally = play(range(60))
    assert tally.cases == 60
    assert tally.plans > 300
    assert 0 < tally.refused < 20
    assert tally.kinds["regular"] > 30
    assert tally.kinds["hybrid"] > 10


def test_random_geometries_by_their_factors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long plans are computed this way, without a pass over every run."""
    monkeypatch.setattr(runs, "_FEW_RUNS", 0)
    monkeypatch.setattr(runs, "_MOST_STRETCHES", 2)
    assert play(range(60, 100)).plans > 200


def shares(change: Callable[..., Any]) -> Break:
    def broken(patch: pytest.MonkeyPatch) -> None:
        original = topology._share
        patch.setattr(topology, "_share", lambda *given: change(original, *given))

    return broken


def everybody_sends(original: Any, ordered: Any, dest: Any, first: int, count: int) -> Any:
    """Every holder of a cell sends it, as if it were the only one."""
    out: dict[int, Any] = {}
    for source in ordered:
        one = (source,) if set(dest.geometry.layer_ids) <= set(source.geometry.layer_ids) else ordered
        try:
            out |= original(one, dest, first, count)
        except planner.ProtocolError:
            out |= original(ordered, dest, first, count)
    return out


def first_holder_sends(original: Any, ordered: Any, dest: Any, first: int, count: int) -> Any:
    return original(ordered, msgspec.structs.replace(dest, turn=0), first, count)


def each_box(**changes: Callable[[topology.Box], int]) -> Break:
    def change(original: Any, *given: Any) -> Any:
        return {
            rank: tuple(replace(box, **{name: what(box) for name, what in changes.items()}) for box in boxes)
            for rank, boxes in original(*given).items()
        }

    return shares(change)


def layers_do_not_matter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "of_layers", lambda boxes, to, layers: boxes)


def tiles_are_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Interval, "round_out", lambda self, tile: self)


def one_page_size(patch: pytest.MonkeyPatch) -> None:
    original = planner._segments

    def segments(tokens: Interval, have: Geometry, to: Geometry, *tables: Any) -> Any:
        return original(tokens, msgspec.structs.replace(have, page_size=to.page_size), to, *tables)

    patch.setattr(planner, "_segments", segments)


def planes_of_one_shape_are_as_far_apart_everywhere(patch: pytest.MonkeyPatch) -> None:
    original = topology._alike
    patch.setattr(topology, "_alike", lambda sources, to: original([to], to))


def runs_join_by_destination(patch: pytest.MonkeyPatch) -> None:
    original = runs.columns_of

    def columns_of(*given: Any) -> Any:
        found = original(*given)
        joined = found[1, 1:] == found[1, :-1] + found[2, :-1]
        heads = np.concatenate(([0], np.flatnonzero(~joined) + 1))
        return np.stack((found[0, heads], found[1, heads], np.add.reduceat(found[2], heads)))

    patch.setattr(planner, "columns_of", columns_of)


def pairs_by_what_is_wanted_of_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    original = gather.senders
    patch.setattr(gather, "senders", lambda sources, dest: original(sources, dest)[:1])


def ranks_count_as_they_are_named(patch: pytest.MonkeyPatch) -> None:
    """In the order in which an engine lists its ranks, not by rank number."""
    patch.setattr(topology, "sorted", lambda items, key=None: list(items) if key else sorted(items), raising=False)


def planes_share_as_the_first_does(patch: pytest.MonkeyPatch) -> None:
    """As if a Mamba-2 layer's B and C were cut like x."""
    original = engines.parts_of

    def parts_of(*given: Any) -> Any:
        return [(group, (firsts[0],) * len(firsts)) for group, firsts in original(*given)]

    patch.setattr(engines, "parts_of", parts_of)


def what_is_whole_is_cut(patch: pytest.MonkeyPatch) -> None:
    """Each rank claims only its share of B and C of a single group."""
    original = engines.parts_of

    def parts_of(groups: Any, config: Any, num_layers: int, rank: int) -> Any:
        cut = [
            msgspec.structs.replace(
                group,
                planes=tuple(
                    msgspec.structs.replace(plane, cut="channels") if plane.name.startswith("conv") else plane
                    for plane in group.planes
                ),
            )
            for group in groups
        ]
        found = original(cut, config, num_layers, rank)
        names = {group.name: group for group in groups}
        return [
            (
                msgspec.structs.replace(
                    part,
                    planes=tuple(
                        msgspec.structs.replace(plane, cut=whole.cut)
                        for plane, whole in zip(part.planes, names[part.name].planes, strict=True)
                    ),
                ),
                firsts,
            )
            for part, firsts in found
        ]

    patch.setattr(engines, "parts_of", parts_of)


def planes_of_one_width_have_one_share(patch: pytest.MonkeyPatch) -> None:
    original = topology._continues

    def continues(planes: Any, first: int, index: int) -> bool:
        moved = [msgspec.structs.replace(plane, first_head=0) for plane in planes]
        return original(moved, first, index)

    patch.setattr(topology, "_continues", continues)


BROKEN: dict[str, Break] = {
    "every holder sends": shares(everybody_sends),
    "the first holder always sends": shares(first_holder_sends),
    "heads from the first one on": each_box(source_head=lambda box: 0),
    "layers by their place": each_box(source_layer=lambda box: box.dest_layer),
    "a layer less": each_box(num_layers=lambda box: max(1, box.num_layers - 1)),
    "layers do not matter": layers_do_not_matter,
    "tiles are cut": tiles_are_cut,
    "one page size": one_page_size,
    "planes as far apart everywhere": planes_of_one_shape_are_as_far_apart_everywhere,
    "runs join by destination": runs_join_by_destination,
    "pairs of the first sender": pairs_by_what_is_wanted_of_the_first_rank,
    "planes share as the first does": planes_share_as_the_first_does,
    "planes of one width have one share": planes_of_one_width_have_one_share,
    "what is whole is cut": what_is_whole_is_cut,
    "ranks as they are named": ranks_count_as_they_are_named,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_planner_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[name](monkeypatch)
    with pytest.raises(AssertionError, match="case"):
        play(range(200))
