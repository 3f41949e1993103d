"""Sampling noise, the same for drafter, verifier and every engine.

Noise depends only on (seed, sample index, absolute token position, target token id). Philox4x64-10 (Salmon et al.,
2011) as in NumPy: key = (seed, sample index), counter = (block, position, stream, 0). Output element v belongs to
token id v.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from baton.engine.step_plans import Noise

_GUMBEL, _UNIFORM = 0, 1
# The target draws the drafter's rows again one step later.
_KEPT_ROWS = 64


def _bits(seed: int, sample_index: int, position: int, stream: int, count: int) -> npt.NDArray[np.uint64]:
    # NumPy converts words of 2**63 or more through float, which would make neighbouring seeds equal.
    key = np.array([seed, sample_index], dtype=np.uint64)
    counter = np.array([0, position, stream, 0], dtype=np.uint64)
    bits: npt.NDArray[np.uint64] = np.random.Philox(counter=counter, key=key).random_raw(count)
    return bits


def _uniforms(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    # 52 bits plus a half: never 0 or 1, so both logarithms in `gumbel` are finite.
    return (np.asarray(bits >> np.uint64(12), dtype=np.float64) + 0.5) * 2.0**-52


def gumbel_rows(noise: Noise, position: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.float64]:
    """Gumbel(0, 1) noise [S, vocab_size]."""
    rows = np.empty((len(position), vocab_size))
    words = zip(noise.seed.tolist(), noise.sample_index.tolist(), position.tolist(), strict=True)
    for row, (seed, sample_index, at) in enumerate(words):
        rows[row] = gumbel(seed, sample_index, at, vocab_size)
    return rows


@lru_cache(maxsize=_KEPT_ROWS)
def gumbel(seed: int, sample_index: int, position: int, vocab_size: int) -> npt.NDArray[np.float64]:
    """Gumbel(0, 1) noise [vocab_size] for one position; read-only."""
    out = _uniforms(_bits(seed, sample_index, position, _GUMBEL, vocab_size))
    np.log(out, out=out)
    np.negative(out, out=out)
    np.log(out, out=out)
    np.negative(out, out=out)
    out.setflags(write=False)
    return out


def uniform(seed: int, sample_index: int, position: int) -> float:
    """One uniform number in (0, 1) for the `rejection` verifier, independent of the position's Gumbel noise."""
    return float(_uniforms(_bits(seed, sample_index, position, _UNIFORM, 1))[0])
