"""`python -m benchmarks.topologies.planning`: cost of planning and posting for one rank, as Markdown. Nothing is
copied.

8,192 tokens of 61 layers in scattered pages, with memory layer by layer as in vLLM's engines, or page by page as in
Baton's. CPU time of the thread, medians. Posting is what a library transport (`nixl`) does with a plan before it calls
the library: its rows, its batches, and a table of descriptors for each side of a batch.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.handoff.plan import topology
from baton.handoff.plan.planner import CopyList, Instance, plan_copies, senders
from baton.handoff.protocol.gather import pairs_of
from baton.kv.interval import Interval
from baton.transports.base import Operation
from baton.transports.batches import make_job
from benchmarks.topologies.shapes import heads, latents, two
from simulation.topologies import Layers, Layout, Shape

TOKENS, LAYERS, ROUNDS = 8192, 61, 9
BY_HEAD = Layout("layer plane page", ("head", "token", "element"))
BY_TOKEN = Layout("layer plane page", ("token", "head", "element"))
BY_PAGE = Layout("page layer plane", ("token", "head", "element"))
_MLA = latents("target", LAYERS), heads("draft", 1, 32, 128, draft=True)
_GQA = (heads("target", LAYERS, 16, 128),)
# With tokens per page of P and of D.
MODELS: dict[str, tuple[tuple[Layers, ...], tuple[int, int], Layout]] = {
    "MLA, MHA drafter, pages of 64": (_MLA, (64, 64), BY_HEAD),
    "MLA, MHA drafter, pages of 64 and 48": (_MLA, (64, 48), BY_HEAD),
    "8 KV heads, pages of 64": ((heads("target", LAYERS, 8, 128),), (64, 64), BY_HEAD),
    "16 KV heads, pages of 16": (_GQA, (16, 16), BY_HEAD),
    "16 KV heads, pages of 16 and 24": (_GQA, (16, 24), BY_HEAD),
    "16 KV heads, pages of 16, a token's heads together": (_GQA, (16, 16), BY_TOKEN),
    "16 KV heads, pages of 16 and 7, a token's heads together": (_GQA, (16, 7), BY_TOKEN),
    "16 KV heads, pages of 16 and 7, all layers in a page": (_GQA, (16, 7), BY_PAGE),
}
DEGREES = ((1, 1), (2, 1), (4, 2), (8, 4), (16, 8))


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of the rank of P that has most to send. `runs` in all its plans, `pairs` of the two engines."""

    name: str
    pairs: int
    plans: int
    runs: int
    planning: float
    posting: float
    meeting: float


def measure(name: str, groups: Sequence[Layers], page_sizes: tuple[int, int], layout: Layout, p: int, d: int) -> Cost:
    rng = np.random.default_rng(1)
    pages = [-(-TOKENS // size) for size in page_sizes]
    shapes = [Shape(tp, page_size=size, layout=layout) for tp, size in zip((p, d), page_sizes, strict=True)]
    source, dest = two(groups, shapes[0], shapes[1], 2 * max(pages))
    here, there = (rng.permutation(2 * max(pages) - 1)[:count] + 1 for count in pages)
    work = _work(source, dest)
    rank = max(work, key=lambda each: len(work[each]))
    planned: list[CopyList] = []

    def plan_all() -> None:
        planned.clear()
        for group, to in work[rank]:
            sources, dests = source.groups[group], dest.groups[group]
            planned.append(plan_copies(sources, dests[to], here, there, Interval(0, TOKENS), rank=rank)[rank])

    def meet() -> None:
        topology.assign.cache_clear()
        pairs_of(source, dest)

    plan_all()
    runs = sum(len(copies) for copies in planned)
    costs = [_milliseconds(what) for what in (plan_all, lambda: [_post(copies) for copies in planned], meet)]
    return Cost(name, len(pairs_of(source, dest)), len(planned), runs, *costs)


def _work(source: Instance, dest: Instance) -> dict[int, list[tuple[str, int]]]:
    """By rank of P: the groups that it sends, and the positions of the receiving ranks of D."""
    out: dict[int, list[tuple[str, int]]] = {}
    for group, ranks in dest.groups.items():
        for place, to in enumerate(ranks):
            for sender in senders(source.groups[group], to):
                out.setdefault(sender, []).append((group, place))
    return out


def _post(copies: CopyList) -> int:
    rows = np.column_stack((copies.source_offset, copies.dest_offset, copies.nbytes))
    job, count = make_job(Operation(""), "write", rows), 0
    for at in range(job.num_batches):
        job.at = at
        batch = job.batch()
        for side in (0, 1):
            table = np.zeros((len(batch), 3), dtype=np.int64)
            table[:, 0], table[:, 1], table[:, 2] = batch[:, side], batch[:, 2], 0
            count += len(table)
    return count


def _milliseconds(what: object) -> float:
    assert callable(what)
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        what()
        times.append((time.thread_time() - began) * 1e3)
    return statistics.median(times)


def text() -> str:
    lines = [
        "| model | TP of P to D | pairs | plans of one rank | runs | planning | posting | ns a run | at HELLO |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (groups, page_sizes, layout) in MODELS.items():
        for p, d in DEGREES:
            cost = measure(name, groups, page_sizes, layout, p, d)
            each = (cost.planning + cost.posting) * 1e6 / cost.runs
            lines.append(
                f"| {name} | {p} to {d} | {cost.pairs} | {cost.plans} | {cost.runs:,} | {cost.planning:.2f} ms "
                f"| {cost.posting:.2f} ms | {each:.0f} | {cost.meeting:.1f} ms |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(text())
    sys.exit(0)
