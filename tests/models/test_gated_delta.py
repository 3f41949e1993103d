"""Gated delta nets and Kimi Delta Attention: the implementations agree, and the CPU one gives a row the same bits in
every batch."""

from __future__ import annotations

import pytest
import torch

from baton.models.layer_cache import LayerCache
from baton.models.layers.gated_delta import GatedDeltaNet, GatedDeltaSpec
from baton.models.layers.kimi_delta import KimiDeltaNet
from baton.models.layers.linear import Build
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
    "usual": GatedDeltaSpec(key_heads=2, key_dim=16, value_heads=4, value_dim=16, taps=4),
    "odd": GatedDeltaSpec(1, 5, 3, 7, 2),
    "kimi": GatedDeltaSpec(4, 16, 4, 16, 4),
    "kimi, odd": GatedDeltaSpec(3, 7, 3, 7, 2),
}


class WithoutPositions(KimiDeltaNet):
    def forward(self, x: torch.Tensor, cache: LayerCache) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, (x, x), cache)


def layer(name: str, dtype: torch.dtype = torch.float32) -> GatedDeltaNet | KimiDeltaNet:
    kind = WithoutPositions if name.startswith("kimi") else GatedDeltaNet
    built = kind(SPECS[name], HIDDEN, 1e-6, 0, Build(dtype, torch.device("cpu"), True))
    fill(built)
    return built


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_implementations_agree(name: str, dtype: torch.dtype) -> None:
    spec, x = SPECS[name], inputs(dtype)
    one = layer(name, dtype)
    kept = [0, 1, 63, 64, LENGTH - 1]
    expected, states = run(one, x, begin(spec.state_spec, dtype), [0, LENGTH], kept)
    one._on_cpu = one.conv1d._on_cpu = False
    found, found_states = run(one, x, begin(spec.state_spec, dtype), [0, LENGTH], kept)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(found, expected, **tolerance)
    for part, other in zip(found_states, states, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_neither_chunks_nor_neighbours_change_a_bit(name: str, dtype: torch.dtype) -> None:
    assert_rows_have_the_bits_of_any_batch(layer(name, dtype), SPECS[name].state_spec, dtype)


def test_a_row_that_is_not_finite_spoils_no_row_before_it() -> None:
    spec, x = SPECS["usual"], inputs()
    one = layer("usual")
    whole, _ = run(one, x, begin(spec.state_spec, x.dtype), [0, LENGTH], [])
    spoiled = x.clone()
    spoiled[70] = torch.nan
    found, _ = run(one, spoiled, begin(spec.state_spec, x.dtype), [0, LENGTH], [])
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
