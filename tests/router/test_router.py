"""The router over fake prefill and decode engines: answers of one engine, and every kind of failure."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.errors import IncompatiblePeerError, RequestError
from baton.handoff.protocol import ticket as tickets
from baton.openai.http.serving import url_of
from baton.router import RouterConfig, build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import (
    ADMIN,
    KEY,
    TEXT,
    FakeEngine,
    complete,
    join,
    served,
    status_of,
    until,
)
from testkit.servers.fleets import Setup, engines


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 40])
async def test_two_legs_answer_as_one_engine_does(directory: Path, max_tokens: int) -> None:
    setup = Setup(directory)
    alone = FakeEngine(directory)
    body = {"max_tokens": max_tokens, "seed": 3, "logprobs": 1, "return_token_ids": True, "n": 2}
    async with setup.run() as (url, session):
        status, answer = await complete(session, url, **body)
        assert status == 200
        async with engines(directory, alone) as (single,):
            _, expected = await complete(session, single, **body)
        for name in ("id", "created"):
            del answer[name], expected[name]
        assert answer == expected
        tickets_seen = {r.handoff.ticket for r in setup.prefill.requests if r.handoff}
        assert tickets_seen == {r.handoff.ticket for r in setup.decode.requests if r.handoff}
        assert len(tickets_seen) == 2, "one ticket per sample"
        await until(lambda: setup.decode.running == 0 and setup.prefill.running == 0)
        handoffs = (await status_of(session, url))["handoffs"]
        assert handoffs["started"] == 2
        assert handoffs["finished_early" if max_tokens == 1 else "completed"] == 2
        assert handoffs["active"] == handoffs["aborted"] == handoffs["failed"] == 0


async def test_the_first_token_does_not_wait_for_the_handoff(directory: Path) -> None:
    setup = Setup(directory)
    setup.prefill.step_s = 30.0  # it hands over only after this
    async with setup.run() as (url, session):
        body = {"prompt": "a", "max_tokens": 9, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            line = await asyncio.wait_for(response.content.readline(), 60.0)
            assert json.loads(line.removeprefix(b"data: "))["choices"][0]["text"] == "T"
            await until(lambda: setup.decode.running == 1)  # its leg begins after the token
        await until(lambda: setup.decode.outcomes["aborted"] == 1 and setup.prefill.outcomes["aborted"] == 1)


@pytest.mark.parametrize("stop", ["T", "Th", "The q"])
async def test_stop_strings_span_the_legs(directory: Path, stop: str) -> None:
    setup = Setup(directory, step_s=0.001)
    async with setup.run() as (url, session):
        _, answer = await complete(session, url, stop=stop, max_tokens=60)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        assert answer["usage"]["completion_tokens"] == len(stop)
        await until(lambda: setup.decode.running == 0 and setup.prefill.running == 0)


async def test_chat_and_characters_over_the_legs(directory: Path) -> None:
    setup = Setup(directory)
    setup.prefill.tokens = setup.decode.tokens = Tokenizer.load(directory).encode("你好. ")
    async with setup.run() as (url, session):
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "stream": True}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            lines = [line for line in (await response.text()).split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        texts = [json.loads(line[6:])["choices"][0]["delta"]["content"] for line in lines[:-1]]
        assert "".join(texts) == "你好. "


async def test_ticket_names_both_engines(directory: Path) -> None:
    setup = Setup(directory)
    async with setup.run(kv_mode="pull", allow_mode_override=True) as (url, session):
        await complete(session, url)
        await complete(session, url, kv_mode="push")
        handoffs = [r.handoff for r in setup.decode.requests if r.handoff is not None]
        modes = [tickets.verify_ticket(KEY, handoff.ticket, "decode", setup.decode.info.clock) for handoff in handoffs]
        assert [t.mode for t in modes] == ["pull", "push"]
        assert {t.prefill_engine for t in modes} == {"prefill-engine"}
        assert len({t.transfer_id for t in modes}) == 2
        assert setup.decode.requests[0].sampling_params == setup.prefill.requests[0].sampling_params


async def test_mode_override_is_off_by_default(directory: Path) -> None:
    async with Setup(directory).run() as (url, session):
        status, answer = await complete(session, url, kv_mode="pull")
        assert (status, answer["error"]["param"]) == (400, "kv_mode")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_handoff_is_an_error_with_its_reason(directory: Path, stream: bool) -> None:
    setup = Setup(directory)
    setup.decode.fail = "handoff"
    setup.prefill.step_s = 0.2
    async with setup.run() as (url, session):
        body = {"prompt": "a", "max_tokens": 9, "stream": stream}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            text = await response.text()
        assert "handoff_timeout" in text
        assert text.rstrip().endswith("data: [DONE]") is stream
        if not stream:
            assert response.status == 500
        await until(lambda: setup.prefill.running == 0)
        handoffs = (await status_of(session, url))["handoffs"]
        assert handoffs["failures"] == {"handoff_timeout": 1}


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_engine_bug_in_either_leg_fails_the_request(directory: Path, leg: str) -> None:
    setup = Setup(directory, fail="mid-stream") if leg == "decode" else Setup(directory)
    if leg == "prefill":
        setup.prefill.handed = {}  # the legs never meet, and the prefill leg is then refused its ticket
        setup.prefill.fail = "refuse"
    async with setup.run() as (url, session):
        status, answer = await complete(session, url, max_tokens=60)
        assert status == (400 if leg == "prefill" else 500), answer
        await until(lambda: setup.decode.running == 0 and setup.prefill.running == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_no_engine_can_compute_is_a_400_and_tried_once(directory: Path, stream: bool) -> None:
    setup = Setup(directory)
    setup.prefill.fail = "nothing left"
    async with setup.run() as (url, session):
        status, answer = await complete(session, url, max_tokens=9, stream=stream)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert (answer["error"]["param"], answer["error"]["message"]) == ("bad_words", "no token is left")
        await until(lambda: setup.prefill.running == setup.decode.running == 0)
        assert len(setup.prefill.requests) == 1
        assert len(setup.decode.requests) <= 1  # its leg waits for a token


@pytest.mark.parametrize("fail", ["nothing left", "refuse"])
async def test_what_clients_do_wrong_raises_no_alarm(directory: Path, fail: str) -> None:
    """Five failed requests of the last twenty are one, and each failed handoff is counted for operators."""
    setup = Setup(directory)
    setup.prefill.fail = fail
    async with setup.run() as (url, session):
        statuses = [(await complete(session, url, max_tokens=9))[0] for _ in range(6)]
        assert statuses == [400] * 6
        state = await status_of(session, url)
        assert state["alarms"] == []
        assert (state["handoffs"]["failed"], state["handoffs"]["aborted"], state["handoffs"]["failures"]) == (0, 6, {})


async def test_client_disconnect_closes_both_legs(directory: Path) -> None:
    setup = Setup(directory, step_s=0.02)
    async with setup.run() as (url, session):
        body = {"prompt": "a", "max_tokens": 200, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            for _ in range(6):
                await response.content.readline()
        await until(lambda: setup.decode.outcomes["aborted"] == 1)
        assert setup.prefill.outcomes["handed over"] == 1
        await until(lambda: setup.decode.running == 0)
        assert (await status_of(session, url))["handoffs"]["aborted"] == 1


async def test_engines_that_are_down(directory: Path) -> None:
    with socket.socket() as dead:  # it holds the port, and does not listen
        dead.bind(("127.0.0.1", 0))
        dead_url = url_of(dead)
        app = await build_app(RouterConfig(prefill=(dead_url,), decode=(), ticket_key=KEY, tokenizer=str(directory)))
        async with served(app) as url, aiohttp.ClientSession() as session:
            status, answer = await complete(session, url)
            assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
            assert "127.0.0.1" not in answer["error"]["message"]
            assert dead_url.rpartition(":")[2] not in answer["error"]["message"]
            async with session.get(f"{url}/health") as response:
                assert response.status == 503
            state = await status_of(session, url)
            assert state["ready"] is False
            assert state["engines"][0]["healthy"] is False
            assert state["engines"][0]["load"] is None


async def test_a_dead_engine_is_avoided_and_the_request_retried(directory: Path) -> None:
    setup = Setup(directory)
    second = FakeEngine(directory, role="prefill", handed=setup.prefill.handed)
    async with setup.run() as (url, session), engines(directory, second) as (other,):
        await join(session, url, other, "prefill")
        setup.prefill.fail = "down"
        for _ in range(4):
            status, answer = await complete(session, url, max_tokens=12)
            assert (status, answer["choices"][0]["text"]) == (200, TEXT[:12])
        assert len(second.requests) == 4


async def test_engines_join_and_leave(directory: Path) -> None:
    setup = Setup(directory)
    both = FakeEngine(directory)
    async with setup.run() as (url, session), engines(directory, both) as (third,):

        async def change(what: str, **body: str) -> tuple[int, Any]:
            async with session.post(f"{url}/instances/{what}", json=body, headers=ADMIN) as response:
                return response.status, await response.json()

        status, _ = await change("add", url=third, role="decode")
        assert status == 400, "its role is another"
        status, described = await change("add", url=third, role="both")
        assert (status, described["healthy"]) == (200, True)
        assert (await change("add", url=third + "/", role="both"))[0] == 400, "it is there already"
        assert (await change("add", url="ftp://x", role="both"))[0] == 400
        assert (await change("add", url=third, role="king"))[0] == 400
        assert (await change("remove", url="http://127.0.0.1:1"))[0] == 400
        assert (await change("remove", url=setup.urls[0]))[0] == 200
        status, answer = await complete(session, url, max_tokens=6)
        assert answer["choices"][0]["text"] == TEXT[:6]
        assert len(both.requests) == 1, "without a pair, requests go whole to an engine that does both"
        assert both.requests[0].handoff is None
        assert [e["role"] for e in (await status_of(session, url))["engines"]] == ["decode", "both"]
        assert (await change("remove", url=third))[0] == 200
        assert (await complete(session, url, max_tokens=6))[1]["choices"][0]["text"] == TEXT[:6], "by the other alone"
        assert (await change("remove", url=setup.urls[1]))[0] == 200
        assert (await complete(session, url))[0] == 503


async def test_engines_of_another_model_are_refused(directory: Path) -> None:
    mine = FakeEngine(directory, role="prefill")
    other = FakeEngine(directory, role="decode", fingerprint='{"weights": "b"}')
    async with engines(directory, mine, other) as (p, d):
        with pytest.raises(IncompatiblePeerError, match=r"weights: here 'a', peer 'b'"):
            await build_app(RouterConfig(prefill=(p,), decode=(d,), ticket_key=KEY))
        with pytest.raises(RequestError, match="has role 'prefill'"):
            await build_app(RouterConfig(decode=(p,), ticket_key=KEY))


async def test_choice_of_engines(directory: Path) -> None:
    handed: dict[bytes, asyncio.Future[str]] = {}
    prefill = FakeEngine(directory, role="prefill", handed=handed)
    decodes = [FakeEngine(directory, role="decode", handed=handed, step_s=0.02) for _ in range(2)]
    async with engines(directory, prefill, *decodes) as (p, *d):
        for policy in ("round_robin", "least_loaded", "cache_aware", "power_of_two"):
            config = RouterConfig(prefill=(p,), decode=tuple(d), ticket_key=KEY, policy=policy)
            for engine in decodes:
                engine.requests.clear()
            async with served(await build_app(config)) as url, aiohttp.ClientSession() as session:
                # Long enough to outlast the others on a machine that is slow for a while.
                long = asyncio.create_task(complete(session, url, max_tokens=240))
                await until(lambda: sum(e.running for e in decodes) == 1)
                busy = next(i for i, e in enumerate(decodes) if e.running)
                for _ in range(4):
                    await complete(session, url, max_tokens=2)
                assert not long.done()
                long.cancel()
            counts = [len(e.requests) for e in decodes]
            assert counts[busy] == (3 if policy == "round_robin" else 1), policy
            await until(lambda: not any(e.running for e in decodes))


async def test_router_metrics(directory: Path) -> None:
    async with Setup(directory).run() as (url, session):
        await complete(session, url, max_tokens=7)
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()
        assert 'baton:router_handoffs_total{outcome="completed"} 1.0' in text
        assert "baton:time_to_first_token_seconds_count 1.0" in text
        assert 'role="decode"' in text
        # The engines' metrics, with engine names; what the router measures itself appears once.
        for role in ("prefill", "decode"):
            assert f'baton:fake_pages{{engine="{role}-engine",role="{role}"}} 7.0' in text
        assert text.count("# TYPE baton:fake_pages ") == 1
        assert text.count("vllm:time_to_first_token_seconds_count") == 1
        assert 'vllm:generation_tokens_total{model_name="fake"} 7.0' in text
        assert "_created" not in text
