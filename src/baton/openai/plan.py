"""Turns request bodies into plans."""

from __future__ import annotations

import os
import reprlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from baton.errors import RequestError, UnknownModelError
from baton.openai.backend import ServedModel
from baton.openai.conversation import chat_prompt, chat_text, encode_text
from baton.openai.http.caller import asked_standing
from baton.openai.requests import (
    ChatRequest,
    CompletionRequest,
    chat_logprobs,
    decode_request,
    grammar_of,
    sampling_params,
)
from baton.openai.tools import NO_PARSING, CheckedTools, NamedChoice, Parsing
from baton.parsing import Parser
from baton.sampling_params import SamplingParams
from baton.text.word_tokens import word_tokens
from baton.wire import GenerateRequest, Mode, PromptIds

MAX_CHOICES = 256  # prompts times n in one request
_MAX_ADDED = 2  # such as BOS
MAX_SCORES = 1 << 19  # prompt logprobs in one request, some 100 bytes each
_REASONING_OPENED, _REASONING_CLOSED = "<think>", "</think>"


class Plan(msgspec.Struct, frozen=True):
    """A checked API request.

    - `requests[i]` generates choice i; choices of one prompt are adjacent. They have no stop strings: the API server
      applies them.
    - `continuous_usage`: each event has the usage so far.
    - `grammar_field`: the request field with the grammar.
    - `echo`: the response begins with the prompt. `num_added`: per prompt, tokens added before its text.
    - `reader`: makes the parser of a choice; None: all text is content. `spelt`: special tokens that it must see.
    - `returns_calls`: with calls the finish reason is "tool_calls".
    """

    id: str
    created: int
    chat: bool
    model: ServedModel
    prompts: list[PromptIds]
    asked: SamplingParams
    requests: list[GenerateRequest]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    return_tokens_as_token_ids: bool
    kv_mode: Mode | None
    grammar_field: str
    echo: bool = False
    num_added: Sequence[int] = ()
    prompt_logprobs: int | None = None
    reader: Callable[[], Parser] | None = None
    spelt: frozenset[int] = frozenset()
    returns_calls: bool = True
    returns_reasoning: bool = True


def plan_completion(request: CompletionRequest, model: ServedModel) -> Plan:
    """Raises `RequestError`, `UnknownModelError`."""
    model = check_model(request.model, model)
    special = request.add_special_tokens is not False
    prompts = [
        _truncated(prompt, request, request.max_tokens, model) for prompt in _prompts(request.prompt, model, special)
    ]
    default = 16
    if request.max_tokens is None:  # reduced to what fits the context
        default = max(1, min(16, model.max_model_len - max(len(p) for p in prompts)))
    max_tokens = _limited(default if request.max_tokens is None else request.max_tokens, model)
    _check_lengths(prompts, max_tokens, "max_tokens", "prompt", model)
    grammar, field = grammar_of(request)
    params = sampling_params(request, max_tokens, request.logprobs, grammar, model.vocab_size, model.defaults)
    plan = _plan(request, model, prompts, params, field, chat=False)
    if not request.echo:
        return plan
    return msgspec.structs.replace(plan, echo=True, num_added=_num_added(request, prompts, model))


def plan_chat(request: ChatRequest, model: ServedModel, parsing: Parsing = NO_PARSING) -> Plan:
    """Raises `RequestError`, `UnknownModelError`."""
    model = check_model(request.model, model)
    variables = template_variables(request, model)
    tools = CheckedTools.of(request.tools, request.tool_choice, request.parallel_tool_calls)
    text = chat_text(request, request.messages, variables, tools.for_template(), model)
    asked, param = request.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, param = request.max_tokens, "max_tokens"
    prompt = _truncated(chat_prompt(text, request, model), request, asked, model)
    if asked is None:
        room = max(1, model.max_model_len - len(prompt))
        max_tokens = _limited(min(room, model.defaults.max_tokens or room), model)
    else:
        max_tokens = _limited(asked, model)
    if max_tokens < 1:
        raise RequestError(f"{param} must be at least 1, got {max_tokens}", param)
    _check_lengths([prompt], max_tokens, param, "messages", model)
    grammar, field = grammar_of(request, tools)
    params = sampling_params(request, max_tokens, chat_logprobs(request), grammar, model.vocab_size, model.defaults)
    constrained = grammar is not None
    reader = tools.reader(parsing, _within_reasoning(request, text), constrained)
    plan = _plan(request, model, [prompt], params, field, chat=True)
    # The call of a named function has finish reason "stop", as in vLLM and OpenAI's API.
    returns_calls = not isinstance(tools.choice, NamedChoice)
    spelt = model.tokenizer.special_tokens_of(tools.markers(parsing, constrained))
    returns_reasoning = request.include_reasoning is not False
    return msgspec.structs.replace(
        plan, reader=reader, spelt=spelt, returns_calls=returns_calls, returns_reasoning=returns_reasoning
    )


def _within_reasoning(request: ChatRequest, text: str) -> bool | None:
    """Whether the prompt ends within reasoning (True) or after it (False); None: neither."""
    text = text.rstrip()
    if text.endswith(_REASONING_OPENED):
        return True
    if text.endswith(_REASONING_CLOSED):
        return False
    if not request.continue_final_message:
        return None
    content = request.messages[-1].content
    last = content if isinstance(content, str) else "".join(part.text or "" for part in content or ())
    begun, ended = last.rfind(_REASONING_OPENED), last.rfind(_REASONING_CLOSED)
    return None if begun == ended else begun > ended


def template_variables(request: ChatRequest, model: ServedModel) -> dict[str, Any]:
    """As in vLLM, a `reasoning_effort` also enables thinking ("none" disables it) unless the client sets that
    itself."""
    given = dict(request.chat_template_kwargs or {})
    if (effort := request.reasoning_effort) is None:
        return given
    meant = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {name: value for name, value in meant.items() if name in model.tokenizer.template_variables} | given


def make_completion_plan(body: bytes, model: ServedModel, parsing: Parsing = NO_PARSING) -> Plan:
    """Responses are not parsed. A long body may take seconds, while other threads run."""
    return plan_completion(decode_request(body, CompletionRequest), model)


def make_chat_plan(body: bytes, model: ServedModel, parsing: Parsing = NO_PARSING) -> Plan:
    return plan_chat(decode_request(body, ChatRequest), model, parsing)


def _plan(
    request: CompletionRequest | ChatRequest,
    model: ServedModel,
    prompts: list[PromptIds],
    params: SamplingParams,
    grammar_field: str,
    chat: bool,
) -> Plan:
    if len(prompts) * params.n > MAX_CHOICES:
        raise RequestError(f"prompts times n must be at most {MAX_CHOICES}", "n")
    _check_scores(prompts, params)
    # Engines check this too.
    word_tokens(params.bad_words, model.tokenizer, model.vocab_size)
    priority, ttft_slo_s = asked_standing(request.priority)
    response_id = f"{'chatcmpl' if chat else 'cmpl'}-{os.urandom(12).hex()}"
    requests: list[GenerateRequest] = []
    for prompt in prompts:
        # So that all legs and retries have the same noise.
        seed = model.default_seed if params.seed is None else params.seed
        seed = secrets.randbits(63) if seed is None else seed
        for index in range(params.n):
            own = msgspec.structs.replace(params, n=1, sample_index=index, seed=seed, stop=())
            requests.append(
                GenerateRequest(
                    request_id=f"{response_id}-{len(requests)}",
                    prompt_token_ids=prompt,
                    sampling_params=own,
                    cache_salt=request.cache_salt,
                    identity=model.identity,
                    adapter=model.adapter,
                    priority=priority,
                    ttft_slo_s=ttft_slo_s,
                )
            )
    options = request.stream_options
    return Plan(
        id=response_id,
        created=int(time.time()),
        chat=chat,
        model=model,
        prompts=prompts,
        asked=params,
        requests=requests,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        return_tokens_as_token_ids=bool(request.return_tokens_as_token_ids),
        kv_mode=request.kv_mode,
        prompt_logprobs=request.prompt_logprobs,
        grammar_field=grammar_field,
    )


def _truncated(
    prompt: PromptIds, request: CompletionRequest | ChatRequest, max_tokens: int | None, model: ServedModel
) -> PromptIds:
    """Keep the last `truncate_prompt_tokens` tokens; -1: as many as fit."""
    asked, name = request.truncate_prompt_tokens, "truncate_prompt_tokens"
    if asked is None:
        return prompt
    if asked != -1 and not 1 <= asked <= model.max_model_len:
        raise RequestError(f"{name} must be -1, or 1 to {model.max_model_len}, got {asked}", name)
    most = max(1, model.max_model_len - (1 if max_tokens is None else max_tokens)) if asked == -1 else asked
    return PromptIds(prompt[-most:])


def _num_added(request: CompletionRequest, prompts: Sequence[PromptIds], model: ServedModel) -> list[int]:
    texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    tokenizer, counts = model.tokenizer, []
    for text, prompt in zip(texts if len(texts) == len(prompts) else [None] * len(prompts), prompts, strict=True):
        starts = range(1 + _MAX_ADDED) if isinstance(text, str) else ()
        spelt = (start for start in starts if tokenizer.decode(prompt[start:], skip_special_tokens=False) == text)
        counts.append(next(spelt, 0))
    return counts


def _limited(max_tokens: int, model: ServedModel) -> int:
    return max_tokens if model.defaults.limit is None else min(max_tokens, model.defaults.limit)


def _check_scores(prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
    if params.prompt_logprobs is None:
        return
    if params.n > 1:
        raise RequestError("n must be 1 where the prompt is scored", "n")
    num_entries = sum(map(len, prompts)) * (1 + params.prompt_logprobs)
    if num_entries > MAX_SCORES:
        what = f"asks for {num_entries} logprobs of prompts, more than {MAX_SCORES}"
        raise RequestError(f"prompt_logprobs {what}: send fewer prompts at a time", "prompt_logprobs")


def check_model(asked: str | None, model: ServedModel) -> ServedModel:
    """`asked`: the model, an adapter, or None. Raises `UnknownModelError`."""
    if asked is None or asked == model.name:
        return model
    if asked in model.adapters:
        return replace(model, name=asked, adapter=model.adapters[asked])
    known = ", ".join(map(repr, (model.name, *model.adapters)))
    raise UnknownModelError(f"the model {reprlib.repr(asked)} does not exist; this endpoint serves {known}", "model")


def _check_lengths(
    prompts: Sequence[Sequence[int]], max_tokens: int, max_param: str, prompt_param: str, model: ServedModel
) -> None:
    limit = model.max_model_len
    for prompt in prompts:
        if not prompt:
            raise RequestError(f"{prompt_param} must hold at least one token", prompt_param)
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, and this model's context holds {limit} tokens "
                "with at least one of them generated",
                prompt_param,
            )
        if len(prompt) + max_tokens > limit:
            raise RequestError(
                f"{max_param} is {max_tokens} and the prompt has {len(prompt)} tokens, together more than "
                f"this model's context of {limit} tokens",
                max_param,
            )


def _prompts(value: str | list[str | int | list[int]], model: ServedModel, special: bool) -> list[PromptIds]:
    if isinstance(value, str):
        return [encode_text(value, model, special, "prompt")]
    if not value:
        raise RequestError("prompt must not be empty", "prompt")
    if len(value) > MAX_CHOICES and not isinstance(value[0], int):
        raise RequestError(f"prompt must be at most {MAX_CHOICES} prompts", "prompt")
    kinds = set(map(type, value))  # fast for long prompts
    if kinds == {str}:
        return [encode_text(text, model, special, "prompt") for text in cast(list[str], value)]
    if kinds == {int}:
        lists = [PromptIds(cast(list[int], value))]
    elif kinds == {list}:
        lists = [PromptIds(item) for item in cast(list[list[int]], value)]
    else:
        raise RequestError("prompt must be text(s) or (lists of) token ids, not a mixture", "prompt")
    for prompt in lists:
        if prompt and len(prompt) < model.max_model_len and not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            raise RequestError(f"prompt token ids must be in [0, {model.vocab_size})", "prompt")
    return lists
