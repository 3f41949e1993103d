"""The first block of a handed-over window, of which only a part came: vLLM takes it for whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.handoff.session.keys import make_keys
from testkit.vllm.scheduled_engine import BLOCK, ScheduledEngine, ticket
from tests.vllm.integration.test_own_scheduler import random_entries

pytestmark = pytest.mark.timeout(1800)

WINDOW = 2 * BLOCK + 1 - BLOCK // 2  # needs two blocks, and begins in the middle of one


def test_a_block_that_came_in_part_is_no_prefix(tmp_path: Path) -> None:
    """A third prompt finds the block before it, which another prompt has computed, and the part that the next query of
    the received one has not seen would be in its window."""
    make_keys(tmp_path / "keys", ["P", "D"])
    p, d = (ScheduledEngine(tmp_path, name, "kv_both", window=WINDOW) for name in ("P", "D"))
    prompt = list(range(100, 100 + 3 * BLOCK + 1))
    entries = random_entries(d, len(prompt) + 16)
    try:
        assert not d.identity.moves_prefixes, "vLLM does not find received windows again"
        d.add("begins", prompt[: BLOCK + 1], 1)
        while "begins" in d.scheduler.requests:
            d.step({"begins": entries})
        signed = ticket(tmp_path, p, d, prompt, "push")
        p.add("whole", prompt, 1, "prefill", signed)
        d.add("whole", prompt, 1, "decode", signed)
        p.step({"whole": entries})
        d.step_until({"whole": entries}, p, "whole", 1)
        assert d.first_tokens["whole"][0] == 3 * BLOCK
        other = [*prompt[: 2 * BLOCK], 7, 8, 9]
        d.add("other", other, 1)
        d.step({"other": entries})
        hit = d.first_tokens["other"][0]
        seen = slice(max(0, hit - WINDOW + 1), hit)
        window = d.layers[1]
        assert d.read("other", window, hit)[:, seen].equal(entries[window][:, seen]), hit
    finally:
        for engine in (p, d):
            engine.worker.shutdown()
