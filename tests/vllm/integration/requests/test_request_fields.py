"""Every request field of the installed vLLM is honoured, refused by name, or known to change nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import AliasChoices
from vllm.entrypoints.generate.base.protocol import PerRequestMetrics, SpeculativeDecodingMetrics
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest as VllmCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest as VllmResponsesRequest

from baton.errors import RequestError
from baton.openai.refused_fields import FORBIDDEN, REFUSED
from baton.openai.requests import ChatRequest, CompletionRequest, decode_request
from baton.openai.responses.requests import REFUSED as REFUSED_IN_RESPONSES
from baton.openai.responses.requests import ResponsesRequest, read_request
from tests.openai.test_fields import IGNORED
from tests.openai.test_request_metrics import TIMES

MESSAGES = [{"role": "user", "content": "a"}]
KINDS: dict[str, tuple[Any, Any, set[str], dict[str, Any]]] = {
    "completions": (VllmCompletionRequest, CompletionRequest, set(REFUSED), {"prompt": "a"}),
    "chat": (ChatCompletionRequest, ChatRequest, set(REFUSED), {"messages": MESSAGES}),
    "responses": (VllmResponsesRequest, ResponsesRequest, {*REFUSED, *REFUSED_IN_RESPONSES}, {"input": "a"}),
}


def names_of(model: Any) -> set[str]:
    """The names by which a client may send a model's fields."""
    found: set[str] = set()
    for name, field in model.model_fields.items():
        found.add(name)
        for alias in (field.alias, field.validation_alias):
            choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
            found.update(choice for choice in choices if isinstance(choice, str))
    return found


def ask(kind: str, body: bytes) -> Any:
    if kind == "responses":
        return read_request(body)
    return decode_request(body, ChatRequest if kind == "chat" else CompletionRequest)


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_is_ignored_in_silence(kind: str) -> None:
    theirs, ours, refused, _ = KINDS[kind]
    names = names_of(theirs)
    assert len(names) > 40, "this looks at the fields of another class"
    assert names <= {*ours.__struct_fields__, *refused, *FORBIDDEN, *IGNORED}


@pytest.mark.parametrize("kind", KINDS)
def test_vllms_own_defaults_ask_for_nothing_that_is_refused(kind: str) -> None:
    """A client that writes out all of vLLM's fields is served."""
    theirs, _, _, least = KINDS[kind]
    defaults = theirs(model="a", **least, **({"store": False} if kind == "responses" else {}))
    ask(kind, defaults.model_dump_json(exclude={"request_id"}).encode())


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_is_refused_is_named(kind: str) -> None:
    theirs, ours, refused, least = KINDS[kind]
    for name in (names_of(theirs) & {*refused, *FORBIDDEN}) - set(ours.__struct_fields__):
        with pytest.raises(RequestError, match=name) as error:
            ask(kind, json.dumps({**least, name: {"some": "thing"}}).encode())
        assert error.value.param == name


def test_the_metrics_of_an_answer_have_vllms_names() -> None:
    assert {*TIMES, "speculative_decoding"} == set(PerRequestMetrics.model_fields)
    told = {"mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps"}
    told |= {"num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens"}
    told |= {"per_step_accepted", "per_step_drafted"}
    assert told == set(SpeculativeDecodingMetrics.model_fields)
