"""Where a prompt of gated delta nets may be cut: vLLM's kernel for CPUs, without servers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from vllm import _custom_ops as ops

from baton.vllm import support

HEADS, SIZE = 2, 64


def outputs(lengths: Sequence[int], states: torch.dtype) -> torch.Tensor:
    """Of a prompt that is computed in parts, with its state kept in between."""
    rng = torch.Generator().manual_seed(3)
    shape = (1, sum(lengths), HEADS)
    query, key, value = (torch.randn(*shape, SIZE, generator=rng).bfloat16() for _ in range(3))
    decay, beta = -0.002 * torch.rand(shape, generator=rng), torch.rand(shape, generator=rng).bfloat16()
    state = torch.zeros(1, HEADS, SIZE, SIZE, dtype=states)
    found, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        out, _ = ops.chunk_gated_delta_rule_cpu(
            query=query[:, part].contiguous(),
            key=key[:, part].contiguous(),
            value=value[:, part].contiguous(),
            g=decay[:, part].contiguous(),
            beta=beta[:, part].contiguous(),
            initial_state=state,
            output_final_state=True,
            cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=torch.zeros(1, dtype=torch.int32),
        )
        found.append(out)
        start += length
    return torch.cat(found, 1)


@pytest.mark.parametrize("states", support.ROUNDED_BY_CHUNK)
@pytest.mark.parametrize(("cut", "same"), [(64, True), (128, True), (63, False), (96, False)])
def test_a_prompt_in_two_parts_has_the_bits_of_a_whole_one(cut: int, same: bool, states: str) -> None:
    """Only if it is cut where the kernel cuts it, and rounds its state to their type."""
    whole, parts = (outputs(lengths, getattr(torch, states)) for lengths in ([192], [cut, 192 - cut]))
    assert whole.isfinite().all()
    assert whole[:, :cut].equal(parts[:, :cut])
    assert whole.equal(parts) == same


def test_states_are_rounded_at_all() -> None:
    exact, *others = (outputs([192], getattr(torch, states)) for states in support.ROUNDED_BY_CHUNK)
    assert not any(exact.equal(other) for other in others)
