"""`python -m simulation.planning.check`: the planner over random geometries, against an oracle that checks every byte.

Each case is two engines with their own ranks, stages, groups of planes, page sizes and layouts, and the entries that
each destination rank wants. Every wanted byte must be copied exactly once, from the right place, and nothing else
written. Both ends, each with its own copy of the other's geometry from the wire, must expect the same pairs, groups and
digests.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec
import numpy as np

from baton.errors import IncompatiblePeerError, ProtocolError
from baton.handoff.plan import planner
from baton.handoff.plan.planner import Instance, RankGeometry
from baton.handoff.protocol.digests import cells_of, share
from baton.handoff.protocol.gather import LEAD, pairs_of
from baton.kv.geometry import CopyList, Geometry, Int64Array
from baton.kv.interval import ALL_LAYERS, Interval
from simulation.planning.cases import Case, draw


@dataclass(slots=True)
class Tally:
    """What was played. `kinds` counts properties of the cases."""

    cases: int = 0
    plans: int = 0
    runs: int = 0
    num_bytes: int = 0
    refused: int = 0
    kinds: Counter[str] = field(default_factory=Counter)


# ---------------------------------------------------------------- the oracle


def _cells(geometry: Geometry, table: Sequence[int], tokens: Interval) -> tuple[Int64Array, Int64Array, Int64Array]:
    """For all bytes of `tokens`: the offset, a number that names the byte (the same on every rank and side), and the
    layer.
    """
    offsets, names, layers = [], [], []
    pages = np.array([*table, *[0] * 64], dtype=np.int64)
    for index, plane in enumerate(geometry.planes):
        units = np.arange(tokens.start // plane.tile, -(-tokens.stop // plane.tile), dtype=np.int64)
        token = units * plane.tile
        elements, width = plane.head_dim, plane.itemsize
        if plane.tile > 1:
            elements, width = 1, plane.tile * plane.head_dim * plane.itemsize
        at = pages[token // geometry.page_size] * plane.page_stride + token % geometry.page_size * plane.token_stride
        axes = [
            (np.arange(geometry.num_layers) * plane.layer_stride, np.array(geometry.layer_ids)),
            (at, units),
            (np.arange(plane.num_heads) * plane.head_stride, plane.first_head + np.arange(plane.num_heads)),
            (np.arange(elements) * plane.element_stride, np.arange(elements)),
            (np.arange(width), np.arange(width)),
        ]
        where, what = np.zeros(1, dtype=np.int64), np.full(1, index, dtype=np.int64)
        for offset, number in axes:
            where = np.add.outer(where, offset)
            what = np.add.outer(what * 1024, number)
        offsets.append(where.reshape(-1) + plane.base)
        names.append(what.reshape(-1))
        layers.append(np.repeat(np.array(geometry.layer_ids), where.size // geometry.num_layers))
    return np.concatenate(offsets), np.concatenate(names), np.concatenate(layers)


def _indices(offset: Int64Array, nbytes: Int64Array) -> Int64Array:
    ends = np.cumsum(nbytes)
    return np.repeat(offset - (ends - nbytes), nbytes) + np.arange(int(ends[-1]), dtype=np.int64)


def check_rank(
    planned: dict[int, CopyList], sources: Sequence[RankGeometry], dest: RankGeometry, wanted: tuple[list[int], ...],
    tokens: Interval, layers: Interval,
) -> None:  # fmt: skip
    """Raises `AssertionError` unless `dest` gets every wanted byte exactly once, and nothing else."""
    here, there = wanted
    to = dest.geometry
    where, what, layer = _cells(to, there, tokens)
    chosen = (layer >= layers.start) & (layer < layers.stop)
    expected = np.full(to.region_bytes, -1, dtype=np.int64)
    expected[where[chosen]] = what[chosen]
    got, times = np.full(to.region_bytes, -1, dtype=np.int64), np.zeros(to.region_bytes, dtype=np.int64)
    by_rank = {source.rank: source.geometry for source in sources}
    for rank, copies in planned.items():
        have = by_rank[rank]
        assert len(copies), "an empty list of copies"
        assert bool((copies.nbytes > 0).all()), "an empty run"
        assert (copies.source_region, copies.dest_region) == (have.region, to.region), "another region"
        joined = (copies.source_offset[1:] == copies.source_offset[:-1] + copies.nbytes[:-1]) & (
            copies.dest_offset[1:] == copies.dest_offset[:-1] + copies.nbytes[:-1]
        )
        assert not bool(joined.any()), "two runs could be one"
        content = np.full(have.region_bytes, -2, dtype=np.int64)
        offsets, names, _ = _cells(have, here, tokens)
        content[offsets] = names
        source, target = _indices(copies.source_offset, copies.nbytes), _indices(copies.dest_offset, copies.nbytes)
        assert int(source.min()) >= 0 <= int(target.min()), "before the region"
        got[target] = content[source]
        np.add.at(times, target, 1)
    assert int(times.max(initial=0)) <= 1, "a byte is written twice"
    assert np.array_equal(got, expected), "a byte is missing, wrong, or not wanted"


def _complete(case: Case) -> bool:
    """Whether the source has everything that the destination holds."""
    for group, dests in case.dest.groups.items():
        held = set[tuple[int, int, int]]()
        needed = set[tuple[int, int, int]]()
        for into, ranks in ((held, case.source.groups[group]), (needed, dests)):
            for rank in ranks:
                for layer in rank.geometry.layer_ids:
                    for index, plane in enumerate(rank.geometry.planes):
                        into.update((layer, index, head) for head in range(plane.first_head, plane.last_head))
        if not needed <= held:
            return False
    return True


def _as_received(random: Random, other: Instance) -> Instance:
    """An engine's instance as the peer knows it: decoded from the wire, with its ranks in any order."""
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(other), type=Instance)
    return msgspec.structs.replace(
        copy, groups={group: random.sample(ranks, len(ranks)) for group, ranks in reversed(copy.groups.items())}
    )


def _refusal(source: Instance, dest: Instance) -> str:
    try:
        pairs_of(source, dest)
    except IncompatiblePeerError as error:
        return str(error)
    return ""


def check(seed: int, tally: Tally) -> None:
    """Raises `AssertionError` if a check fails."""
    random = Random(seed)
    case = draw(random)
    tally.cases += 1
    tally.kinds["hybrid"] += case.hybrid
    of_source, of_dest = (case.source, _as_received(random, case.dest)), (_as_received(random, case.source), case.dest)
    if not _complete(case):
        tally.refused += 1
        assert not case.regular, "an engine lacks a part of its model"
        for ends in (of_source, of_dest):
            assert "nobody holds" in _refusal(*ends), "what nobody holds is promised"
        return
    pairs = pairs_of(*of_source)
    assert pairs == pairs_of(*of_dest), "the ends expect other pairs"
    moved: dict[tuple[int, int], set[str]] = {pair: set() for pair in pairs}
    for group, (here, there, tokens, layers) in case.wanted.items():
        sources, theirs = tuple(of_dest[0].groups[group]), tuple(of_source[0].groups[group])
        for dest, known in zip(
            sorted(of_dest[1].groups[group], key=lambda found: found.rank),
            sorted(of_source[1].groups[group], key=lambda found: found.rank),
            strict=True,
        ):
            planned = planner.plan_copies(sources, dest, here, there, tokens, layers)
            check_rank(planned, sources, dest, (here, there), tokens, layers)
            senders = planner.senders(sources, dest)
            assert set(planned) <= set(senders), "somebody sends who is not expected"
            assert layers is not ALL_LAYERS or tuple(planned) == senders, "somebody is expected who does not send"
            digested = []
            for sender in senders:
                moved.setdefault((sender, dest.rank), set()).add(group)
                # The source plans its own share from what it knows of the destination.
                alone = planner.plan_copies(theirs, known, here, there, tokens, layers, sender)
                assert set(alone) == {sender} & set(planned), "the ends plan otherwise"
                for copies in alone.values():
                    expected = planned[sender]
                    for name in ("source_offset", "dest_offset", "nbytes"):
                        assert np.array_equal(getattr(copies, name), getattr(expected, name)), "other copies"
                        assert getattr(copies, name).flags.c_contiguous, "no transport takes it"
                    tally.runs += len(copies)
                    tally.num_bytes += copies.total
                cells = share(theirs, known, sender)
                assert cells == share(sources, dest, sender), "the ends digest otherwise"
                digested += [(layer, p, head) for layer, p, first, last in cells for head in range(first, last)]
            whole = [(layer, p, h) for layer, p, first, last in cells_of(dest.geometry) for h in range(first, last)]
            assert sorted(digested) == sorted(whole), "digests cover a head twice or never"
            tally.plans += 1
        if case.regular:
            _evenly(sources, case.dest.groups[group])
            tally.kinds["regular"] += 1
    sampling = {pair for pair in pairs if pair[0] == case.source.sampling}
    assert sampling, "nobody brings the seeds"
    assert LEAD in pairs, "nobody leads"
    assert {pair: set(groups) for pair, groups in pairs.items()} == moved, "a pair has other groups"
    assert len(set(pairs) - {LEAD} - {pair for pair, groups in moved.items() if groups}) <= 1, "an idle pair"


def _evenly(sources: Sequence[RankGeometry], dests: Sequence[RankGeometry]) -> None:
    """The ranks that hold the same head serve numbers of destinations that differ by at most one."""
    load: dict[tuple[int, int, int, tuple[int, ...]], Counter[int]] = {}
    for dest in dests:
        for sender in planner.senders(sources, dest):
            for cell in share(tuple(sources), dest, sender):
                layer, plane, first, last = cell
                for head in range(first, last):
                    holders = tuple(sorted(
                        source.rank for source in sources
                        if layer in source.geometry.layer_ids
                        and source.geometry.planes[plane].first_head <= head < source.geometry.planes[plane].last_head
                    ))  # fmt: skip
                    load.setdefault((layer, plane, head, holders), Counter(dict.fromkeys(holders, 0)))[sender] += 1
    for shared, counts in load.items():
        assert max(counts.values()) - min(counts.values()) <= 1, f"senders of {shared} are not spread: {counts}"


def play(seeds: Sequence[int]) -> Tally:
    """Raises `AssertionError` that names the seed."""
    tally = Tally()
    for seed in seeds:
        try:
            check(seed, tally)
        except (AssertionError, ProtocolError, IndexError) as error:
            raise AssertionError(f"case {seed}: {type(error).__name__}: {error}") from error
    return tally


def main() -> int:
    """Returns 0 if every case passed."""
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m simulation.planning.check", description=description)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.process_time()
    try:
        tally = play(range(arguments.first_seed, arguments.first_seed + arguments.cases))
    except AssertionError as error:
        print(error)
        return 1
    print(
        f"{tally.cases:,} cases, {tally.kinds['hybrid']:,} of them hybrids, {tally.refused:,} of what nobody holds; "
        f"{tally.plans:,} plans for one rank, {tally.runs:,} runs, {tally.num_bytes:,} bytes: each once, from its "
        f"place, nothing else ({time.process_time() - began:.0f} s of CPU)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
