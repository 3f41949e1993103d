"""The OpenAI API over one engine: the official client, with and without streaming, and errors in OpenAI's format."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from baton.server import build_app
from baton.text import Tokenizer
from testkit.servers.fake_serving import EOS, MAX_MODEL_LEN, TEXT, FakeEngine, K, served, until


class Endpoint:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.tokenizer = Tokenizer.load(engine.info.model_path)
        self.app = build_app(engine, self.tokenizer)

    async def post(self, session: aiohttp.ClientSession, path: str, body: Any, url: str) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with session.post(url + path, data=data) as response:
            return response.status, await response.json()


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def test_completion_by_the_official_client(directory: Path) -> None:
    endpoint = Endpoint(FakeEngine(directory))
    async with served(endpoint.app) as url, client_of(url) as client:
        models = await client.models.list()
        assert [m.id for m in models.data] == ["fake"]
        answer = await client.completions.create(
            model="fake", prompt="Say:", max_tokens=14, logprobs=2, temperature=0.5, seed=9
        )
        choice = answer.choices[0]
        assert choice.text == TEXT[:14]
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == list(TEXT[:14])
        assert choice.logprobs.text_offset == list(range(14))
        assert choice.logprobs.token_logprobs == [-0.5] * 14
        assert choice.logprobs.top_logprobs is not None
        assert set(choice.logprobs.top_logprobs[0].values()) == {-0.5, -1.5}
        by_id = await client.completions.create(
            model="fake", prompt="Say:", max_tokens=2, logprobs=2, extra_body={"return_tokens_as_token_ids": True}
        )
        assert by_id.choices[0].logprobs is not None
        names = [f"token_id:{i}" for i in endpoint.engine.tokens[:2]]
        assert by_id.choices[0].logprobs.tokens == names
        assert by_id.choices[0].logprobs.text_offset == [0, 1]
        assert all(name in (by_id.choices[0].logprobs.top_logprobs or [])[i] for i, name in enumerate(names))
        usage = answer.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 14, 18)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 1
        details = usage.completion_tokens_details
        assert details is not None
        # 13 tokens after the first, three per round: five rounds of two drafts, one fewer than allowed.
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (10, 0)
        assert endpoint.engine.requests[0].sampling_params.seed == 9


async def test_streamed_completion_with_usage(directory: Path) -> None:
    endpoint = Endpoint(FakeEngine(directory))
    async with served(endpoint.app) as url, client_of(url) as client:
        stream = await client.completions.create(
            model="fake", prompt="Say:", max_tokens=50, stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]
        assert "".join(e.choices[0].text for e in events[:-1]) == endpoint.tokenizer.decode(endpoint.engine.tokens[:50])
        assert "\N{REPLACEMENT CHARACTER}" not in events[5].choices[0].text
        assert [e.choices[0].finish_reason for e in events[:-1]] == [None] * (len(events) - 2) + ["length"]
        assert events[-1].choices == []
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens == 50
        assert len({e.id for e in events}) == 1


async def test_chat_streaming_and_not(directory: Path) -> None:
    endpoint = Endpoint(FakeEngine(directory, length=10))
    async with served(endpoint.app) as url, client_of(url) as client:
        messages: Any = [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "runs?"}],
            },
        ]
        answer = await client.chat.completions.create(model="fake", messages=messages, logprobs=True, top_logprobs=1)
        assert answer.choices[0].message.content == TEXT[:9], "EOS is counted, not spelt"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 10
        content = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
        assert content is not None
        assert [entry.token for entry in content] == [*TEXT[:9], "<eos>"]
        assert content[0].top_logprobs[0].bytes == [ord("T")]
        prompt = endpoint.tokenizer.decode(endpoint.engine.requests[-1].prompt_token_ids, False)
        assert prompt == "<bos><system>Be brief.\n<user>Who \nruns?\n<assistant>"
        limit = MAX_MODEL_LEN - len(endpoint.engine.requests[-1].prompt_token_ids)
        assert endpoint.engine.requests[-1].sampling_params.max_tokens == limit
        stream = await client.chat.completions.create(
            model="fake", messages=messages, stream=True, max_completion_tokens=7
        )
        events = [event async for event in stream]
        assert events[0].choices[0].delta.role == "assistant"
        assert "".join(e.choices[0].delta.content or "" for e in events) == TEXT[:7]
        assert events[-1].choices[0].finish_reason == "length"


async def test_several_choices_and_prompts(directory: Path) -> None:
    endpoint = Endpoint(FakeEngine(directory, step_s=0.001))
    async with served(endpoint.app) as url, client_of(url) as client:
        answer = await client.completions.create(model="fake", prompt=["a", "bcd"], n=3, max_tokens=5)
        assert [c.index for c in answer.choices] == list(range(6))
        assert [c.text for c in answer.choices] == [TEXT[i : i + 5] for i in (0, 1, 2)] * 2
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 30)
        seeds = [r.sampling_params.seed for r in endpoint.engine.requests]
        indices = [r.sampling_params.sample_index for r in endpoint.engine.requests]
        assert indices == [0, 1, 2] * 2
        assert len(set(seeds[:3])) == 1, "one seed for the samples of a prompt"
        assert seeds[0] is not None
        assert len({r.request_id for r in endpoint.engine.requests}) == 6
        stream = await client.completions.create(model="fake", prompt="a", n=2, max_tokens=6, stream=True)
        texts = ["", ""]
        async for event in stream:
            texts[event.choices[0].index] += event.choices[0].text
        assert texts == [TEXT[:6], TEXT[1:7]]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(directory: Path, session: aiohttp.ClientSession, stream: bool) -> None:
    # "quick" ends within a step of three tokens: tokens and rounds after it do not count.
    endpoint = Endpoint(FakeEngine(directory, step_s=0.001))
    async with served(endpoint.app) as url, client_of(url) as client:
        extra: Any = {"return_token_ids": True}
        if stream:
            events = [
                e
                async for e in await client.completions.create(
                    model="fake",
                    prompt="a",
                    stop=["zzz", "quick"],
                    max_tokens=60,
                    stream=True,
                    extra_body=extra,
                )
            ]
            assert "".join(e.choices[0].text for e in events) == "The "
            last: Any = events[-1].choices[0]
            ids = [i for e in events for i in e.choices[0].token_ids]  # type: ignore[attr-defined]
        else:
            answer = await client.completions.create(
                model="fake", prompt="a", stop=["zzz", "quick"], max_tokens=60, extra_body=extra
            )
            last = answer.choices[0]
            ids = last.token_ids
            assert last.text == "The "
            assert last.prompt_token_ids == endpoint.tokenizer.encode("a")
        assert (last.finish_reason, last.stop_reason) == ("stop", "quick")
        assert ids == endpoint.engine.tokens[:9]
        assert last.spec_decode == {"accepted": [2, 2, 2], "num_speculative_tokens": K}
        await until(lambda: endpoint.engine.outcomes["aborted"] == 1)
        assert endpoint.engine.running == 0


async def test_prompt_in_token_ids_and_stop_string_kept(directory: Path) -> None:
    endpoint = Endpoint(FakeEngine(directory))
    async with served(endpoint.app) as url, client_of(url) as client:
        answer = await client.completions.create(
            model="fake",
            prompt=[[1, 2, 3], [4]],
            stop="brown",
            max_tokens=60,
            extra_body={"include_stop_str_in_output": True, "kv_transfer_params": None},
        )
        assert [c.text for c in answer.choices] == [TEXT[: TEXT.index("brown") + 5]] * 2
        assert [r.prompt_token_ids for r in endpoint.engine.requests] == [[1, 2, 3], [4]]
        assert all(r.handoff is None for r in endpoint.engine.requests)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": MAX_MODEL_LEN}, "max_tokens"),
    ("completions", {"prompt": "a" * 400}, "prompt"),
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [1, "a"]}, "prompt"),
    ("completions", {"prompt": [[1], 2]}, "prompt"),
    ("completions", {"prompt": [100_000]}, "prompt"),
    ("completions", {"prompt": {"text": "a"}}, "prompt"),
    ("completions", {}, "prompt"),
    ("completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
    ("completions", {"prompt": "a", "temperature": -1}, "temperature"),
    ("completions", {"prompt": "a", "top_p": 0}, "top_p"),
    ("completions", {"prompt": "a", "n": 0}, "n"),
    ("completions", {"prompt": ["a"] * 200, "n": 2}, "n"),
    ("completions", {"prompt": "a", "logprobs": 99}, "logprobs"),
    ("completions", {"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"),
    ("completions", {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
    ("completions", {"prompt": "a", "stop": [""]}, "stop"),
    ("completions", {"prompt": "a", "echo": True, "stream": True}, "echo"),
    ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ("completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("completions", {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("completions", {"prompt": "a", "allowed_token_ids": [999]}, "allowed_token_ids"),
    ("completions", {"prompt": "a", "bad_words": ["a", ""]}, "bad_words"),
    ("completions", {"prompt": "a", "bad_words": [" "]}, "bad_words"),
    ("completions", {"prompt": "a", "bad_words": [str(i) for i in range(129)]}, "bad_words"),
    ("completions", {"prompt": "a", "bad_words": "a"}, "bad_words"),
    ("completions", {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    ("completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("completions", {"prompt": "a", "prompt_logprobs": 1, "n": 2}, "n"),
    ("completions", {"prompt": ["a" * 200] * 128, "prompt_logprobs": 20}, "prompt_logprobs"),
    ("completions", {"prompt": "a", "kv_mode": "pull"}, "kv_mode"),
    ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": "hi"}, "messages"),
    ("chat/completions", {"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
    ),
    ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools[0]"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0},
        "max_completion_tokens",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}},
        "response_format.json_schema.schema",
    ),
]


async def test_prompts_are_truncated_on_the_left(directory: Path) -> None:
    endpoint = Endpoint(FakeEngine(directory))
    tokenize = endpoint.tokenizer.encode
    async with served(endpoint.app) as url, client_of(url) as client:
        long = "abc " * 100  # more than the context
        for asked, max_tokens, kept in ((3, 4, 3), (-1, 6, MAX_MODEL_LEN - 6), (200, 4, 200)):
            await client.completions.create(
                model="fake", prompt=long, max_tokens=max_tokens, extra_body={"truncate_prompt_tokens": asked}
            )
            assert endpoint.engine.requests[-1].prompt_token_ids == tokenize(long)[-kept:]
        messages: Any = [{"role": "user", "content": long}]
        await client.chat.completions.create(
            model="fake", messages=messages, max_tokens=4, extra_body={"truncate_prompt_tokens": 9}
        )
        assert endpoint.tokenizer.decode(endpoint.engine.requests[-1].prompt_token_ids)[-6:] == "stant>"[-6:]
        assert len(endpoint.engine.requests[-1].prompt_token_ids) == 9


async def test_bad_requests_are_refused_by_name(directory: Path, session: aiohttp.ClientSession) -> None:
    endpoint = Endpoint(FakeEngine(directory))
    async with served(endpoint.app) as url:
        for path, body, param in BAD:
            status, answer = await endpoint.post(session, f"/v1/{path}", {"model": "fake", **body}, url)
            error = answer["error"]
            assert (status, error["param"]) == (400, param), (body, answer)
            assert error["type"] == "invalid_request_error"
            assert param.split("[")[0] in error["message"] or path.startswith("chat"), answer
        status, answer = await endpoint.post(session, "/v1/completions", {"model": "fake", "prompt": "a" * 400}, url)
        assert str(MAX_MODEL_LEN) in answer["error"]["message"], "the limit is named"
    assert endpoint.engine.requests == []


async def test_malformed_bodies_and_wrong_paths(directory: Path, session: aiohttp.ClientSession) -> None:
    endpoint = Endpoint(FakeEngine(directory))
    async with served(endpoint.app) as url:
        for body in (b"{", b"", b"[]", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'{"x":' * 100_000):
            status, answer = await endpoint.post(session, "/v1/completions", body, url)
            assert status == 400, body[:20]
            assert answer["error"]["type"] == "invalid_request_error"
        async with session.post(f"{url}/v1/completions", data=io.BytesIO(b" " * (17 * 2**20))) as response:
            assert response.status == 413
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        status, answer = await endpoint.post(session, "/v1/nothing", {}, url)
        assert status == 404
        async with session.get(f"{url}/v1/completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            assert "error" in await response.json()


async def test_unknown_model_and_engine_errors(directory: Path, session: aiohttp.ClientSession) -> None:
    endpoint = Endpoint(FakeEngine(directory))
    async with served(endpoint.app) as url, client_of(url) as client:
        with pytest.raises(openai.NotFoundError) as not_found:
            await client.completions.create(model="gpt", prompt="a")
        assert not_found.value.code == "model_not_found"
        endpoint.engine.fail = "down"
        with pytest.raises(openai.InternalServerError) as down:
            await client.completions.create(model="fake", prompt="a", stream=True)
        assert down.value.status_code == 503
        endpoint.engine.fail = "refuse"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="fake", prompt="a")
        assert refused.value.param == "seed"


async def test_an_error_in_mid_stream_is_an_event_before_done(
    directory: Path, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = Endpoint(FakeEngine(directory, fail="mid-stream"))
    async with served(endpoint.app) as url:
        body = {"model": "fake", "prompt": "a", "max_tokens": 60, "stream": True}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            text = await response.text()
        assert response.status == 200
        *_, last, done = text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
        assert done == "data: [DONE]"
        assert "a bug" not in text, "details stay in the log"
        del body["stream"]
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 500


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_aborts_its_requests(
    directory: Path, session: aiohttp.ClientSession, n: int
) -> None:
    endpoint = Endpoint(FakeEngine(directory, step_s=1e3))
    async with served(endpoint.app) as url:
        body = {"model": "fake", "prompt": "a", "max_tokens": 200, "stream": True, "n": n}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            await response.content.readline()
        await until(lambda: endpoint.engine.outcomes["aborted"] == n)
        del body["stream"]
        leaving = asyncio.create_task(session.post(f"{url}/v1/completions", json=body))
        await until(lambda: endpoint.engine.running == n)
        leaving.cancel()
        await until(lambda: endpoint.engine.outcomes["aborted"] == 2 * n)
        assert endpoint.engine.running == 0


async def test_min_tokens_hold_stop_strings_off_and_ignore_eos(directory: Path) -> None:
    endpoint = Endpoint(FakeEngine(directory, length=8))
    async with served(endpoint.app) as url, client_of(url) as client:
        answer = await client.completions.create(
            model="fake",
            prompt="a",
            max_tokens=12,
            stop="h",
            extra_body={"min_tokens": 12, "ignore_eos": True, "stop_token_ids": [EOS], "top_k": 10**12},
        )
        assert answer.choices[0].text == TEXT[:12]
        assert endpoint.engine.requests[-1].sampling_params.top_k == endpoint.engine.info.vocab_size
