"""JSON, regular expressions and choices by the `openai` client against `baton up`: P's first token and D's tokens are
those of one engine without speculation.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from baton import LLM, SamplingParams, StructuredOutputsParams
from baton.text import Tokenizer
from testkit.processes.running import Running, running_up

pytestmark = pytest.mark.usefixtures("forks")
MODEL = "models/baton-demo-llama"
PROMPT = "The with statement is used to"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "What is a list?"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["list", "tuple"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}
ASKED: list[tuple[dict[str, Any], StructuredOutputsParams]] = [
    (COMPACT, StructuredOutputsParams(json=json.dumps(SCHEMA), disable_any_whitespace=True)),
    ({"regex": "[a-z]{4,9}!"}, StructuredOutputsParams(regex="[a-z]{4,9}!")),
    ({"choice": ["yes", "no"]}, StructuredOutputsParams(choice=("yes", "no"))),
    ({"grammar": 'root ::= "<" root ">" | "o"'}, StructuredOutputsParams(grammar='root ::= "<" root ">" | "o"')),
]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_up(
        MODEL, tmp_path_factory.mktemp("up") / "log", "--batch-invariant", "--max-local-prefill-length", "0"
    ) as up:
        yield up


@pytest.fixture(scope="module")
def client(up: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=60.0) as made:
        yield made


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "measure", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_must_be_called_are(client: openai.OpenAI, stream: bool) -> None:
    """The grammar of the calls holds whatever the model prefers, with drafts and across the handoff."""
    named = {"type": "function", "function": {"name": "measure"}}
    tokenizer = Tokenizer.load(MODEL)
    # The grammar allows unlimited white space, which this model prefers.
    spaces = [i for i in range(2048) if tokenizer.token_text(i)[:1] in ("", " ", "\n", "\t", "\r")]
    for choice in ("required", named):
        asked: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
        asked["logit_bias"] = {str(i): -100 for i in spaces}
        made = client.chat.completions.create(
            model="baton-demo-llama", messages=MESSAGES, temperature=0.0, stream=stream, **asked
        )
        if stream:
            pieces = [call for event in made for choice in event.choices for call in choice.delta.tool_calls or []]
            calls = [(pieces[0].function.name, "".join(piece.function.arguments for piece in pieces))]
        else:
            calls = [(call.function.name, call.function.arguments) for call in made.choices[0].message.tool_calls]
        ((name, arguments),) = calls
        assert name == "measure" if choice is named else name in ("measure", "stop")
        value = json.loads(arguments)
        if name == "measure":
            assert value["kind"] in ("list", "tuple")
            assert 0 <= value["size"] <= 99


def test_prompts_are_scored_on_one_engine(client: openai.OpenAI, up: Running) -> None:
    """As lm_eval does: logprobs of the prompt's own tokens, with their text, and no output or one token."""
    tokenizer = Tokenizer.load(MODEL)
    prompt = tokenizer.encode(PROMPT * 3)
    with LLM(MODEL, kv_cache_memory=8 << 20, batch_invariant=True) as llm:
        (alone,) = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0, logprobs=0))
    found: list[Any] = []
    for max_tokens in (0, 1):
        # The second time all of the prompt's KV is in the prefix cache.
        for _ in range(2):
            asked: Any = {"max_tokens": max_tokens, "temperature": 0.0, "echo": True, "logprobs": 2}
            answer = client.completions.create(
                model="baton-demo-llama", prompt=prompt, **asked, extra_body={"prompt_logprobs": 1}
            )
            (choice,) = answer.choices
            ids = prompt + alone.outputs[0].token_ids[:max_tokens]
            assert choice.text == tokenizer.decode(ids, skip_special_tokens=False)
            assert choice.logprobs is not None
            scores, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
            assert scores is not None
            assert tops is not None
            assert choice.logprobs.tokens == [tokenizer.token_text(i) for i in ids]
            assert scores[0] is tops[0] is None
            assert all(score <= max(top.values()) for score, top in zip(scores[1:], tops[1:], strict=True))
            assert len(scores) == len(ids)
            told = choice.model_extra["prompt_logprobs"]  # type: ignore[index]
            assert [entry and entry[str(i)]["logprob"] for i, entry in zip(prompt, told, strict=True)] == scores[
                : len(prompt)
            ]
            found.append(scores[: len(prompt)])
    assert found == found[:1] * 4
    with urllib.request.urlopen(f"{up.url}/status") as status:
        assert json.load(status)["decisions"]["scored"] == 4


def test_the_tokens_are_those_of_one_engine(client: openai.OpenAI) -> None:
    with LLM(MODEL, kv_cache_memory=8 << 20, batch_invariant=True) as llm:
        for body, structured in ASKED:
            for temperature in (0.0, 0.9):
                params = SamplingParams(max_tokens=32, temperature=temperature, seed=3, structured_outputs=structured)
                (want,) = llm.generate(PROMPT, params)
                have = client.completions.create(
                    model="baton-demo-llama",
                    prompt=PROMPT,
                    max_tokens=32,
                    temperature=temperature,
                    seed=3,
                    extra_body={"structured_outputs": body, "return_token_ids": True},
                ).choices[0]
                assert have.model_dump()["token_ids"] == want.outputs[0].token_ids
                assert (have.text, have.finish_reason) == (want.outputs[0].text, want.outputs[0].finish_reason)
    assert re.fullmatch("<*o>*", have.text)


def test_a_schema_as_clients_ask_for_it(client: openai.OpenAI) -> None:
    schema = {"name": "answer", "schema": SCHEMA, "strict": True}
    answer = client.chat.completions.create(
        model="baton-demo-llama",
        messages=MESSAGES,
        seed=5,
        max_completion_tokens=120,
        response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[typeddict-item]
    ).choices[0]
    if answer.finish_reason == "stop":
        assert set(json.loads(answer.message.content or "")) == {"kind", "size"}
    stream = client.chat.completions.create(
        model="baton-demo-llama", messages=MESSAGES, stream=True, extra_body={"structured_outputs": COMPACT}, seed=5
    )
    text = "".join(event.choices[0].delta.content or "" for event in stream)
    assert json.loads(text)["kind"] in ("list", "tuple")
    whole = client.chat.completions.create(
        model="baton-demo-llama", messages=MESSAGES, response_format={"type": "json_object"}, max_completion_tokens=4
    )
    assert (whole.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("structured_outputs", {"structured_outputs": {"regex": "(a"}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
        ("structured_outputs", {"structured_outputs": {"regex": "((a{999}){999}){999}"}}),
        ("response_format.json_schema.schema", {"response_format": {"json_schema": {"schema": {"not": {}}}}}),
        ("response_format.json_schema.schema", {"response_format": {"json_schema": {"schema": {"$ref": "#"}}}}),
        ("ignore_eos", {"structured_outputs": {"regex": "a"}, "ignore_eos": True}),
    ],
    ids=str,
)
def test_refusals_name_the_field(client: openai.OpenAI, param: str, fields: dict[str, Any]) -> None:
    if "response_format" in fields:
        fields = {"response_format": {"type": "json_schema", **fields["response_format"]}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="baton-demo-llama", messages=MESSAGES, extra_body=fields)
    assert refused.value.param == param
