"""Every request field of OpenAI, vLLM and SGLang is honoured, refused by name, or known to be harmless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from baton.errors import RequestError
from baton.openai.backend import ServedModel
from baton.openai.plan import plan_chat
from baton.openai.refused_fields import FORBIDDEN, REFUSED, refuse_unserved
from baton.openai.requests import ChatRequest, CompletionRequest, decode_request
from baton.openai.tools import Parsing
from baton.parsing import Content, Reasoning
from baton.text import Tokenizer
from testkit.servers.fake_serving import write_tokenizer

# Fields that cannot change the answer, and why.
IGNORED = {
    "user": "for the operator's records",
    "metadata": "for the operator's records",
    "store": "nothing is kept",
    "service_tier": "there is one",
    "safety_identifier": "for the operator's records",
    "custom_labels": "for the operator's records",
    "request_id": "answers have ids of their own",
    "rid": "answers have ids of their own",
    "session_id": "a hint for routing",
    "prompt_cache_key": "a hint for routing",
    "prompt_cache_options": "prompts are cached anyway",
    "prompt_cache_retention": "prompts are cached anyway",
    "prediction": "about speed alone",
    "stream_interval": "events come as their tokens do",
    "best_of": "n samples are returned, as vLLM does now",
}
VLLM = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template chat_template_kwargs
continue_final_message documents ec_transfer_params echo frequency_penalty ignore_eos include_reasoning
include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs
max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens mm_payload mm_processor_kwargs model n
parallel_tool_calls presence_penalty priority prompt prompt_embeds prompt_logprobs reasoning_effort
repetition_detection repetition_penalty request_id response_format return_mm_kwargs return_prompt_text
return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed session_id
skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
structured_outputs suffix temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking guided_json guided_regex
guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern best_of logits_processors
"""
SGLANG = """
best_of bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs continue_final_message
custom_labels custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank ebnf echo extra_key
frequency_penalty ignore_eos images_config input_ids json_schema logit_bias logprobs lora_path max_completion_tokens
max_dynamic_patch max_tokens messages min_dynamic_patch min_p min_tokens model n ngram_corpus_id no_stop_trim
parallel_tool_calls presence_penalty priority prompt reasoning reasoning_effort regex repetition_penalty
response_format return_cached_tokens_details return_hidden_states return_meta_info return_prompt_token_ids
return_routed_experts return_token_ids rid routed_dp_rank routed_experts_start_len seed separate_reasoning
session_id session_params skip_special_tokens stop stop_regex stop_token_ids stream stream_options stream_reasoning
suffix task temperature tool_choice tools top_k top_logprobs top_p use_audio_in_video user
"""
OPENAI = {
    *completion_create_params.CompletionCreateParamsBase.__annotations__,
    *chat_create_params.CompletionCreateParamsBase.__annotations__,
    "stream",
}
HONOURED = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
# Fields of a single endpoint, also in the APIs that they come from.
ALONE = {"prompt", "messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt"}
ALONE |= {"chat_template_kwargs", "continue_final_message", "reasoning_effort"}
ALONE |= {"tools", "tool_choice", "parallel_tool_calls", "include_reasoning"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = write_tokenizer(tmp_path_factory.mktemp("model"))
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.reasoning_content }}\n{% endfor %}"
        "{% if not enable_thinking | default(true) %}<think></think>{% endif %}{{ reasoning_effort }}"
    )
    return Tokenizer.load(directory)


def completion(**fields: Any) -> CompletionRequest:
    return decode_request(json.dumps({"prompt": "a", **fields}).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return decode_request(json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode(), ChatRequest)


def test_defaults_of_unserved_fields_are_accepted() -> None:
    refuse_unserved({"verbosity": msgspec.Raw(b'"medium"'), "suffix": msgspec.Raw(b'""')})


@pytest.mark.parametrize(("name", "value"), [("verbosity", b'"low"'), ("suffix", b'" "')])
def test_a_field_that_changes_the_answer_is_refused(name: str, value: bytes) -> None:
    with pytest.raises(RequestError, match=f"{name} is not supported"):
        refuse_unserved({name: msgspec.Raw(value)})


def test_every_field_is_known_once() -> None:
    known = [*HONOURED, *REFUSED, *FORBIDDEN, *IGNORED]
    assert len(known) == len(set(known))
    for name in {*OPENAI, *VLLM.split(), *SGLANG.split()}:
        assert name in known, f"{name} would be ignored in silence"
    assert set(CompletionRequest.__struct_fields__) ^ set(ChatRequest.__struct_fields__) == ALONE


@pytest.mark.parametrize("ask", [completion, chat])
def test_a_field_that_is_not_served_is_refused_by_name(ask: Any) -> None:
    for name in [*REFUSED, *FORBIDDEN]:
        for value in ("something", 7, True, {"a": "b"}, ["x" * 100]):
            if name in REFUSED and value in REFUSED[name].neutral:
                continue
            with pytest.raises(RequestError, match=name) as refused:
                ask(**{name: value})
            assert refused.value.param == name
        ask(**{name: None})
    for name, field in REFUSED.items():
        for value in field.neutral:
            ask(**{name: value})
    for name in IGNORED:
        ask(**{name: "something"})
    for name in HONOURED - ALONE:
        with pytest.raises(RequestError) as malformed:
            ask(**{name: [{}]})
        assert str(malformed.value.param).startswith(name), "it is looked at"


@pytest.mark.parametrize("value", [[], {}])
@pytest.mark.parametrize("name", ["stop", "tools", "logit_bias", "response_format", "stream_options", "tool_choice"])
def test_empty_lists_and_objects_count_as_absent(name: str, value: Any) -> None:
    assert getattr(chat(**{name: value}), name) is None


def test_what_an_empty_value_does_not_excuse() -> None:
    with pytest.raises(RequestError, match="stream_options needs stream"):
        chat(stream_options={"include_usage": True})
    with pytest.raises(RequestError, match="ticket is not a client's"):
        chat(ticket={})
    assert chat(messages=[]).messages == [], "a field that is needed"


@pytest.mark.parametrize("key", ["a", " 1", "01", ""])
def test_a_bad_key_is_named_by_its_field(key: str) -> None:
    with pytest.raises(RequestError, match=r"^logit_bias: a key: Expected `int`, got `str`$") as refused:
        completion(logit_bias={key: 1.0})
    assert refused.value.param == "logit_bias"


def test_fields_that_are_supported_in_part_are_refused_by_name(tokenizer: Tokenizer) -> None:
    model = ServedModel("fake", tokenizer, 256, 258, 0)
    with pytest.raises(RequestError, match="echo is for completions"):
        chat(echo=True)
    with pytest.raises(RequestError, match="echo is not for streams"):
        completion(echo=True, stream=True)
    assert chat(echo=False).echo is False
    for name, value in (
        ("function_call", {"name": "f"}),
        ("audio", {"id": "a"}),
        ("refusal", "no"),
    ):
        with pytest.raises(RequestError, match=name) as refused:
            plan_chat(chat(messages=[{"role": "assistant", "content": "", name: value}]), model)
        assert refused.value.param == f"messages[0].{name}"


def test_a_template_gets_the_clients_variables(tokenizer: Tokenizer) -> None:
    model = ServedModel("fake", tokenizer, 256, 258, 0)

    def prompt(**fields: Any) -> str:
        return tokenizer.decode(plan_chat(chat(**fields), model).prompts[0])

    assert prompt() == "<user>a\n"
    assert prompt(chat_template_kwargs={"enable_thinking": False}) == "<user>a\n<think></think>"
    assert prompt(chat_template_kwargs={"enable_thinking": True, "unknown": [1]}) == "<user>a\n"
    assert prompt(reasoning_effort="low") == "<user>a\nlow"
    thought = [{"role": "assistant", "content": "a", "reasoning_content": "b"}]
    assert prompt(messages=thought) == "<assistant>ab\n"
    for name in ("messages", "tools", "bos_token", "add_generation_prompt", "a b"):
        with pytest.raises(RequestError, match=name) as refused:
            prompt(chat_template_kwargs={name: ""})
        assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("thinks", [True, False])
def test_reasoning_that_the_template_ended_is_not_awaited(tokenizer: Tokenizer, thinks: bool) -> None:
    request = chat(chat_template_kwargs={"enable_thinking": thinks})
    plan = plan_chat(request, ServedModel("fake", tokenizer, 256, 258, 0), Parsing(reasoning_parser="deepseek_r1"))
    assert plan.reader is not None
    assert plan.reader().push("Yes") == [Reasoning("Yes") if thinks else Content("Yes")]


def test_an_effort_says_what_the_template_knows(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As in vLLM: the effort turns thinking on or off unless the client says so itself, and templates without thinking
    get nothing.
    """
    model = ServedModel("fake", tokenizer, 256, 258, 0)

    def prompt(served: ServedModel, **fields: Any) -> str:
        return served.tokenizer.decode(plan_chat(chat(**fields), served).prompts[0])

    assert prompt(model, reasoning_effort="none") == "<user>a\n<think></think>none"
    assert prompt(model, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == "<user>a\nnone"
    plain = ServedModel("fake", Tokenizer.load(write_tokenizer(tmp_path)), 256, 258, 0)
    assert prompt(plain, reasoning_effort="low") == prompt(plain)


def test_the_documents_list_them_all() -> None:
    text = Path("docs/api.md").read_text()
    assert [name for name in (*HONOURED, *REFUSED, *FORBIDDEN, *IGNORED) if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "the request body is empty"),
        (b'{"prompt": "\\ud800"}', r"unpaired surrogate, such as \\ud800\Z"),
        (b'{"prompt": "a", "user": "\\uDFFF"}', "unpaired surrogate"),
        (b'{"prompt": "\\ud83d\\ude00", }', r"is not valid JSON: [^;]*\Z"),
    ],
)
def test_a_body_that_is_no_json_says_why(body: bytes, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        decode_request(body, CompletionRequest)
