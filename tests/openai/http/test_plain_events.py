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
from baton.text import Tokenizer

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
