"""The slots that vLLM's drafter remembers are blanked when a step's drafts are done."""

from __future__ import annotations

import torch

from baton.vllm.draft_slots import RememberedSlots

DRAFTER, TARGET = "model.layers.8.self_attn.attn", "model.layers.0.self_attn.attn"


def test_all_of_the_proposers_buffer_is_blank_after_a_step() -> None:
    """Also what no pass of this step has used: a dummy step may be longer."""
    slots, buffer, other = RememberedSlots([DRAFTER]), torch.arange(64), torch.arange(8)
    with torch.inference_mode():
        slots.record(TARGET, {TARGET: other[:5], DRAFTER: other[:5]})
        for length in (7, 1, 1):  # the drafter's passes over a prompt, then per draft
            slots.record(DRAFTER, {DRAFTER: buffer[:length]})
    assert buffer.equal(torch.arange(64))  # not before the last pass, which may read it
    slots.blank()
    assert buffer.equal(torch.full((64,), -1))
    assert other.equal(torch.arange(8))


def test_every_buffer_of_the_drafter_is_blanked_in_every_step() -> None:
    """A drafter with layers in several cache groups has one buffer for each."""
    second = "model.layers.9.self_attn.attn"
    buffers = {DRAFTER: torch.arange(16), second: torch.arange(16)}
    slots = RememberedSlots(buffers)
    for _ in range(2):
        for layer, buffer in buffers.items():
            buffer.copy_(torch.arange(16))
            slots.record(layer, {name: each[:3] for name, each in buffers.items()})
        slots.blank()
        assert all(bool((buffer == -1).all()) for buffer in buffers.values())


def test_a_step_without_drafts_blanks_nothing() -> None:
    slots, buffer = RememberedSlots([DRAFTER]), torch.arange(4)
    slots.record(DRAFTER, [{DRAFTER: buffer}])  # micro-batches: of the target's pass
    slots.record(DRAFTER, {})
    slots.blank()
    assert buffer.equal(torch.arange(4))
