"""A stream stays with the model that began it, and a pool with the model that it served first."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from baton.cli.serve import loading_ahead
from baton.comparison import PROCESSOR, token_identity
from baton.errors import CheckpointError
from baton.event_loop import timeout
from testkit.servers.fake_serving import ADMIN, FakeEngine, join, served, status_of, until
from testkit.servers.fleets import BODY, SILENT, Cluster, complete, expected_answer

OTHER_TEXT = "Quite another model says quite other things, at any length that is wanted. "


def restart(engine: FakeEngine, **info: Any) -> None:
    """From now on another process, with other settings, is at this URL."""
    engine.fail = None
    engine.info = msgspec.structs.replace(engine.info, incarnation=engine.info.incarnation + "'", **info)


def other_weights(engine: FakeEngine) -> None:
    restart(engine, fingerprint='{"weights": "b"}')
    engine.tokens = [token ^ 1 for token in engine.tokens]
    engine.takes_any = True


async def problem_of(session: aiohttp.ClientSession, url: str, number: int) -> str:
    found: str | None = (await status_of(session, url))["engines"][number]["problem"]
    return found or ""


async def wait_for_problem(session: aiohttp.ClientSession, url: str, number: int, text: str) -> None:
    for _ in range(6000):
        if text in await problem_of(session, url, number):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(await problem_of(session, url, number))


async def stream(session: aiohttp.ClientSession, url: str, **body: Any) -> tuple[list[int], str | None]:
    """Token ids of a streamed answer, and the error that ended it."""
    async with session.post(f"{url}/v1/completions", json={**BODY, "stream": True, **body}) as response:
        events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
    tokens = [token for event in events for choice in event.get("choices", ()) for token in choice["token_ids"]]
    errors = [event["error"]["message"] for event in events if "error" in event]
    return tokens, errors[0] if errors else None


async def test_a_stream_never_goes_on_with_another_model(directory: Path) -> None:
    """D restarts with other weights, P continues alone and dies: only D is left, and must not be used."""
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    p, d = cluster.prefills[0], cluster.decodes[0]
    d.fail, d.when_lost = "lost", lambda: other_weights(d)
    p.fail, p.fail_after, p.when_lost = "dies", 20, lambda: cluster.stop(p)
    async with cluster.run(timers=SILENT) as (url, session):
        expected = (await expected_answer(directory, session, max_tokens=60))["choices"][0]["token_ids"]
        tokens, error = await stream(session, url, max_tokens=60)
        assert tokens == expected[: len(tokens)]
        assert 20 < len(tokens) < 60
        assert "weights: here 'a', peer 'b'" in await problem_of(session, url, 1)
        assert error is not None
        # A new request does not get the other model under the first one's name either.
        assert (await complete(session, url))[0] == 503
        assert len(d.requests) == 1


async def test_an_operator_changes_what_is_served(directory: Path) -> None:
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    async with cluster.run(admin_token="t" * 32) as (url, session):
        before = (await complete(session, url))[1]["choices"][0]["token_ids"]
        for engine in (*cluster.prefills, *cluster.decodes):
            other_weights(engine)
        for number in range(2):
            await wait_for_problem(session, url, number, "weights")
        async with session.post(f"{url}/instances/rebind", json={}) as response:
            assert response.status == 401
        assert (await complete(session, url))[0] == 503
        async with session.post(f"{url}/instances/rebind", json={}, headers=ADMIN) as response:
            assert response.status == 200, await response.text()
        after = (await complete(session, url))[1]["choices"][0]["token_ids"]
        assert after == [token ^ 1 for token in before]


async def test_a_stream_that_runs_while_an_operator_changes_the_model_keeps_its_own(directory: Path) -> None:
    cluster = Cluster(directory, num_prefill=1, num_decode=2)
    old, new = cluster.decodes
    old.fail, old.fail_after = "lost", 20
    going_on = asyncio.Event()
    async with cluster.run(admin_token="t" * 32) as (url, session):
        old.pause = going_on
        running = asyncio.create_task(stream(session, url, max_tokens=60))
        await until(lambda: old.running)
        for engine in (*cluster.prefills, new):
            other_weights(engine)
        async with session.post(f"{url}/instances/remove", json={"url": (await urls(session, url))[1]}, headers=ADMIN):
            pass
        async with session.post(f"{url}/instances/rebind", json={}, headers=ADMIN) as response:
            assert response.status == 200
        going_on.set()
        tokens, error = await running
        assert error is not None
        assert "began with" in error
        single = (await expected_answer(directory, session, max_tokens=60))["choices"][0]["token_ids"]
        assert tokens == single[: len(tokens)]


async def urls(session: aiohttp.ClientSession, url: str) -> list[str]:
    return [engine["url"] for engine in (await status_of(session, url))["engines"]]


async def test_engines_on_other_processors_are_told_once_and_used(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    for engine, processor in ((cluster.prefills[0], "icelake AVX512"), (cluster.decodes[0], "znver3 AVX2")):
        facts = {**json.loads(engine.info.fingerprint), PROCESSOR: processor}
        engine.info = msgspec.structs.replace(engine.info, fingerprint=json.dumps(facts))
    async with cluster.run() as (url, session):
        assert (await complete(session, url))[0] == 200
        assert [engine["problem"] for engine in (await status_of(session, url))["engines"]] == [None, None]
    assert len([message for message in caplog.messages if "may round differently" in message]) == 1


async def test_the_same_settings_in_a_new_process_are_welcome(directory: Path) -> None:
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    engine = cluster.decodes[0]
    engine.fail, engine.when_lost = "lost", lambda: restart(engine)
    async with cluster.run() as (url, session):
        tokens, error = await stream(session, url)
        assert error is None
        assert len(engine.requests) > 1
        assert tokens == (await expected_answer(directory, session))["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"fingerprint": '{"weights": "a", "output.eos_token_ids": "[7]"}'}, "output.eos_token_ids"),
        ({"max_model_len": 40}, "max_model_len"),
        ({"default_seed": 5}, "default_seed"),
        ({"vocab_size": 259}, "vocab_size"),
        ({"model": "another"}, "model"),
    ],
)
async def test_an_engine_that_would_end_outputs_elsewhere_is_refused_by_name(
    directory: Path, settings: dict[str, Any], named: str
) -> None:
    cluster = Cluster(directory, num_prefill=1, num_decode=1)
    async with cluster.run() as (url, session):
        assert (await complete(session, url))[0] == 200
        for engine in (*cluster.prefills, *cluster.decodes):  # no agreeing engine is left
            restart(engine, **settings)
        for number in range(2):
            await wait_for_problem(session, url, number, named)
        assert (await complete(session, url))[0] == 503


async def test_before_the_first_request_a_pool_takes_what_comes(directory: Path) -> None:
    cluster = Cluster(directory, num_prefill=0, num_decode=1)
    async with cluster.run(settled=False) as (url, session):
        other_weights(cluster.decodes[0])
        async with timeout(60):
            while (await complete(session, url))[0] != 200:
                await asyncio.sleep(0.01)


async def test_a_longer_request_does_not_go_to_an_engine_with_a_shorter_context(directory: Path) -> None:
    cluster, both = Cluster(directory, num_prefill=1, num_decode=1), FakeEngine(directory)
    both.info = msgspec.structs.replace(both.info, max_model_len=16)
    async with cluster.run(admin_token="t" * 32) as (url, session), served(cluster.app(both)) as small:
        # It joins before anything is served, so the pool takes over its context length.
        await join(session, url, small, "both")
        status, answer = await complete(session, url)
        assert status == 400
        assert "16" in answer["error"]["message"]


def test_drafts_decide_tokens_only_where_a_rejection_sampler_takes_them() -> None:
    def identity(**facts: str) -> str:
        return token_identity(json.dumps({"model.weights": "a", **facts}))

    drafting = {"drafter.method": "eagle", "drafter.weights": "x", "group.draft": "g"}
    coupled = {**drafting, "drafter.verifier": "coupled"}
    assert (
        identity(**coupled) == identity(**{**coupled, "drafter.weights": "y"}) == identity(**{"drafter.method": "none"})
    )
    rejection = {**drafting, "drafter.verifier": "rejection"}
    assert identity(**rejection) != identity(**{**rejection, "drafter.weights": "y"})
    assert identity(**drafting) != identity(**{**drafting, "drafter.weights": "y"})  # vLLM reports no verifier
    assert identity(**coupled) != identity(**{**coupled, "model.weights": "b"})
    assert token_identity("not JSON") != token_identity("nor this")


async def test_a_tokenizer_may_be_loaded_ahead_and_is_loaded_anew_later(directory: Path) -> None:
    load = loading_ahead(str(directory), {"chat_template": "{{ messages[0].content }}"})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load(str(directory / "other"))
    async with Cluster(directory, num_prefill=1, num_decode=1).run(load_tokenizer=load) as (url, session):
        assert (await complete(session, url))[0] == 200
    assert load(str(directory)).apply_chat_template([{"role": "user", "content": "a"}]) == "a"
