"""Mamba-2: its three implementations agree, and the CPU one gives a row the same bits in every batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.models.layers.linear import Build
from baton.models.layers.mamba2 import Mamba2, Mamba2Spec
from testkit.recurrences import (
    HIDDEN,
    LENGTH,
    assert_rows_have_the_bits_of_any_batch,
    begin,
    fill,
    inputs,
    run,
)

SPECS = {
    "usual": Mamba2Spec(num_heads=8, head_dim=16, num_groups=1, state_size=16, taps=4),
    "groups": Mamba2Spec(6, 5, 3, 7, 2, conv_bias=False, proj_bias=True),
    "one head": Mamba2Spec(1, 33, 1, 3, 5),
}


def layer(spec: Mamba2Spec, dtype: torch.dtype = torch.float32, batch_invariant: bool = True) -> Mamba2:
    built = Mamba2(spec, HIDDEN, 1e-6, 0, Build(dtype, torch.device("cpu"), batch_invariant))
    fill(built)
    return built


@pytest.mark.parametrize("name", SPECS)
def test_all_implementations_agree(name: str) -> None:
    spec, x = SPECS[name], inputs()
    one = layer(spec)
    kept = [0, 1, 63, 64, 100, LENGTH - 1]
    expected, states = run(one, x, begin(spec.state_spec, x.dtype), [0, LENGTH], kept)
    one._on_cpu = one.conv1d._on_cpu = False
    for by_row in (True, False):
        one._by_row = by_row
        found, found_states = run(one, x, begin(spec.state_spec, x.dtype), [0, LENGTH], kept)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for part, other in zip(found_states, states, strict=True):
            torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_neither_chunks_nor_neighbours_change_a_bit(name: str, dtype: torch.dtype) -> None:
    assert_rows_have_the_bits_of_any_batch(layer(SPECS[name], dtype), SPECS[name].state_spec, dtype)


def test_saved_states_are_those_a_later_forward_continues_from() -> None:
    """A state depends on the row's own request up to the row."""
    spec, x = SPECS["usual"], inputs()
    one = layer(spec)
    _, states = run(one, x[:20], begin(spec.state_spec, x.dtype, 2), [0, 12, 20], [2, 11, 19])
    for index, (start, stop) in enumerate([(0, 3), (0, 12), (12, 20)]):
        _, expected = run(one, x[start:stop], begin(spec.state_spec, x.dtype), [0, stop - start], [stop - start - 1])
        for part, alone in zip(states, expected, strict=True):
            assert torch.equal(part[index : index + 1], alone)


def test_ranks_share_a_state_by_heads_and_channels() -> None:
    """x, B and C of the convolution each by their own share; with one group every rank needs all of B and C."""
    cuts = {name: {plane.name: plane.cut for plane in spec.state_spec.planes} for name, spec in SPECS.items()}
    assert cuts["usual"] == {"conv.x": "channels", "conv.B": "whole", "conv.C": "whole", "ssm": "heads"}
    assert cuts["groups"] == {"conv.x": "channels", "conv.B": "channels", "conv.C": "channels", "ssm": "heads"}
    wide = replace(SPECS["usual"], state_size=64).state_spec
    assert [plane.num_heads * plane.head_dim for plane in wide.planes] == [128 * 3, 64 * 3, 64 * 3, 8 * 64 * 16]
