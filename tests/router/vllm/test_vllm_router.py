"""The router over pairs of vLLM servers: the answer of one server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from baton.errors import ConfigError, IncompatiblePeerError
from baton.router import RouterConfig, build_app
from testkit.servers.fake_serving import served, status_of, until
from testkit.servers.fake_vllm import FakeVllm, token_at
from testkit.servers.fleets import QUICK, several_answers
from testkit.servers.vllm_pair import BODY, CONNECTORS, PROMPT, WAYS, Pair, complete, said


@pytest.mark.parametrize(("name", "seed"), WAYS)
@pytest.mark.parametrize("max_tokens", [1, 2, 6])
async def test_two_servers_answer_as_one_does(directory: Path, name: str, seed: bool, max_tokens: int) -> None:
    pair, alone = Pair(directory, name, seed), FakeVllm(directory)
    body = {"max_tokens": max_tokens, "n": 2}
    async with pair.run() as (url, session):
        status, answer = await complete(session, url, **body)
        assert status == 200, answer
        async with alone.serve() as single:
            config = RouterConfig(both=(single,), engine="vllm", timers=QUICK)
            async with served(await build_app(config)) as front:
                _, expected = await complete(session, front, **body)
        for field in ("id", "created"):
            del answer[field], expected[field]
        assert answer == expected
        assert answer["choices"][0]["token_ids"] == said(max_tokens)
        assert answer["usage"] == {**answer["usage"], "prompt_tokens": 5, "completion_tokens": 2 * max_tokens}
        handoffs = (await status_of(session, url))["handoffs"]
        assert handoffs["started"] == handoffs["completed"] + handoffs["finished_early"] == 2
    assert "cancel" not in pair.legs()[0]


@pytest.mark.parametrize(("name", "seed"), WAYS)
@pytest.mark.parametrize("num_top", [None, 0, 1, 2])
async def test_chat_has_as_many_alternatives_as_were_asked_for(
    directory: Path, name: str, seed: bool, num_top: int | None
) -> None:
    """vLLM's completions contain the chosen token in addition."""
    pair = Pair(directory, name, seed)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "logprobs": True, "top_logprobs": num_top}
    async with pair.run() as (url, session):
        async with session.post(f"{url}/v1/chat/completions", json={"temperature": 0, **body}) as response:
            answer = await response.json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [num_top or 0] * 3
        assert all(entry["logprob"] == -0.5 for entry in content)


@pytest.mark.parametrize(("name", "seed"), WAYS)
async def test_a_response_is_handed_over_like_a_chat(directory: Path, name: str, seed: bool) -> None:
    pair = Pair(directory, name, seed)
    async with pair.run() as (url, session):
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6, "temperature": 0}
        async with session.post(f"{url}/v1/chat/completions", json=chat) as response:
            expected = (await response.json())["choices"][0]["message"]["content"]
        legs = [len(own) for own in pair.legs()]
        asked = {"input": "a", "max_output_tokens": 6, "temperature": 0}
        async with session.post(f"{url}/v1/responses", json=asked) as response:
            (item,) = (await response.json())["output"]
        assert item["content"][0]["text"] == expected
        assert [len(own) for own in pair.legs()] == [2 * count for count in legs]
        assert all(legs)


@pytest.mark.parametrize("seed", [False, True])
async def test_a_client_has_the_first_token_before_the_prefill_leg_has_ended(directory: Path, seed: bool) -> None:
    pair = Pair(directory, seed=seed)
    pair.p.released = asyncio.Event()
    async with (
        pair.run() as (url, session),
        session.post(f"{url}/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        first = json.loads((await asyncio.wait_for(response.content.readline(), 60.0))[6:])
        assert first["choices"][0]["token_ids"] == said(1)
        pair.p.released.set()
        rest = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
    assert [token for event in rest for one in event["choices"] for token in one["token_ids"]] == said(6)[1:]


@pytest.mark.parametrize(("name", "seed"), WAYS)
async def test_an_end_at_the_first_token_streamed(directory: Path, name: str, seed: bool) -> None:
    pair = Pair(directory, name, seed, eos_at=len(PROMPT))
    async with pair.run() as (url, session):
        async with session.post(f"{url}/v1/completions", json={**BODY, "stream": True}) as response:
            events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
        assert [c["finish_reason"] for e in events for c in e["choices"]] == ["stop"]
        if seed:  # D will fetch nothing from the prefill server
            await until(lambda: pair.p.legs("cancel"))
            cancelled = pair.p.legs("cancel")[0]["kv_transfer_params"]["baton"]["ticket"]
            assert cancelled == pair.p.legs("prefill")[0]["kv_transfer_params"]["baton"]["ticket"]
            assert pair.legs()[1] == []


@pytest.mark.parametrize(("name", "seed"), WAYS)
async def test_the_servers_sampling_defaults_are_the_routers(directory: Path, name: str, seed: bool) -> None:
    pair = Pair(directory, name, seed, defaults={"temperature": 0.5, "top_k": 20, "max_tokens": 4})
    async with pair.run() as (url, session):
        chat = {"messages": [{"role": "user", "content": "a"}], "return_token_ids": True}
        async with session.post(f"{url}/v1/chat/completions", json=chat) as response:
            assert response.status == 200, await response.text()
            assert (await response.json())["usage"]["completion_tokens"] == 4
        legs = [*pair.p.legs("prefill"), *pair.d.legs("decode")]
        assert {(body["temperature"], body["top_k"], body["top_p"]) for body in legs} == {(0.5, 20, 1.0)}
        assert len(legs) == 2


@pytest.mark.parametrize("name", CONNECTORS)
@pytest.mark.parametrize("other", [{"temperature": 0.7}, {"temperature": 0.5, "limit": 9, "max_tokens": 9}, None])
async def test_servers_with_other_sampling_defaults_are_not_equal(
    directory: Path, name: str, other: dict[str, Any] | None
) -> None:
    pair = Pair(directory, name, defaults={"temperature": 0.5})
    pair.d.defaults = other
    with pytest.raises(IncompatiblePeerError, match=r"output\.sampling_defaults"):
        async with pair.run():
            """It does not start."""


# ---------------------------------------------------------------- seeded


async def test_the_decode_server_is_sent_the_first_token(directory: Path) -> None:
    pair = Pair(directory, seed=True)
    async with pair.run() as (url, session):
        _, answer = await complete(session, url, min_tokens=4)
        assert answer["choices"][0]["token_ids"] == said(6)
        (p,), (d,) = pair.p.legs("prefill"), pair.d.legs("decode")
        assert p["kv_transfer_params"]["baton"]["seed_first_token"] is True
        assert (p["prompt"], p["max_tokens"], p["min_tokens"]) == (PROMPT, 1, 1)
        assert (d["prompt"], d["max_tokens"], d["min_tokens"]) == ([*PROMPT, token_at(5)], 5, 3)
        status, answer = await complete(session, url, temperature=1.0)
        assert status == 200
        assert pair.p.legs("prefill")[1]["seed"] != pair.d.legs("decode")[1]["seed"], "or it would draw the same noise"


@pytest.mark.parametrize(
    "asked",
    [
        {"seed": 3},
        {"stop": ["x"]},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"bad_words": ["x"]},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ],
)
async def test_parameters_that_a_seeded_first_token_rules_out_are_refused(
    directory: Path, asked: dict[str, Any]
) -> None:
    pair = Pair(directory, seed=True)
    async with pair.run() as (url, session):
        body = {"messages": [{"role": "user", "content": "a"}], **asked}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] in (*asked, "structured_outputs")
    assert pair.legs() == [[], []]


async def test_without_seeding_they_are_served(directory: Path) -> None:
    async with Pair(directory).run() as (url, session):
        assert (await complete(session, url, seed=3, stop=["x"], presence_penalty=0.5))[0] == 200


# ---------------------------------------------------------------- diverging first tokens


@pytest.mark.parametrize("name", CONNECTORS)
async def test_a_near_tie_goes_on_from_the_token_that_was_sent(directory: Path, name: str) -> None:
    pair = Pair(directory, name)
    pair.p.says = {5: 33}
    async with pair.run() as (url, session):
        status, answer = await complete(session, url)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == [33, *said(5, 6)]
        assert answer["usage"]["completion_tokens"] == 6
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 6
        assert (await status_of(session, url))["near_ties"] == 1
        async with session.get(f"{url}/metrics") as response:
            assert "baton:router_near_ties_total 1.0" in await response.text()
    measured, resumed = pair.p.legs("none")[-1], pair.d.legs("none")[-1]
    assert (measured["prompt"], measured["max_tokens"], measured["temperature"]) == (PROMPT, 1, 0.0)
    assert (resumed["prompt"], resumed["max_tokens"]) == ([*PROMPT, 33], 5)


@pytest.mark.parametrize(
    ("config", "gap", "body"),
    [
        ({"near_tie": 0.0}, 0.0, {}),
        ({}, 0.11, {}),
        ({}, 0.0, {"temperature": 0.5}),
        ({}, 0.0, {"repetition_penalty": 1.1}),
        ({}, 0.0, {"logit_bias": {"33": 1}}),
    ],
)
async def test_a_mismatch_beyond_a_near_tie_is_an_error(
    directory: Path, config: dict[str, Any], gap: float, body: dict[str, Any]
) -> None:
    pair = Pair(directory, gap=gap)
    pair.p.says = {5: 33}
    async with pair.run(**config) as (url, session):
        status, answer = await complete(session, url, **body)
        assert (status, answer["error"]["code"]) == (500, "token_mismatch")
        state = await status_of(session, url)
        assert (state["near_ties"], state["handoffs"]["failures"]) == (0, {"token_mismatch": 1})


async def test_a_token_that_the_measure_does_not_know(directory: Path) -> None:
    pair = Pair(directory)
    pair.d.says = {5: 33}
    async with pair.run() as (url, session):
        assert (await complete(session, url))[1]["error"]["code"] == "token_mismatch"


class SecondWait(asyncio.Event):
    """Lets a server's second token pass. Set when the third waits."""

    began = False

    async def wait(self) -> Literal[True]:
        if self.began:
            self.set()
            await asyncio.Event().wait()
        self.began = True
        return True


@pytest.mark.parametrize("name", ["BatonConnector", "NixlPushConnector"])
async def test_a_first_token_may_come_late(directory: Path, name: str) -> None:
    """The decode server sent the first token before the prefill server, and the client keeps its tokens."""
    pair = Pair(directory, name)
    async with pair.run() as (url, session):
        pair.d.kind = "alone"
        assert (await complete(session, url))[0] == 200  # the push connector's servers know each other now
        pair.p.says, pair.p.halted, pair.d.pause = {5: 33}, "prefill", SecondWait()
        asked = asyncio.create_task(complete(session, url))
        await until(pair.d.pause.is_set)
        await several_answers(session, url)  # the router has read both tokens
        pair.p.halted = pair.d.pause = None
        status, answer = await asked
        assert (status, answer["choices"][0]["token_ids"]) == (200, said(6))
        assert (await status_of(session, url))["near_ties"] == 1
    resumed = pair.d.legs("none")[-1]
    assert len(resumed["prompt"]) > len(PROMPT) + 1


async def test_a_measure_that_takes_too_long_is_no_excuse(directory: Path) -> None:
    pair = Pair(directory)
    pair.p.says, pair.p.halted = {5: 33}, "none"
    async with pair.run(timers=replace(QUICK, tell=0.3)) as (url, session):
        _, answer = await asyncio.wait_for(complete(session, url), QUICK.tell)
        assert answer["error"]["code"] == "token_mismatch"
        pair.p.halted = None


async def test_a_measure_that_fails_is_no_excuse(directory: Path) -> None:
    pair = Pair(directory)
    pair.p.says, pair.p.fail, pair.p.fail_role = {5: 33}, "broken", "none"
    async with pair.run() as (url, session):
        assert (await complete(session, url))[1]["error"]["code"] == "token_mismatch"


@pytest.mark.parametrize("name", CONNECTORS)
@pytest.mark.parametrize("why", ["drawn", "not computed to the end"])
async def test_a_token_that_is_not_the_requests_is_not_shown(directory: Path, name: str, why: str) -> None:
    """The decode server's token counts: it samples in a verification step, or the prefill server omitted the last
    token.
    """
    pair = Pair(directory, name, num_drafts=3 if why == "drawn" else 0)
    pair.p.says = {5: 33, 4: 33}
    if why != "drawn":
        pair.p.truncate, pair.p.num_short = True, 1
    async with pair.run() as (url, session):
        status, answer = await complete(session, url, temperature=1.0 if why == "drawn" else 0.0)
        assert (status, answer["choices"][0]["token_ids"]) == (200, said(6))


async def test_a_prompt_of_one_token_that_would_be_cut(directory: Path) -> None:
    pair = Pair(directory, truncate=True)
    async with pair.run() as (url, session):
        status, answer = await complete(session, url, prompt=[5])
        assert (status, answer["choices"][0]["token_ids"]) == (200, said(6, 1))


@pytest.mark.parametrize(("multiple", "num"), [(1, 4), (2, 2), (3, 3), (4, 0)])
async def test_a_prompt_is_cut_at_a_multiple_and_its_leg_samples_the_next_token(
    directory: Path, multiple: int, num: int
) -> None:
    """The drafter's last entry depends on that token."""
    pair = Pair(directory, truncate=True, multiple=multiple)
    async with pair.run() as (url, session):
        status, answer = await complete(session, url, presence_penalty=0.5)
        assert (status, answer["choices"][0]["token_ids"]) == (200, said(6))
        assert pair.legs() == ([["prefill"], ["decode"]] if num else [[], ["none"]])
        for leg in pair.p.legs("prefill"):
            assert (leg["prompt"], leg["allowed_token_ids"]) == (PROMPT[:num], [PROMPT[num]])
            assert (leg["max_tokens"], leg["presence_penalty"]) == (1, 0.0)


# ---------------------------------------------------------------- settings and clients


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"kv_connector": "LMCacheConnector"}, "kv_connector"),
        ({"kv_connector": "NixlConnector", "seed_first_token": True}, "seed_first_token"),
        ({"kv_connector": "NixlConnector", "allow_mode_override": True}, "allow_mode_override"),
        ({"kv_connector": "NixlPushConnector", "kv_mode": "pull"}, "kv_mode"),
        ({"engine": "baton", "seed_first_token": True}, "seed_first_token"),
        ({"prefill": ("http://127.0.0.1:1",)}, "ticket_key_file"),
    ],
)
async def test_settings_that_exclude_each_other(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        await build_app(RouterConfig(**{"engine": "vllm", **config}))


@pytest.mark.parametrize(("name", "seed"), WAYS)
async def test_hostile_params_reach_no_server(directory: Path, name: str, seed: bool) -> None:
    pair = Pair(directory, name, seed)
    hostile = [
        {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 1, "remote_block_ids": [[0]]},
        {"do_remote_decode": True},
        {"baton": {"role": "cancel", "ticket": "x"}},
        {"baton": {"role": "identify"}},
        [],
        "x",
    ]
    async with pair.run() as (url, session):
        for params in hostile:
            status, answer = await complete(session, url, kv_transfer_params=params)
            assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")
            status, answer = await complete(session, url, vllm_xargs={"kv_transfer_params": params})
            assert (status, answer["error"]["param"]) == (400, "vllm_xargs")
        assert pair.legs() == [[], []]
        status, answer = await complete(
            session, url, kv_transfer_params=None, extra_body={"kv_transfer_params": hostile[0]}
        )
        assert (status, answer["choices"][0]["token_ids"]) == (200, said(6))
        assert "10.0.0.1" not in str(pair.p.asked + pair.d.asked)
