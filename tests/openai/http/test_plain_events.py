"""The events of a stream that have nothing but text have the bytes of all others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.openai.backend import ServedModel
from baton.openai.format import PlainEvents, encode_event, stream_event
from baton.openai.output import ChoiceOutput, Delta
from baton.openai.plan import Plan, make_chat_plan, make_completion_plan
from baton.parsing.forced import PlainParser
from baton.text import Tokenizer
from baton.wire import TokenChunk, TokenLogprobs

COMPLETION = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("text", ["a", "", 'q"\\\n', "\u2028 é 你\x7f"])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize(("make", "body"), [(make_completion_plan, COMPLETION), (make_chat_plan, CHAT)])
def test_a_plain_event_is_that_of_its_delta(
    make: Callable[..., Plan], body: dict[str, Any], more: dict[str, Any], text: str, directory: Path
) -> None:
    model = ServedModel('the "model"', Tokenizer.load(directory), 256, 258, 0)
    plan = make(json.dumps({**body, **more, "stream": True}).encode(), model)
    for index, request in enumerate(plan.requests):
        output = ChoiceOutput(model.tokenizer, request)
        plain = PlainEvents(plan, index, output)
        assert plain.event(text) == encode_event(stream_event(plan, index, Delta(text=text), output, False))


def test_a_plain_chunk_has_the_text_of_any_other(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    request = make_completion_plan(b'{"prompt": "a"}', ServedModel("m", tokenizer, 256, 258, 0)).requests[0]
    one, other = ChoiceOutput(tokenizer, request), ChoiceOutput(tokenizer, request)
    for position, token in enumerate(tokenizer.encode("a\u00e9\u4f60b")):
        chunk = TokenChunk(request_id="r", token_ids=[token], position=position)
        assert one.push_plain(chunk) == other.push(chunk).text
    assert (one.text, one.token_ids, one.text_offsets) == (other.text, other.token_ids, other.text_offsets)


@pytest.mark.parametrize(
    "more",
    [
        {"token_ids": [64, 64]},
        {"token_ids": []},
        {"finish_reason": "length"},
        {"accepted": [0], "drafted": [2]},
        {"num_cached_tokens": 16},
        {"queued_s": 0.5},
        {"logprobs": [TokenLogprobs(-1.0)]},
        {"prompt_logprobs": [None]},
    ],
)
def test_a_chunk_with_anything_else_is_not_plain(more: dict[str, Any], directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    request = make_completion_plan(b'{"prompt": "a"}', ServedModel("m", tokenizer, 256, 258, 0)).requests[0]
    output = ChoiceOutput(tokenizer, request)
    chunk = TokenChunk(**{"request_id": "r", "token_ids": [64], "position": 0, **more})
    assert not chunk.only_adds_tokens() or output.push_plain(chunk) is None
    assert output.token_ids == []


def test_text_that_is_parsed_or_searched_is_not_plain(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    request = make_completion_plan(b'{"prompt": "a"}', ServedModel("m", tokenizer, 256, 258, 0)).requests[0]
    chunk = TokenChunk(request_id="r", token_ids=[64], position=0)
    assert ChoiceOutput(tokenizer, request, ["b"]).push_plain(chunk) is None
    assert ChoiceOutput(tokenizer, request, None, PlainParser()).push_plain(chunk) is None
