"""One recurrent layer without an engine: its states, its forward, and that a row has the same bits in every batch."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor, nn

from baton.models.layer_cache import Recurrence, ScanRows, StateLayerSpec, States

HIDDEN = 32
LENGTH = 150


class Slots:
    """The cache of one layer's forward: the given states, and the states after the rows `kept`."""

    def __init__(self, states: States, query_start: list[int], kept: list[int]) -> None:
        self.states, self.rows = states, ScanRows(np.array(query_start, np.int32), np.array(kept, np.int64))
        self.kept: States = ()

    def scan(self, layer_id: int, recurrence: Recurrence) -> Tensor:
        out, self.kept = recurrence(tuple(state.clone() for state in self.states), self.rows)
        return out


def fill(layer: nn.Module) -> None:
    """Random weights, with which states decay slowly."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in layer.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise - 2 if name in ("A_log", "dt_bias") else noise * 0.3)


def begin(spec: StateLayerSpec, dtype: torch.dtype, count: int = 1) -> States:
    """The states of `count` requests before their first row."""
    kept = spec.planes
    return tuple(torch.zeros(count, p.num_heads, p.head_dim, dtype=torch.float32 if p.dtype else dtype) for p in kept)


def run(one: nn.Module, x: Tensor, states: States, query_start: list[int], kept: list[int]) -> tuple[Tensor, States]:
    slots = Slots(states, query_start, kept)
    return one(x, slots), slots.kept


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_have_the_bits_of_any_batch(one: nn.Module, spec: StateLayerSpec, dtype: torch.dtype) -> None:
    """Neither chunks nor neighbours change a bit of a row or of a state."""
    x, other = inputs(dtype), inputs(dtype, seed=1)
    whole, states = run(one, x, begin(spec, dtype), [0, LENGTH], list(range(LENGTH)))
    state, other_state = begin(spec, dtype), begin(spec, dtype)
    for start, stop in itertools.pairwise([0, 1, 2, 4, 5, 30, 94, 95, LENGTH]):
        # Between rows of another request at another position.
        rows = stop - start
        both = torch.cat((other[:3], x[start:stop], other[3:4]))
        before = tuple(torch.cat((b, a, b)) for a, b in zip(state, other_state, strict=True))
        found, kept = run(one, both, before, [0, 3, 3 + rows, 4 + rows], list(range(3, 3 + rows)))
        assert torch.equal(found[3:-1], whole[start:stop]), (start, stop)
        for part, expected in zip(kept, states, strict=True):
            assert torch.equal(part, expected[start:stop])
        state = tuple(part[-1:] for part in kept)
