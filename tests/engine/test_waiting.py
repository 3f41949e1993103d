"""The cost of a waiting request."""

from __future__ import annotations

import pytest

from baton.kv import page_pool
from baton.sampling_params import SamplingParams
from testkit.engines import request, stepped

PAGE_BYTES = 16 * 2 * 4 * 32 * 2 * 5


def test_a_waiting_prompt_is_hashed_once_per_group(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    waiting = list(range(200, 350))
    hashed: list[tuple[int, ...]] = []
    whole = page_pool.chain_hash

    def count(parent: bytes, identity: tuple[int, ...]) -> bytes:
        hashed.append(identity)
        return whole(parent, identity)

    monkeypatch.setattr(page_pool, "chain_hash", count)
    with stepped(kv_cache_memory=12 * PAGE_BYTES) as one:
        first = one.add(request("runs", list(range(50)), params))
        one.step()
        second = one.add(request("waits", waiting, SamplingParams(max_tokens=8, temperature=0.0)))
        num_steps = 0
        while not first.ended:
            one.step()
            num_steps += 1
        looked_up = [identity for identity in hashed if identity[0] == waiting[0]]
        # Target and drafter; the drafter's pages depend on one token more.
        assert sorted(map(len, looked_up)) == [16, 17]
        assert num_steps > 10
        while not second.ended:
            one.step()
