"""CPU kernels of the short causal convolution before a recurrence, row by row: no other row changes a bit.

Shapes: T rows of R requests, C channels, K taps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from baton.jit_cache import jit_contract
from baton.kernels.cpu.scalar import exp32, to_f32

_ONE = np.float32(1.0)


@jit_contract
def convolve(rows: Any, first: Any, state: Any, weight: Any, bias: Any, query_start: Any, out: Any) -> None:
    """Causal depthwise convolution, then SiLU, to `out` float32 [T, C].

    Inputs are columns `first` .. `first` + C of `rows`, and before each request's first row the columns of `state`
    [R, C, K - 1]. `weight` is float32 [K, C], `bias` float32 [C].
    """
    taps, channels = weight.shape
    for r in range(len(query_start) - 1):
        begin = query_start[r]
        for t in range(begin, query_start[r + 1]):
            sums = out[t]
            for c in range(channels):
                sums[c] = bias[c]
            for k in range(taps):
                source = t - (taps - 1) + k
                if source >= begin:
                    row = rows[source, first : first + channels]
                    for c in range(channels):
                        sums[c] += weight[k, c] * to_f32(row[c])
                else:
                    column = source - begin + taps - 1
                    for c in range(channels):
                        sums[c] += weight[k, c] * to_f32(state[r, c, column])
            for c in range(channels):
                sums[c] = sums[c] / (_ONE + exp32(-sums[c]))


@jit_contract
def last_inputs(rows: Any, first: Any, state: Any, query_start: Any, kept: Any, out: Any) -> None:
    """Write to `out` [len(kept), C, K - 1] the convolution's states after the rows `kept`: the last K - 1 inputs."""
    channels, columns = out.shape[1], out.shape[2]
    r = 0
    for i in range(len(kept)):
        while query_start[r + 1] <= kept[i]:
            r += 1
        begin = query_start[r]
        for column in range(columns):
            source = kept[i] - (columns - 1) + column
            if source >= begin:
                for c in range(channels):
                    out[i, c, column] = rows[source, first + c]
            else:
                for c in range(channels):
                    out[i, c, column] = state[r, c, source - begin + columns]
