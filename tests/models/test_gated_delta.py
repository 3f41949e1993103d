"""Gated delta nets: the implementations agree, and the CPU one gives a row the same bits in every batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from baton.models.cache import States
from baton.models.layers.gated_delta import GatedDeltaNet, GatedDeltaSpec
from baton.models.layers.linear import Build
from tests.models.test_mamba2 import HIDDEN, LENGTH, Slots, inputs

SPECS = {
    "usual": GatedDeltaSpec(key_heads=2, key_dim=16, value_heads=4, value_dim=16, taps=4),
    "odd": GatedDeltaSpec(1, 5, 3, 7, 2),
}


def layer(spec: GatedDeltaSpec, dtype: torch.dtype = torch.float32) -> GatedDeltaNet:
    built = GatedDeltaNet(spec, HIDDEN, 1e-6, 0, Build(dtype, torch.device("cpu"), True))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in built.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise - 2 if name in ("A_log", "dt_bias") else noise * 0.3)
    return built


def begin(spec: GatedDeltaSpec, dtype: torch.dtype, count: int = 1) -> States:
    planes = spec.state_spec.planes
    return tuple(torch.zeros(count, p.num_heads, p.head_dim, dtype=torch.float32 if p.dtype else dtype) for p in planes)


def run(one: GatedDeltaNet, x: Tensor, states: States, starts: list[int], kept: list[int]) -> tuple[Tensor, States]:
    slots = Slots(states, starts, kept)
    return one(x, slots), slots.kept  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_implementations_agree(name: str, dtype: torch.dtype) -> None:
    spec, x = SPECS[name], inputs(dtype)
    one = layer(spec, dtype)
    kept = [0, 1, 63, 64, LENGTH - 1]
    expected, states = run(one, x, begin(spec, dtype), [0, LENGTH], kept)
    one._on_cpu = one.conv1d._on_cpu = False
    found, found_states = run(one, x, begin(spec, dtype), [0, LENGTH], kept)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(found, expected, **tolerance)
    for part, other in zip(found_states, states, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_neither_chunks_nor_neighbours_change_a_bit(name: str, dtype: torch.dtype) -> None:
    spec, x, other = SPECS[name], inputs(dtype), inputs(dtype, seed=1)
    one = layer(spec, dtype)
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


def test_a_row_that_is_not_finite_spoils_no_row_before_it() -> None:
    spec, x = SPECS["usual"], inputs()
    one = layer(spec)
    whole, _ = run(one, x, begin(spec, x.dtype), [0, LENGTH], [])
    spoiled = x.clone()
    spoiled[70] = torch.nan
    found, _ = run(one, spoiled, begin(spec, x.dtype), [0, LENGTH], [])
    assert torch.equal(found[:70], whole[:70])
    assert found[70:].isnan().all()


def test_ranks_share_a_state_by_heads() -> None:
    planes = SPECS["usual"].state_spec.planes
    assert [(plane.name, plane.num_heads, plane.head_dim, plane.cut) for plane in planes] == [
        ("conv.q", 32, 3, "channels"),
        ("conv.k", 32, 3, "channels"),
        ("conv.v", 64, 3, "channels"),
        ("matrix", 4, 256, "heads"),
    ]
