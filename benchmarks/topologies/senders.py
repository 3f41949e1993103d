"""`python -m benchmarks.topologies.senders`: which rank sends what, how many bytes, and the minimum, as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.handoff.plan.planner import Instance, plan_copies, senders
from baton.handoff.protocol.gather import pairs_of
from baton.kv.interval import Interval
from benchmarks.topologies.shapes import HYBRID, MIXES, heads, in_turn, latents, minimum, two
from simulation.topologies import Layers, Shape

TOKENS = 1024
DEGREES = (1, 2, 4, 8)
BEGIN, END = "<!-- senders: begin -->", "<!-- senders: end -->"


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of the matrix. `sets`: per group, the senders to each rank of D."""

    name: str
    sets: dict[str, str]
    num_pairs: int
    num_bytes: int
    least: int


def measure(name: str, groups: Sequence[Layers], p: Shape, d: Shape, dp_rank: int | None = None) -> Row:
    """Plan `TOKENS` tokens of every group for every rank of D, and add up."""
    source, dest = two(groups, p, d)
    if dp_rank is not None:
        dest = in_turn(dest, dp_rank)
    sets, num_bytes = {}, 0
    for group in groups:
        ranks = dest.groups[group.name]
        sets[group.name] = ", ".join(f"{r.rank}←{_ranks(senders(source.groups[group.name], r))}" for r in ranks)
        num_bytes += sum(_planned(source, dest, group, index) for index in range(len(ranks)))
    return Row(name, sets, len(pairs_of(source, dest)), num_bytes, minimum(groups, d, TOKENS))


def _planned(source: Instance, dest: Instance, group: Layers, index: int) -> int:
    sources, to = source.groups[group.name], dest.groups[group.name][index]
    tokens = Interval(0, 1 if group.page_size else TOKENS)
    here, there = (range(1, 1 + -(-tokens.stop // each.geometry.page_size)) for each in (sources[0], to))
    return sum(copies.total for copies in plan_copies(sources, to, here, there, tokens).values())


def _ranks(found: Sequence[int]) -> str:
    """Format ranks, with consecutive ones as a range."""
    parts: list[list[int]] = []
    for rank in found:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return "+".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def mixes() -> Iterator[tuple[str, list[Row]]]:
    """Every mix of target and drafter, at every degree on both sides."""
    for mix, groups in MIXES.items():
        yield (
            mix,
            [measure(f"{p} to {d}", groups, Shape(p), Shape(d, page_size=24)) for p in DEGREES for d in DEGREES],
        )


def others() -> Iterator[Row]:
    """Other engines: stages, drafters on fewer ranks, states, data-parallel ranks."""
    gqa = (heads("target", 61, 8, 128), heads("draft", 1, 32, 128, draft=True))
    mla = (latents("target", 61), heads("draft", 1, 32, 128, draft=True))
    for p, d in ((2, 1), (1, 2), (2, 3)):
        yield measure(f"GQA: {p} stages to {d}", gqa, Shape(stages=p), Shape(stages=d))
    yield measure("GQA: 2 stages to 2 stages of TP 2", gqa, Shape(stages=2), Shape(2, stages=2))
    yield measure("MLA: 2 stages of TP 2 to TP 2", mla, Shape(2, stages=2), Shape(2))
    yield measure("GQA: TP 4, the drafter on 1 rank, to the same", gqa, Shape(4, draft_tp=1), Shape(4, draft_tp=1))
    yield measure("MLA: TP 4 to TP 4, the drafter on 1 rank", mla, Shape(4), Shape(4, draft_tp=1))
    for p, d in ((1, 2), (2, 1), (4, 2), (2, 4)):
        yield measure(f"Mamba-2 hybrid: TP {p} to TP {d}", HYBRID, Shape(p), Shape(d))
    for rank in range(4):
        name = f"MLA: TP 4 to data-parallel rank {rank} of 4"
        yield measure(name, (latents("target", 61),), Shape(4), Shape(), rank)


def table(rows: Sequence[Row]) -> str:
    groups = list(dict.fromkeys(group for row in rows for group in row.sets))
    head = ["TP of P to D" if rows[0].name[0].isdigit() else "P to D"]
    head += [*(f"{group}: rank of D ← of P" for group in groups), "pairs", "bytes sent", "least"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        sets = [row.sets.get(group, "") for group in groups]
        lines.append([row.name, *sets, str(row.num_pairs), f"{row.num_bytes:,}", f"{row.least:,}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text() -> str:
    """All tables, as docs/reference/senders.md has them between its marks."""
    parts = [BEGIN]
    for mix, rows in mixes():
        parts += [f"{mix}:", table(rows)]
    return "\n\n".join([*parts, "Others:", table(list(others())), END])


def main() -> int:
    """Print the tables. Returns 1 if more bytes are sent than necessary."""
    print(text())
    rows = [row for _, every in mixes() for row in every] + list(others())
    return int(any(row.num_bytes != row.least for row in rows))


if __name__ == "__main__":
    sys.exit(main())
