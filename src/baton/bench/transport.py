"""What the data plane costs: `baton bench transport`.

Medians of 21 rounds, all in one run, so that the ratios compare like with like: writing 64 MiB in scattered
32 KiB and 4 KiB runs to the memory of another process of this host (`shm`, or the transport that is named), over one
`memcpy` of as much within this process; and planning 20,000 runs. Rounds of the compared parts alternate, so that a
slow spell of the host meets all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from baton.errors import TransportError
from baton.handoff.plan.planner import RankGeometry, plan
from baton.kv.geometry import BLOCK_MAJOR_NHD, LAYER_MAJOR_NHD, Axis, CopyList, Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, kv_planes
from baton.testing.transport_peer import SpawnedPeer
from baton.transports.registry import create_transport

ROUNDS = 21
COPY_BYTES = 64 << 20
PLAN_RUNS = 20_000


def run(uri: str = "shm") -> dict[str, float]:
    """Measure, and return the figures by name: GB/s, ratios and milliseconds, medians of `ROUNDS`.

    Raises `ConfigError` for an unknown transport.
    """
    return {**measure_copies(uri), **measure_planning()}


def measure_copies(uri: str = "shm", nbytes: int = COPY_BYTES, rounds: int = ROUNDS) -> dict[str, float]:
    """Bandwidths over `nbytes` (a multiple of 32 KiB) in GB/s, and as ratios to `memcpy`. Between two processes.

    Raises `ConfigError` for an unknown transport.
    """
    near = create_transport(uri)
    far = SpawnedPeer(uri, [nbytes])
    try:
        source, dest = near.allocate("source", nbytes), near.allocate("dest", nbytes)
        source[:] = 1
        near.register([source, dest])
        far.fill(0, 1)  # memory that nobody has touched yet would be slow
        peer = near.connect(far.descriptor).result(30)

        def submit(run_bytes: int) -> Callable[[], object]:
            copies = _scattered(nbytes, run_bytes)

            def once() -> None:
                if near.submit(peer, "write", copies).wait() != "done":
                    raise TransportError("a copy of the benchmark failed")

            return once

        name = near.scheme
        parts: dict[str, Callable[[], object]] = {
            "memcpy": lambda: np.copyto(dest, source),
            f"{name}_32k": submit(32 << 10),
            f"{name}_4k": submit(4 << 10),
        }
        seconds = _medians(parts, rounds)
    finally:
        near.close()
        far.close()
    out = {f"{name}_gb_per_s": nbytes / second / 1e9 for name, second in seconds.items()}
    for part in (f"{name}_32k", f"{name}_4k"):
        out[f"{part}_over_memcpy"] = seconds["memcpy"] / seconds[part]
    return out


def measure_planning(runs: int = PLAN_RUNS, rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds to plan `runs` runs, as whole scattered pages and as the layers of fewer pages."""
    layers = 32
    geometries = {
        "pages": _geometry(runs, 1, BLOCK_MAJOR_NHD),
        # A run for each layer, K/V half and page.
        "layers": _geometry(runs // (2 * layers), layers, LAYER_MAJOR_NHD),
    }
    parts: dict[str, Callable[[], object]] = {}
    out: dict[str, float] = {}
    for name, geometry in geometries.items():
        rng = np.random.default_rng(0)
        count = geometry.num_pages - 1
        here, there = (rng.permutation(count) + 1 for _ in range(2))
        rank = RankGeometry(rank=0, geometry=geometry)
        parts[name] = partial(plan, [rank], rank, here, there, Interval(0, count * geometry.page_size))
        out[f"plan_{name}_runs"] = float(len(plan([rank], rank, here, there, Interval(0, count * 16))[0]))
    out.update({f"plan_{name}_ms": second * 1e3 for name, second in _medians(parts, rounds).items()})
    return out


def _geometry(pages: int, layers: int, order: tuple[Axis, ...]) -> Geometry:
    spec = GroupSpec(
        name="bench",
        owner="target",
        kind="full",
        planes=kv_planes(8, 128, "bfloat16"),
        page_size=16,
        layer_ids=tuple(range(layers)),
    )
    return Geometry.from_order(spec, pages + 1, order)


def _scattered(nbytes: int, run_bytes: int) -> CopyList:
    """Runs of `run_bytes` that cover `nbytes`, in shuffled order at the source and ascending at the
    destination.
    """
    count = nbytes // run_bytes
    source = np.random.default_rng(0).permutation(count).astype(np.int64) * run_bytes
    dest = np.arange(count, dtype=np.int64) * run_bytes
    return CopyList(0, 0, source, dest, np.full(count, run_bytes, dtype=np.int64))


def _medians(parts: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for part in parts.values():
        part()
    for _ in range(rounds):
        for name, part in parts.items():
            start = time.perf_counter()
            part()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
