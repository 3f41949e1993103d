"""The router over pairs of vLLM servers: the answer of one server, and every way to go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_serving import KEY, served, until, write_tokenizer
from fake_vllm import FakeVllm, Kind, Shared, token_at

from baton.errors import ConfigError
from baton.router import RouterConfig, build_app
from baton.router.timers import RouterTimers

QUICK = RouterTimers(check=0.05, answer=0.3, lease=0.4, patience=0.3)
CONNECTORS: dict[str, Kind] = {"BatonConnector": "baton", "NixlConnector": "pull", "NixlPushConnector": "push"}
WAYS = [(name, False) for name in CONNECTORS] + [("BatonConnector", True)]
PROMPT = [10, 11, 12, 13, 14]
BODY = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 1, "return_token_ids": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


class Pair:
    """A prefill and a decode server behind a router."""

    def __init__(self, directory: Path, name: str = "BatonConnector", seed: bool = False, **both: Any) -> None:
        shared = Shared()
        self.name, self.seed = name, seed
        self.p, self.d = (
            FakeVllm(directory, name=name_, kind=CONNECTORS[name], shared=shared, **both) for name_ in ("P", "D")
        )

    @contextlib.asynccontextmanager
    async def run(self, **config: Any) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
        async with contextlib.AsyncExitStack() as stack:
            self.urls = [await stack.enter_async_context(server.serve()) for server in (self.p, self.d)]
            settings = RouterConfig(
                prefill=(self.urls[0],),
                decode=(self.urls[1],),
                engine="vllm",
                kv_connector=self.name,
                seed_first_token=self.seed,
                **{"ticket_key": KEY, "timers": QUICK, **config},
            )
            url = await stack.enter_async_context(served(await build_app(settings)))
            yield url, await stack.enter_async_context(aiohttp.ClientSession())

    def legs(self) -> list[list[str]]:
        """Roles of the requests that each server was sent, questions about itself apart."""
        return [[r for r in map(s._role, s.asked) if r != "identify"] for s in (self.p, self.d)]


async def complete(session: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, Any]:
    async with session.post(f"{url}/v1/completions", json={**BODY, **body}) as response:
        return response.status, await response.json()


async def status_of(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(f"{url}/status") as response:
        return await response.json()


def said(num: int, start: int = len(PROMPT)) -> list[int]:
    return [token_at(position) for position in range(start, start + num)]


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
async def test_an_end_at_the_first_token_streamed(directory: Path, name: str, seed: bool) -> None:
    pair = Pair(directory, name, seed, eos_at=len(PROMPT))
    async with pair.run() as (url, session):
        async with session.post(f"{url}/v1/completions", json={**BODY, "stream": True}) as response:
            events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
        assert [c["finish_reason"] for e in events for c in e["choices"]] == ["stop"]
        if seed:  # nobody will come for what the prefill server holds
            await until(lambda: pair.p.legs("cancel"))
            cancelled = pair.p.legs("cancel")[0]["kv_transfer_params"]["baton"]["ticket"]
            assert cancelled == pair.p.legs("prefill")[0]["kv_transfer_params"]["baton"]["ticket"]
            assert pair.legs()[1] == []


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
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"tools": [{"type": "function"}]},
    ],
)
async def test_what_a_seeded_request_cannot_have(directory: Path, asked: dict[str, Any]) -> None:
    pair = Pair(directory, seed=True)
    async with pair.run() as (url, session):
        body = {"messages": [{"role": "user", "content": "a"}], **asked}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == next(iter(asked))
    assert pair.legs() == [[], []]


async def test_without_seeding_they_are_served(directory: Path) -> None:
    async with Pair(directory).run() as (url, session):
        assert (await complete(session, url, seed=3, stop=["x"], presence_penalty=0.5))[0] == 200


# ---------------------------------------------------------------- first tokens that differ


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
async def test_what_is_no_near_tie_is_an_error(
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


async def test_a_measure_that_fails_is_no_excuse(directory: Path) -> None:
    pair = Pair(directory)
    pair.p.says, pair.p.fail, pair.p.fail_role = {5: 33}, "broken", "none"
    async with pair.run() as (url, session):
        assert (await complete(session, url))[1]["error"]["code"] == "token_mismatch"


@pytest.mark.parametrize("name", CONNECTORS)
@pytest.mark.parametrize("why", ["drawn", "not computed to the end"])
async def test_a_token_that_is_not_the_requests_is_not_shown(directory: Path, name: str, why: str) -> None:
    """The decode server's counts: it draws in a verification step, or the prefill server left out the last token."""
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


# ---------------------------------------------------------------- servers that fail


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


@pytest.mark.parametrize(("name", "seed"), WAYS)
@pytest.mark.parametrize("fail", ["broken", "cut", "error"])
async def test_a_decode_server_that_fails_changes_no_token(directory: Path, name: str, seed: bool, fail: str) -> None:
    pair = Pair(directory, name, seed)
    pair.d.fail, pair.d.fail_role = fail, "decode"
    async with pair.run() as (url, session):
        status, answer = await complete(session, url)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == said(6)


@pytest.mark.parametrize(("name", "seed"), WAYS)
@pytest.mark.parametrize("fail", ["broken", "cut", "error"])
async def test_a_prefill_server_that_fails_is_avoided(directory: Path, name: str, seed: bool, fail: str) -> None:
    pair = Pair(directory, name, seed)
    pair.p.fail, pair.p.fail_role = fail, "prefill"
    second = FakeVllm(directory, name="P2", kind=CONNECTORS[name], shared=pair.p.shared)
    async with pair.run(recovery="source") as (url, session), second.serve() as other:
        if name == "BatonConnector" and not seed and fail != "broken":
            # The decode server notices by itself that nothing comes, and computes.
            pair.d.kind = "alone"
            status, answer = await complete(session, url)
            assert (status, answer["choices"][0]["token_ids"]) == (200, said(6))
            assert pair.legs() == [["prefill"], ["decode"]]
            return
        status, answer = await complete(session, url)
        assert status >= 500, answer
        async with session.post(f"{url}/instances/add", json={"url": other, "role": "prefill"}) as response:
            assert response.status == 200, await response.text()
        for _ in range(3):
            status, answer = await complete(session, url)
            assert (status, answer["choices"][0]["token_ids"]) == (200, said(6))


async def test_a_client_that_leaves_while_the_decode_server_is_not_asked_yet(directory: Path) -> None:
    pair = Pair(directory, seed=True)
    pair.p.step_s = 0.5
    async with pair.run() as (url, session):
        leaving = asyncio.create_task(complete(session, url))
        await until(lambda: pair.p.legs("prefill"))
        leaving.cancel()
        await until(lambda: pair.p.legs("cancel"))
    assert pair.legs()[1] == []


@pytest.mark.parametrize(("name", "seed"), WAYS)
@pytest.mark.parametrize("penalty", [0.0, 0.5])
async def test_a_lost_decode_server_costs_no_token(directory: Path, name: str, seed: bool, penalty: float) -> None:
    """Another goes on, unless that would change what follows."""
    pair = Pair(directory, name, seed)
    second = FakeVllm(directory, name="D2", kind=CONNECTORS[name], shared=pair.p.shared)
    if seed and penalty:
        return
    async with pair.run() as (url, session), second.serve() as other:
        async with session.post(f"{url}/instances/add", json={"url": other, "role": "decode"}) as response:
            assert response.status == 200, await response.text()
        pair.d.fail, pair.d.fail_after = "cut", 3
        for _ in range(2):  # they take turns
            status, answer = await complete(session, url, frequency_penalty=penalty)
            if not pair.legs()[1]:
                continue
            assert status == (503 if penalty else 200), answer
            assert penalty or answer["choices"][0]["token_ids"] == said(6)
            break
        assert pair.legs()[1]
        resumed = [body for body in second.legs("decode") if len(body["prompt"]) > len(PROMPT) + seed]
        assert bool(resumed) == (penalty == 0.0)


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


# ---------------------------------------------------------------- settings and clients


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"kv_connector": "LMCacheConnector"}, "kv_connector"),
        ({"kv_connector": "NixlConnector", "seed_first_token": True}, "seed_first_token"),
        ({"kv_connector": "NixlConnector", "allow_mode_override": True}, "allow_mode_override"),
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
        assert pair.legs() == [[], []] or name != "BatonConnector"
        assert not any("remote_host" in (b["kv_transfer_params"] or {}) for b in pair.p.asked + pair.d.asked)
        status, answer = await complete(session, url, kv_transfer_params=None)
        assert (status, answer["choices"][0]["token_ids"]) == (200, said(6))
