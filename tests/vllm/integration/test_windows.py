"""Preemption and failed copies if the target has windows (or is gpt-oss) and the drafter has none: a request loses
several block tables at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from testkit.vllm.checkpoints import gpt_oss, windowed
from testkit.vllm.servers import EAGLE3, Mode, Pair, serve, wait_idle
from tests.vllm.integration.test_recovery import CHUNKS, LEASE_S, TIGHT, exact, outcomes

pytestmark = pytest.mark.timeout(1800)

# One request of the longest length needs two tables of 32 blocks, and those of its windows.
ROOM = ["--num-gpu-blocks-override", "112"]
SLOW = {"kv_transport": "faulty+nixl://?fault=delay&delay_s=0.1"}
LOSSY = {"kv_transport": "faulty+nixl://?fault=fail&every=2", "max_retries": 0}


@pytest.fixture(scope="module", params=["windowed", "gpt_oss"])
def pair(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("windows")
    if request.param == "windowed":
        windowed(folder / "model")
        drafter = EAGLE3
    else:
        gpt_oss(folder / "model")
        drafter = EAGLE3 | {"model": str(folder / "model" / "eagle3")}
    configs = [
        ("TIGHT", "kv_producer", [*TIGHT, *ROOM]),
        ("D", "kv_consumer", CHUNKS[:2]),
    ]
    own = {"TIGHT": SLOW, "D": LOSSY}
    with serve(folder, configs, {"lease": LEASE_S}, drafter, folder / "model", own) as (tight, decode):
        yield Pair(tight, decode)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_requests_that_are_preempted_while_they_are_copied(pair: Pair, mode: Mode) -> None:
    """In pull mode every second copy fails: the decode server computes what is lost."""
    tight, count = pair.prefill, "vllm:num_preemptions_total"
    before = tight.metrics(count)[count], outcomes(tight).get("prefill_preempted", 0)
    lost = outcomes(pair.decode).get("failed_transfer_failed", 0)
    asyncio.run(exact(pair, pair.decode, [350 + 60 * number for number in range(10)], mode))
    wait_idle(tight, pair.decode)
    assert tight.metrics(count)[count] > before[0]
    assert outcomes(tight)["prefill_preempted"] > before[1]
    assert (outcomes(pair.decode).get("failed_transfer_failed", 0) > lost) == (mode == "pull")
