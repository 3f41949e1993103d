"""The compiled loop over runs: every byte in its place and no other changed, for all ways to copy a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv.geometry import CopyList
from baton.transports.copying import (
    CHUNK_BYTES,
    LANES,
    LONG_BYTES,
    PAST_CACHES_BYTES,
    SHORT_BYTES,
    STEP_BYTES,
    copy_runs,
)

LINE = 64


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def lines(nbytes: int) -> np.ndarray:
    """Zeroed memory that begins at a cache line, as that of pools does."""
    memory = np.zeros(nbytes + LINE, dtype=np.uint8)
    begin = -memory.ctypes.data % LINE
    return memory[begin : begin + nbytes]


def check(lengths: list[int], shift: int = 0, seed: int = 0) -> None:
    """Copy runs of these lengths, in any order and at any address at the source; at the destination each begins at a
    cache line plus `shift`.
    """
    rng = np.random.default_rng(seed)
    nbytes = column(*lengths)
    room = (nbytes + 2 * LINE - 1) // LINE * LINE
    places = [np.zeros_like(nbytes), np.zeros_like(nbytes)]
    for place in places:
        order = rng.permutation(nbytes.size)
        place[order] = np.cumsum(room[order]) - room[order]
    source_at, dest_at = places[0] + rng.integers(0, LINE, nbytes.size), places[1] + shift
    source = rng.integers(1, 256, int(room.sum()) + LINE, dtype=np.uint8)
    dest, flags = lines(int(room.sum()) + LINE), column(0, 0)
    want = dest.copy()
    for at, to, length in zip(source_at, dest_at, lengths, strict=True):
        want[to : to + length] = source[at : at + length]
    assert copy_runs(source, dest, CopyList(0, 0, source_at, dest_at, nbytes), flags) == nbytes.size
    assert flags.tolist() == [0, nbytes.size]
    assert np.array_equal(dest, want)


LENGTHS = (0, 1, LINE, STEP_BYTES - 1, STEP_BYTES, STEP_BYTES + 1, 3 * STEP_BYTES, SHORT_BYTES, 5000, 16384)


@given(
    st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3 * LANES),
    st.sampled_from((0, 1, 16)),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_as_numpy_copies(lengths: list[int], shift: int, seed: int) -> None:
    check(lengths, shift, seed)


@pytest.mark.parametrize("length", [LONG_BYTES - 1, LONG_BYTES, CHUNK_BYTES + 17])
def test_long_runs_beside_short_ones(length: int) -> None:
    check([length] * LANES + [length, 4096, STEP_BYTES, length] + [length] * (LANES - 1))


@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize("others", [(16384,), (CHUNK_BYTES + 17, 5000, STEP_BYTES, 1, 0)])
def test_more_than_caches_hold(others: tuple[int, ...], shift: int) -> None:
    lengths = [4096, 1, 0] + [*others] * (1 + PAST_CACHES_BYTES // sum(others))
    check(lengths, shift)


def test_runs_longer_than_a_chunk() -> None:
    source = np.random.default_rng(0).integers(0, 256, 3 * CHUNK_BYTES, dtype=np.uint8)
    dest = np.zeros_like(source)
    flags = np.zeros(2, dtype=np.int64)
    copies = CopyList(0, 0, column(5, 0), column(1, 0), column(2 * CHUNK_BYTES + 17, 1))
    assert copy_runs(source, dest, copies, flags) == 2
    assert flags.tolist() == [0, 2]
    want = np.zeros_like(source)
    want[1 : 2 * CHUNK_BYTES + 18] = source[5 : 2 * CHUNK_BYTES + 22]
    want[0] = source[0]
    assert np.array_equal(dest, want)


def test_a_set_flag_stops_before_the_next_byte() -> None:
    source, dest = np.ones(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    copies = CopyList(0, 0, column(0, 8), column(0, 8), column(8, 8))
    assert copy_runs(source, dest, copies, column(1, 0)) == 0
    assert not dest.any()


def test_read_only_columns() -> None:
    columns = [column(0, 4), column(4, 0), column(4, 4)]
    for each in columns:
        each.setflags(write=False)
    source, dest = np.arange(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    assert copy_runs(source, dest, CopyList(0, 0, *columns), column(0, 0)) == 2
    assert dest.tolist() == [4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize("length", [64, 4096])
def test_runs_are_left_out_once_it_is_to_stop(length: int) -> None:
    at = np.arange(2 * LANES) * length
    source, dest = np.ones(at.size * length, dtype=np.uint8), lines(at.size * length)
    assert copy_runs(source, dest, CopyList(0, 0, at, at, np.full(at.size, length)), column(1, 0)) == 0
    assert not dest.any()


def test_a_damaged_cache_of_compiled_code_ends_no_start(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", "import baton.transports.copying"], env=environment, check=True)
        kept = [*tmp_path.rglob("*.nb?")]
        assert len(kept) == 2, "an index and code"
        for file in kept:
            os.truncate(file, 20)
