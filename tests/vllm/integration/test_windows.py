"""Preemption where the target has windows and the drafter has none: a request loses several block tables at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.vllm_servers import ONE_PROCESS
from tests.vllm.integration.checkpoints import windowed
from tests.vllm.integration.servers import EAGLE3, Mode, Pair, serve, wait_idle
from tests.vllm.integration.test_recovery import CHUNKS, LEASE_S, TIGHT, exact, outcomes

pytestmark = pytest.mark.timeout(900)

# One longest request needs two tables of 32 blocks, and those of its windows.
ROOM = ["--num-gpu-blocks-override", "112"]
SLOW = {"kv_transport": "faulty+nixl://?fault=delay&delay_s=0.1"}
LOSSY = {"kv_transport": "faulty+nixl://?fault=fail&every=2", "max_retries": 0}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("windows")
    windowed(folder / "model")
    configs = [
        ("TIGHT", "kv_producer", [*TIGHT, *ROOM, *ONE_PROCESS]),
        ("D", "kv_consumer", [*CHUNKS[:2], *ONE_PROCESS]),
    ]
    own = {"TIGHT": SLOW, "D": LOSSY}
    with serve(folder, configs, {"lease": LEASE_S}, EAGLE3, folder / "model", own) as (tight, decode):
        yield Pair(tight, decode)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_requests_that_are_preempted_while_they_are_copied(pair: Pair, mode: Mode) -> None:
    tight, count = pair.prefill, "vllm:num_preemptions_total"
    before = tight.metrics(count)[count], outcomes(tight).get("prefill_preempted", 0)
    asyncio.run(exact(pair, pair.decode, [350 + 60 * number for number in range(10)], mode))
    wait_idle(tight, pair.decode)
    assert tight.metrics(count)[count] > before[0]
    assert outcomes(tight)["prefill_preempted"] > before[1]
