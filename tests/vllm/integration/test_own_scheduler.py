"""vLLM's own scheduler, KV-cache manager and V1 connector calls, with `BatonConnector` over CPU tensors and no model.
It runs with the Python files of a vLLM that has no build for CPUs too (`tools/vllm_python.py`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.request import RequestStatus

from baton.errors import IncompatiblePeerError
from baton.handoff.protocol.fingerprint import compare_fingerprints
from baton.vllm import support
from testkit.vllm.scheduled_engine import BUDGET, DFLASH, EAGLE3, ScheduledEngine, ticket

pytestmark = pytest.mark.timeout(1800)
Pair = tuple[ScheduledEngine, ScheduledEngine]


@contextlib.contextmanager
def engines(folder: Path, *scales: float | None, spec: dict[str, Any] = EAGLE3) -> Iterator[Pair]:
    """P and D with a layer's scale of each."""
    roles = ("P", "kv_producer"), ("D", "kv_consumer")
    p, d = (ScheduledEngine(folder, *each, scale, spec=spec) for each, scale in zip(roles, scales, strict=True))
    try:
        yield p, d
    finally:
        for engine in (p, d):
            engine.worker.shutdown()


@pytest.fixture(
    scope="module", params=[(None, EAGLE3), (0.25, EAGLE3), (None, DFLASH)], ids=["float32", "fp8", "dflash"]
)
def pair(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pair]:
    scale, spec = request.param
    with engines(folder, scale, scale, spec=spec) as found:
        yield found


def random_entries(engine: ScheduledEngine, num_tokens: int) -> dict[str, torch.Tensor]:
    """Entries [heads, tokens, elements] of each layer, none of them 0, and none its own negative."""
    generator, found = torch.Generator().manual_seed(num_tokens), {}
    for layer, cache in engine.caches.items():
        shape = (cache.shape[1], num_tokens, cache.shape[3])
        if cache.dtype == torch.uint8:
            found[layer] = torch.randint(1, 128, shape, dtype=torch.uint8, generator=generator)
        else:
            found[layer] = torch.rand(shape, generator=generator) + 1
    return found


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("length", [2, 32, 33, 34, 65, 2 * BUDGET + 3])
def test_d_has_all_but_the_last_token_of_target_and_drafter(pair: Pair, folder: Path, length: int, mode: str) -> None:
    p, d = pair
    # Prompts of this test share no prefix.
    prompt = [1000 * (mode == "pull") + 7 * length + token for token in range(length)]
    signed = ticket(folder, p, d, prompt, mode)
    name = f"{mode}-{length}"
    entries = random_entries(p, length + 16)
    p.add(name, prompt, 1, "prefill", signed)
    d.add(name, prompt, 3, "decode", signed)
    # D computes other entries, which would be seen if it computed what it is to receive.
    for _ in range(3):
        p.step({name: entries})
    d.step_until({name: {layer: -entry for layer, entry in entries.items()}}, p, name, 1)
    assert d.first_tokens[name][0] == length - 1
    # Nobody verifies a prefill leg's drafts.
    assert (set(p.num_drafts), set(d.num_drafts)) == ({0}, {3})
    assert d.sleeps_after_kv == 0 or support.check_version() not in support.FIRST_DRAFTS
    for layer, entry in entries.items():
        assert d.read(name, layer, length - 1).equal(entry[:, : length - 1]), layer
    assert d.scheduler.requests[name].num_output_tokens == 1
    d.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)


def test_fp8_of_other_scales_is_not_handed_off(folder: Path) -> None:
    """The scales are no part of the bytes: with another one they are other numbers."""
    with engines(folder, 0.25, 0.5) as (p, d):
        facts = [json.loads(engine.identity.fingerprint) for engine in (p, d)]
        with pytest.raises(IncompatiblePeerError, match=r"cache\.scales"):
            compare_fingerprints(*facts)
        assert {name for name in facts[0] if facts[0][name] != facts[1][name]} == {"cache.scales"}
        prompt = list(range(5, 75))
        signed, entries = ticket(folder, p, d, prompt, "push"), random_entries(p, 90)
        p.add("other", prompt, 1, "prefill", signed)
        d.add("other", prompt, 3, "decode", signed)
        d.step_until({"other": entries}, p, "other", 1)
        assert d.first_tokens["other"][0] == 0
