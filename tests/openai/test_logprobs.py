"""Logprobs of tokens that are parts of characters: their bytes, their offsets, and no top token lost."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import tokenizers

from baton.server import build_app
from baton.text import Tokenizer
from baton.wire import GenerateRequest, TokenChunk, TokenLogprobs
from testkit.servers.fake_serving import EOS, FakeEngine, served
from tests.text.test_text_layer import byte_fallback_tokenizer

TEXT = "é😀a你"
NUM_BYTES = len(TEXT.encode())


class Scoring(FakeEngine):
    """Outputs TEXT, an ignored end token, and "z"; the top tokens at each position are parts of characters."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        tokenizer = Tokenizer.load(directory)
        self.tokens = [*tokenizer.encode(TEXT), EOS, *tokenizer.encode("z")]
        self.others = [*tokenizer.encode("é"), tokenizer.encode("你")[0]]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        scored = request.sampling_params.prompt_logprobs is not None
        for number, token in enumerate(self.tokens):
            top = [(token, -0.1)] + [(other, -1.0 - n) for n, other in enumerate(self.others) if other != token]
            last = number == len(self.tokens) - 1
            yield TokenChunk(
                request_id=request.request_id,
                token_ids=[token],
                logprobs=[TokenLogprobs(-0.1, top[:3], 1)],
                finish_reason="length" if last else None,
                prompt_logprobs=[None, *[TokenLogprobs(-0.5, [], 1) for _ in request.prompt_token_ids[1:]]]
                if scored and not number
                else None,
            )


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def app(directory: Path) -> aiohttp.web.Application:
    return build_app(Scoring(directory), Tokenizer.load(directory))  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
async def test_bytes_of_a_chat_are_the_tokens_own(app: aiohttp.web.Application, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 20}
    async with served(app) as url, client_of(url) as client:
        if stream:
            events = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True)
            found = [entry async for event in events for entry in event.choices[0].logprobs.content]
        else:
            made = await client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
            found = made.choices[0].logprobs.content
    assert bytes(byte for entry in found[:NUM_BYTES] for byte in entry.bytes).decode() == TEXT
    assert [entry.token for entry in found[:2]] == ["\\xc3", "\\xa9"]
    assert found[NUM_BYTES].token == "<eos>"
    assert all(len({tuple(other.bytes) for other in entry.top_logprobs}) == 3 for entry in found)


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_of_a_completion_are_where_its_tokens_begin(app: aiohttp.web.Application, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "fake", "prompt": "é", "max_tokens": 20, "logprobs": 3}
    async with served(app) as url, client_of(url) as client:
        if stream:
            parts = [event.choices[0] async for event in await client.completions.create(**asked, stream=True)]
        else:
            parts = (await client.completions.create(**asked)).choices
    text = "".join(part.text for part in parts)
    assert text == f"{TEXT}z", "the end token is hidden"
    offsets = [offset for part in parts for offset in part.logprobs.text_offset]
    names = [name for part in parts for name in part.logprobs.tokens]
    assert offsets == [0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 4, 4]
    assert names[:3] == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xf0"]
    assert [text[offsets[number]] for number in (6, 11)] == ["a", "z"]
    top = [entries for part in parts for entries in part.logprobs.top_logprobs]
    assert all(len(entries) == 3 and name in entries for name, entries in zip(names, top, strict=True))


async def test_offsets_go_on_after_an_echo(app: aiohttp.web.Application) -> None:
    asked: dict[str, Any] = {"model": "fake", "prompt": "é<eos>b", "max_tokens": 20, "logprobs": 1, "echo": True}
    async with served(app) as url, client_of(url) as client:
        (choice,) = (await client.completions.create(**asked)).choices
    assert choice.text == f"é<eos>b{TEXT}z"
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[:6] == [0, 0, 1, 6, 7, 7]
    assert choice.text[choice.logprobs.text_offset[-1]] == "z"


async def test_an_echo_begins_with_the_text_that_was_sent(directory: Path) -> None:
    """Not with the BOS that the tokenizer has added, which still has its logprob."""
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    bos = ("<bos>", backend.token_to_id("<bos>"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    backend.save(str(directory / "tokenizer.json"))
    asked: dict[str, Any] = {"model": "fake", "max_tokens": 20, "logprobs": 1, "echo": True}
    app = build_app(Scoring(directory), Tokenizer.load(directory))  # type: ignore[arg-type]
    async with served(app) as url, client_of(url) as client:
        added, given = (await client.completions.create(prompt=["é<eos>b", "<bos>c"], **asked)).choices
        (ids,) = (await client.completions.create(prompt=[bos[1], 99], **asked)).choices
    assert added.logprobs is not None
    assert (added.text, given.text) == (f"é<eos>b{TEXT}z", f"<bos>c{TEXT}z")
    assert (added.logprobs.text_offset or [])[:7] == [0, 0, 0, 1, 6, 7, 7]
    assert ids.text.startswith("<bos>"), "of token ids all are shown"


async def test_tokens_that_are_spelt_alike_are_all_told(directory: Path) -> None:
    """For example a letter of a byte-fallback vocabulary and its byte token."""
    tokenizer, engine = byte_fallback_tokenizer(), Scoring(directory)
    letter, byte = 5, 7 + ord("b")
    engine.tokens, engine.others = [4], [letter, byte]
    async with served(build_app(engine, tokenizer)) as url, client_of(url) as client:  # type: ignore[arg-type]
        (choice,) = (await client.completions.create(model="fake", prompt=[2], logprobs=3)).choices
        engine.tokens, engine.others = [byte], [letter]
        (own,) = (await client.completions.create(model="fake", prompt=[2], logprobs=2)).choices
    assert choice.logprobs is not None
    assert own.logprobs is not None
    assert choice.logprobs.top_logprobs == [{"s": -0.1, "b": -1.0, f"token_id:{byte}": -2.0}]
    assert own.logprobs.top_logprobs == [{"b": -0.1, f"token_id:{letter}": -1.0}]
