"""vLLM servers that fail, and clients that leave: the exact answer, or an error."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton.router.clients import vllm_client
from testkit.servers.fake_serving import join, status_of, until
from testkit.servers.fake_vllm import FakeVllm, token_at
from testkit.servers.fleets import QUICK
from testkit.servers.vllm_pair import BODY, CONNECTORS, PROMPT, WAYS, Pair, complete, said


@pytest.mark.parametrize(("name", "seed"), WAYS)
@pytest.mark.parametrize("fail", ["refuse", "broken", "cut", "error"])
async def test_a_decode_server_that_fails_is_an_error_and_the_prefill_server_is_told(
    directory: Path, name: str, seed: bool, fail: str
) -> None:
    pair = Pair(directory, name, seed)
    pair.d.fail, pair.d.fail_role = fail, "decode"

    def tickets(role: str) -> set[str]:
        return {body["kv_transfer_params"]["baton"]["ticket"] for body in pair.p.legs(role)}

    async with pair.run(recovery="none") as (url, session):
        status, answer = await complete(session, url)
        assert status == (400 if fail == "refuse" else 500 if fail == "error" else 503), answer
        if name == "BatonConnector":
            await until(lambda: tickets("cancel") == tickets("prefill"))
            assert len(tickets("cancel")) == 1
            # One with a temperature would change the tokens of others in vLLM for CPUs.
            assert [body["temperature"] for body in pair.p.legs("cancel")] == [0]


@pytest.mark.parametrize("roles", [("prefill",), ("decode",), ("prefill", "decode")], ids="-".join)
async def test_what_servers_refuse_in_a_stream_is_the_clients_error(directory: Path, roles: tuple[str, ...]) -> None:
    """As vLLM refuses `min_p` with speculation, after status 200. No other attempt could succeed."""
    pair = Pair(directory)
    for role, server in (("prefill", pair.p), ("decode", pair.d)):
        server.fail, server.fail_role = "reject" if role in roles else None, role
    async with pair.run() as (url, session):
        status, answer = await complete(session, url)
        assert (status, answer["error"]["message"], answer["error"]["param"]) == (400, "not supported", "min_p")
        assert len(pair.p.legs("prefill")) == len(pair.d.legs("decode")) == 1


async def test_a_refusal_after_tokens_is_the_servers_error(directory: Path) -> None:
    pair = Pair(directory)
    pair.d.fail, pair.d.fail_role, pair.d.fail_after = "reject", "decode", 3
    async with pair.run() as (url, session):
        status, answer = await complete(session, url)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == said(6)


@pytest.mark.parametrize(("name", "seed"), WAYS)
@pytest.mark.parametrize("fail", ["broken", "cut", "error", "abort", "stream"])
async def test_a_decode_server_that_fails_changes_no_token(directory: Path, name: str, seed: bool, fail: str) -> None:
    pair = Pair(directory, name, seed)
    pair.d.fail, pair.d.fail_role = fail, "decode"
    async with pair.run() as (url, session):
        status, answer = await complete(session, url)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == said(6)


@pytest.mark.parametrize(("name", "seed"), WAYS)
@pytest.mark.parametrize("fail", ["broken", "cut", "error", "abort"])
async def test_a_prefill_server_that_fails_is_avoided(directory: Path, name: str, seed: bool, fail: str) -> None:
    pair = Pair(directory, name, seed)
    pair.p.fail, pair.p.fail_role = fail, "prefill"
    second = FakeVllm(directory, name="P2", kind=CONNECTORS[name], shared=pair.p.shared)
    async with pair.run(recovery="source") as (url, session), second.serve() as other:
        if name == "BatonConnector" and not seed and fail != "broken":
            # The decode server notices by itself that no KV comes, and computes.
            pair.d.kind = "alone"
            status, answer = await complete(session, url)
            assert (status, answer["choices"][0]["token_ids"]) == (200, said(6))
            assert pair.legs() == [["prefill"], ["decode"]]
            return
        status, answer = await complete(session, url)
        # A decode server computes what a prefill server refuses.
        assert status == 200 if fail == "broken" else status >= 500, answer
        await join(session, url, other, "prefill")
        for _ in range(3):
            status, answer = await complete(session, url)
            assert (status, answer["choices"][0]["token_ids"]) == (200, said(6))


@pytest.mark.parametrize(("name", "seed"), WAYS)
@pytest.mark.parametrize("fail", ["broken", "cut", "error", "abort", "stream"])
async def test_a_stream_that_began_ends_in_an_error(directory: Path, name: str, seed: bool, fail: str) -> None:
    pair = Pair(directory, name, seed)
    pair.d.fail, pair.d.fail_role = fail, "decode"
    if fail == "broken" and name == "BatonConnector":
        pair.d.halted = "decode"  # until the prefill server's token is out
    body = {**BODY, "stream": True}
    async with (
        pair.run(recovery="none") as (url, session),
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200
        first = await response.content.readline()
        pair.d.halted = None
        rest = (await response.content.read()).decode()
    assert json.loads(first[6:])["choices"][0]["token_ids"] == said(1)
    *lines, done = [line for line in rest.split("\n\n") if line.strip()]
    assert done == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines]
    assert [list(event) for event in events] == [["error"]]
    code = {"error": "engine_error", "stream": "engine_error", "broken": "refused"}.get(fail, "engine_unavailable")
    assert events[0]["error"]["code"] == code


@pytest.mark.parametrize("way", [w for w in WAYS if w != ("BatonConnector", False)])
@pytest.mark.parametrize("fault", ["silent", "abort"])
async def test_a_request_of_one_token_goes_on_elsewhere(directory: Path, way: tuple[str, bool], fault: str) -> None:
    """Only the prefill server serves it, so only that server's silence or failure counts."""
    pair = Pair(directory, *way)
    second = FakeVllm(directory, name="P2", kind=CONNECTORS[way[0]], shared=pair.p.shared)
    timers = replace(QUICK, answer=1.5, lease=2.0)
    async with pair.run(timers=timers) as (url, session), second.serve() as other:
        await join(session, url, other, "prefill")
        if fault == "silent":
            pair.p.halted = "all"
        else:
            pair.p.fail = "abort"
        status, answer = await asyncio.wait_for(complete(session, url, max_tokens=1), 60)
        assert (status, answer["choices"][0]["token_ids"]) == (200, said(1))
        pair.p.halted = None
    assert len(second.legs("none")) == 1
    assert pair.d.legs("none") == []


async def test_an_error_of_a_decode_server_that_is_well_is_its_prefill_servers(directory: Path) -> None:
    """vLLM reports such an error if the KV could not be fetched: another prefill server is used, whatever the
    policy.
    """
    pair = Pair(directory)
    pair.d.fail, pair.d.fail_role, pair.d.step_s = "stream", "decode", 0.2
    second = FakeVllm(directory, name="P2", kind="baton", shared=pair.p.shared)
    async with pair.run() as (url, session), second.serve() as other:
        await join(session, url, other, "prefill")
        answers = [asyncio.create_task(complete(session, url, max_tokens=2)) for _ in range(2)]
        await until(lambda: len(pair.d.legs("decode")) == 2)
        await asyncio.gather(*answers)
    asked = {body["request_id"]: server.name for server in (pair.p, second) for body in server.legs("prefill")}
    retried = {name: server for name, server in asked.items() if name.endswith(".1")}
    assert len(retried) == 2
    assert all(asked[name.removesuffix(".1")] != server for name, server in retried.items())


@pytest.mark.parametrize("after", [0, 2])
async def test_a_server_that_dies_takes_all_its_ranks_with_it(directory: Path, after: int) -> None:
    """vLLM reports its engine's end as an error of each request, and its API answers for a while. No other request is
    tried there, on any rank.
    """
    pair = Pair(directory)
    pair.d.has_ranks, pair.d.fail, pair.d.fail_role, pair.d.fail_after = True, "dies", "decode", after
    async with pair.run(timers=replace(QUICK, check=60.0)) as (url, session):
        for _ in range(2):
            status, answer = await complete(session, url)
            assert (status, answer["choices"][0]["token_ids"]) == (200, said(6))
        recoveries = (await status_of(session, url))["recoveries"]
    assert len(pair.d.legs("decode")) == 1
    assert recoveries == {"full": 1}


@pytest.mark.parametrize(
    ("fail", "message"), [("error", "engine_error: the engine ended the request"), ("abort", "it gave the request up")]
)
async def test_a_prefill_leg_that_a_nixl_server_gives_up_is_an_engine_failure(
    directory: Path, fail: str, message: str
) -> None:
    pair = Pair(directory, "NixlConnector")
    pair.p.fail, pair.p.fail_role = fail, "prefill"
    async with pair.run(recovery="none") as (url, session):
        status, answer = await complete(session, url)
        assert (status, answer["error"]["message"]) == (503, f"engine (address): {message}")


async def test_a_busy_prefill_server_is_told_all_the_same(directory: Path) -> None:
    """The message may wait for its turn longer than a leg is drained."""
    pair = Pair(directory)
    pair.d.fail, pair.d.fail_role, pair.p.halted = "broken", "decode", "cancel"
    async with pair.run(recovery="none", timers=replace(QUICK, drain=0.0)) as (url, session):
        assert (await complete(session, url))[0] == 503
        await until(lambda: pair.p.legs("cancel"))
        for _ in range(5):
            await status_of(session, url)
        assert pair.p.left == []
        pair.p.halted = None


@pytest.mark.parametrize(("name", "seed"), WAYS)
@pytest.mark.parametrize("when", ["before the first token", "behind it", "in the middle"])
async def test_a_client_that_leaves_ends_both_legs(directory: Path, name: str, seed: bool, when: str) -> None:
    pair = Pair(directory, name, seed)
    async with pair.run() as (url, session):
        assert (await complete(session, url))[0] == 200  # the push connector's servers know each other now
        at_once = name == "NixlPushConnector" or (name, seed) == ("BatonConnector", False)
        if when == "before the first token":
            pair.p.step_s, pair.p.halted = 5.0, "prefill"
        else:
            pair.d.step_s = 5.0 if when == "behind it" else 0.05
        num_events = {"before the first token": 0, "behind it": 1, "in the middle": 3}[when]

        async def ask() -> None:
            async with session.post(f"{url}/v1/completions", json={**BODY, "stream": True}) as response:
                for _ in range(2 * num_events):
                    await response.content.readline()
                if num_events:
                    asked.set()
                await asyncio.sleep(60)

        asked = asyncio.Event()
        client = asyncio.create_task(ask())
        if num_events:
            await asyncio.wait_for(asked.wait(), 60)
            await until(lambda: len(pair.d.legs("decode")) == 2)
        else:
            await until(lambda: len(pair.p.legs("prefill")) == 2 and len(pair.d.legs("decode")) == 1 + at_once)
        client.cancel()
        legs = {"prefill"} if not num_events else set()
        left = legs | ({"decode"} if num_events or at_once else set())
        await until(lambda: {*pair.p.left, *pair.d.left} == left)
        state = await status_of(session, url)
        assert state["handoffs"]["aborted"] == 1
        assert [engine["num_inflight"] for engine in state["engines"]] == [0, 0]
        if name == "BatonConnector":
            await until(lambda: len(pair.p.legs("cancel")) == 1)
        pair.p.halted = None


async def test_a_client_that_leaves_while_the_decode_server_is_not_asked_yet(directory: Path) -> None:
    pair = Pair(directory, seed=True)
    pair.p.halted = "prefill"
    async with pair.run() as (url, session):
        leaving = asyncio.create_task(complete(session, url))
        await until(lambda: pair.p.legs("prefill"))
        leaving.cancel()
        await until(lambda: pair.p.legs("cancel"))
    assert pair.legs()[1] == []


@pytest.mark.parametrize(("name", "seed"), WAYS)
@pytest.mark.parametrize("penalty", [0.0, 0.5])
async def test_a_lost_decode_server_costs_no_token(directory: Path, name: str, seed: bool, penalty: float) -> None:
    """Another server continues, unless that would change the following tokens."""
    pair = Pair(directory, name, seed)
    second = FakeVllm(directory, name="D2", kind=CONNECTORS[name], shared=pair.p.shared)
    if seed and penalty:
        return
    async with pair.run() as (url, session), second.serve() as other:
        await join(session, url, other, "decode")
        pair.d.fail, pair.d.fail_after = "cut", 3
        for _ in range(2):  # they alternate
            status, answer = await complete(session, url, frequency_penalty=penalty)
            if not pair.legs()[1]:
                continue
            assert status == (503 if penalty else 200), answer
            assert penalty or answer["choices"][0]["token_ids"] == said(6)
            break
        assert pair.legs()[1]
        resumed = [body for body in second.legs("decode") if len(body["prompt"]) > len(PROMPT) + seed]
        assert bool(resumed) == (penalty == 0.0)


@pytest.mark.parametrize("seed", [False, True])
async def test_a_stream_does_not_go_on_with_a_model_that_nobody_looked_at(
    directory: Path, monkeypatch: pytest.MonkeyPatch, seed: bool
) -> None:
    """The decode server is at once another process with another model, and the router checks only once a minute."""
    monkeypatch.setattr(vllm_client, "_UNSEEN_S", 0.0)
    pair = Pair(directory, "BatonConnector", seed)
    d, complete_of = pair.d, pair.d._complete
    d.fail, d.fail_role, d.fail_after, d.started = "cut", "decode", 3, 1.0

    async def until_it_restarts(request: web.Request, body: dict[str, Any], role: str) -> web.StreamResponse:
        try:
            return await complete_of(request, body, role)
        finally:
            if role == "decode" and d.fail is not None:
                d.fail, d.name, d.started, d.fingerprint = None, "D'", 2.0, '{"model.weights": "b"}'
                d.says = {position: token_at(position) ^ 1 for position in range(100)}

    monkeypatch.setattr(d, "_complete", until_it_restarts)
    timers = replace(QUICK, check=60.0)
    body = {**BODY, "stream": True, "max_tokens": 12}
    async with (
        pair.run(timers=timers) as (url, session),
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        lines = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: {")]
        problem = (await status_of(session, url))["engines"][1]["problem"]
    events = [json.loads(line) for line in lines]
    tokens = [token for event in events for choice in event.get("choices", ()) for token in choice["token_ids"]]
    assert tokens == said(12)  # the prefill server continued alone
    assert len(d.legs("decode")) == 1
    assert "model.weights" in problem


async def test_servers_of_the_other_nixl_mode(directory: Path) -> None:
    pair = Pair(directory, "NixlPushConnector")
    pair.p.kind = pair.d.kind = "pull"
    async with pair.run() as (url, session):
        status, answer = await complete(session, url)
        assert (status, answer["error"]["code"]) == (409, "protocol_error")
        assert "hands over by pull, not by push" in answer["error"]["message"]


async def test_push_is_at_once_from_the_second_request_on(directory: Path) -> None:
    pair = Pair(directory, "NixlPushConnector")
    async with pair.run() as (url, session):
        for _ in range(3):
            assert (await complete(session, url))[0] == 200
        first, *rest = pair.d.legs("decode")
        assert first["kv_transfer_params"]["remote_block_ids"]
        assert not any("remote_block_ids" in body["kv_transfer_params"] for body in rest)
        pair.d.fail, pair.d.fail_role = "error", "decode"
        await complete(session, url)  # the address may be the reason
        pair.d.fail = None
        before = len(pair.d.legs("decode"))
        assert (await complete(session, url))[0] == 200
        assert pair.d.legs("decode")[before]["kv_transfer_params"]["remote_block_ids"]
