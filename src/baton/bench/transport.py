"""`baton bench transport`: the data plane.

Compares writes to another process of this host with a `memcpy` of equal size. Rounds alternate; ratios are taken within
a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np

from baton.bench.progress_bar import with_progress
from baton.errors import ConfigError, TransportError
from baton.handoff.plan.planner import RankGeometry, plan_copies
from baton.kv.geometry import BLOCK_MAJOR_NHD, LAYER_MAJOR_NHD, Axis, CopyList, Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, kv_planes
from baton.testing.transport_peer import SpawnedPeer
from baton.transports.registry import built_in_transports, create_transport, with_path

ROUNDS = 21
# A slow transport gets fewer rounds, but at least three.
MAX_CASE_S = 4.0
COPY_BYTES = 64 << 20
PLAN_RUNS = 20_000
ALL = tuple(scheme for scheme in built_in_transports("cpu") if scheme != "local")
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, COPY_BYTES)
RUN_SIZES = (4 << 10, 32 << 10, 1 << 20)


@dataclass(frozen=True, slots=True)
class CopySpeed:
    """`nbytes` in runs of `run_bytes`, scattered at the source: medians, GB/s with quartiles. `over_memcpy`: the speed
    relative to `memcpy`.
    """

    transport: str
    nbytes: int
    run_bytes: int
    gb_per_s: float
    gb_per_s_low: float
    gb_per_s_high: float
    ms: float
    over_memcpy: float
    rounds: int


def runnable_transports(uris: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    found, why = [], {}
    for uri in uris:
        try:
            create_transport(uri).close()
            found.append(uri)
        except ConfigError as error:
            why[uri] = str(error)
    return found, why


def measure_copies(
    uri: str, sizes: Sequence[int] = SIZES, run_sizes: Sequence[int] = RUN_SIZES, rounds: int = ROUNDS
) -> list[CopySpeed]:
    """Copy between two processes, each size in runs of each run size.

    Raises `ConfigError`.
    """
    cases = [(size, run) for size in sizes for run in sorted({min(run, size) for run in run_sizes})]
    for size, run in cases:
        if run < 1 or size % run:
            raise ConfigError("run_size", f"{size} bytes are no whole number of runs of {run}")
    most = max(sizes)
    with TemporaryDirectory(prefix="baton-bench-") as folder:
        uri = with_path(uri, folder)
        near = create_transport(uri)
        try:
            far = SpawnedPeer(uri, [most])
            try:
                source, dest = near.allocate("source", most), near.allocate("dest", most)
                source[:] = 1
                near.register([source, dest])
                far.fill(0, 1)  # the first touch of memory is slow
                peer = near.connect(far.descriptor).result(30)

                def write(copies: CopyList) -> None:
                    if near.submit(peer, "write", copies).wait() != "done":
                        raise TransportError("a copy of the benchmark failed")

                figures = []
                for size, run in with_progress(cases, "case"):
                    parts: dict[str, Callable[[], object]] = {
                        "memcpy": partial(np.copyto, dest[:size], source[:size]),
                        near.scheme: partial(write, _scattered(size, run)),
                    }
                    seconds = _in_turns(parts, rounds)
                    figures.append(_figures(near.scheme, size, run, seconds[near.scheme], seconds["memcpy"]))
                    if run == min(run_sizes[-1], size):
                        figures.append(_figures("memcpy", size, size, seconds["memcpy"], seconds["memcpy"]))
            finally:
                far.close()
        finally:
            near.close()
    return figures


def measure_planning(runs: int = PLAN_RUNS, rounds: int = ROUNDS) -> dict[str, float]:
    """Median milliseconds: as scattered whole pages, and as the layers of fewer pages."""
    layers = 32
    geometries = {
        "pages": _geometry(runs, 1, BLOCK_MAJOR_NHD),
        # One run per layer, K or V, and page.
        "layers": _geometry(runs // (2 * layers), layers, LAYER_MAJOR_NHD),
    }
    parts: dict[str, Callable[[], object]] = {}
    out: dict[str, float] = {}
    for name, geometry in geometries.items():
        rng = np.random.default_rng(0)
        count = geometry.num_pages - 1
        here, there = (rng.permutation(count) + 1 for _ in range(2))
        rank = RankGeometry(rank=0, geometry=geometry)
        parts[name] = partial(plan_copies, [rank], rank, here, there, Interval(0, count * geometry.page_size))
        out[f"plan_{name}_runs"] = float(len(plan_copies([rank], rank, here, there, Interval(0, count * 16))[0]))
    seconds = _in_turns(parts, rounds)
    return out | {f"plan_{name}_ms": statistics.median(values) * 1e3 for name, values in seconds.items()}


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
    count = nbytes // run_bytes
    source = np.random.default_rng(0).permutation(count).astype(np.int64) * run_bytes
    dest = np.arange(count, dtype=np.int64) * run_bytes
    return CopyList(0, 0, source, dest, np.full(count, run_bytes, dtype=np.int64))


def _figures(name: str, nbytes: int, run_bytes: int, seconds: Sequence[float], memcpy: Sequence[float]) -> CopySpeed:
    speeds = sorted(nbytes / one / 1e9 for one in seconds)
    quarter = len(speeds) // 4
    return CopySpeed(
        name,
        nbytes,
        run_bytes,
        statistics.median(speeds),
        speeds[quarter],
        speeds[-1 - quarter],
        statistics.median(seconds) * 1e3,
        statistics.median(m / s for m, s in zip(memcpy, seconds, strict=True)),
        len(speeds),
    )


def _in_turns(parts: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    began = time.perf_counter()
    for part in parts.values():
        part()
    once = time.perf_counter() - began
    for _ in range(max(min(rounds, 3), min(rounds, int(MAX_CASE_S / once)))):
        for name, part in parts.items():
            start = time.perf_counter()
            part()
            seconds[name].append(time.perf_counter() - start)
    return seconds
