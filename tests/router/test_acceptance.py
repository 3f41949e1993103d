"""Acceptance in `/status`, `/metrics`, the log and the answer's `metrics`, by route and engine pair."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from baton.openai.request_metrics import PerRequestMetrics
from testkit.servers.fake_serving import status_of
from testkit.servers.fleets import Cluster, complete


def named(cluster: Cluster) -> Cluster:
    for role, engines in (("prefill", cluster.prefills), ("decode", cluster.decodes)):
        for number, engine in enumerate(engines):
            engine.info = msgspec.structs.replace(engine.info, engine_id=f"{role}-{number}")
    return cluster


async def test_a_decode_engine_whose_drafts_are_refused_is_named(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = named(Cluster(directory, num_prefill=1, num_decode=2))
    cluster.decodes[1].accept = 0
    per_request = PerRequestMetrics(per_request_spec_decode_metrics="summary")
    async with cluster.run(per_request=per_request) as (url, session):
        asked = 0
        while not (acceptance := (await status_of(session, url))["acceptance"])["alarms"]:
            assert asked < 100
            prompts = [[5, 6, number] for number in range(asked, asked + 10)]
            answers = await asyncio.gather(*(complete(session, url, prompt=ids, max_tokens=8) for ids in prompts))
            assert {status for status, _ in answers} == {200}
            asked += len(answers)
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()
    assert all(line.startswith("acceptance of ") and "decode-1" in line for line in acceptance["alarms"])
    assert any(message.startswith("acceptance of decode-1 is too low: 0% of the verif") for message in caplog.messages)
    good, bad = acceptance["groups"]
    assert (good["route"], good["prefill"], good["decode"]) == ("handed_off", "prefill-0", "decode-0")
    assert good["first_verification"]["acceptance_per_pos"] == [1.0, 1.0]
    assert bad["later_verifications"]["acceptance_per_pos"] == [0.0]
    assert good["num_requests"] + bad["num_requests"] == asked
    labels = 'decode_engine="decode-0",le="2.0",prefill_engine="prefill-0",route="handed_off"'
    assert f"baton:router_first_verification_accepted_bucket{{{labels}}} {good['num_requests']:.1f}" in text
    assert "baton:router_later_verifications_accepted_bucket" in text
    assert f"baton:router_acceptance_alarms {len(acceptance['alarms']):.1f}" in text
    told = [answer["metrics"]["speculative_decoding"] for _, answer in answers]
    assert {one["route"] for one in told} == {"handed_off"}


async def test_resumed_requests_are_not_compared(directory: Path) -> None:
    cluster = named(Cluster(directory, num_prefill=1, num_decode=2))
    cluster.decodes[0].fail = "dies"
    async with cluster.run() as (url, session):
        assert (await complete(session, url))[0] == 200
        state = await status_of(session, url)
        assert state["recoveries"] == {"full": 1}
        assert state["acceptance"]["groups"] == []
        assert (await complete(session, url))[0] == 200
        assert [group["num_requests"] for group in (await status_of(session, url))["acceptance"]["groups"]] == [1]
