"""vLLM's own scheduler, KV-cache manager and V1 connector calls, with `BatonConnector` over CPU tensors and no model.
It runs with the Python files of a vLLM that has no build for CPUs too (`tools/vllm_python.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.v1.request import RequestStatus

from baton.handoff.session.keys import make_keys
from testkit.vllm.scheduled_engine import BUDGET, ScheduledEngine, ticket

pytestmark = pytest.mark.timeout(1800)
Pair = tuple[ScheduledEngine, ScheduledEngine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("scheduled")
    make_keys(found / "keys", ["P", "D"])
    return found


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    p, d = (ScheduledEngine(folder, *each) for each in (("P", "kv_producer"), ("D", "kv_consumer")))
    yield p, d
    for engine in (p, d):
        engine.worker.shutdown()


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("length", [2, 32, 33, 34, 65, 2 * BUDGET + 3])
def test_d_has_all_but_the_last_token_of_target_and_drafter(pair: Pair, folder: Path, length: int, mode: str) -> None:
    p, d = pair
    # Prompts of this test share no prefix.
    prompt = [1000 * (mode == "pull") + 7 * length + token for token in range(length)]
    signed = ticket(folder, p, d, prompt, mode)
    name = f"{mode}-{length}"
    generator = torch.Generator().manual_seed(length)
    caches = p.caches.items()
    entries = {
        layer: torch.rand(cache.shape[1], length + 16, cache.shape[3], generator=generator) + 1
        for layer, cache in caches
    }
    p.add(name, prompt, 1, "prefill", signed)
    d.add(name, prompt, 3, "decode", signed)
    # D computes other entries, which would be seen if it computed what it is to receive.
    for _ in range(3):
        p.step({name: entries})
    d.step_until({name: {layer: -entry for layer, entry in entries.items()}}, p, name, 1)
    assert d.first_tokens[name][0] == length - 1
    for layer, entry in entries.items():
        assert d.read(name, layer, length - 1).equal(entry[:, : length - 1]), layer
    assert d.scheduler.requests[name].num_output_tokens == 1
    d.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
