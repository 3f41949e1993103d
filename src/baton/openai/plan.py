"""From a request body to the work it asks for: prompts in token ids, one `GenerateRequest` per choice."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.errors import RequestError, UnknownModelError
from baton.openai.backend import KVMode, ServedModel
from baton.openai.requests import ChatRequest, CompletionRequest, Message, chat_logprobs, sampling_params
from baton.wire import GenerateRequest, SamplingParams

MAX_CHOICES = 256  # prompts times n in one request


@dataclass(frozen=True, slots=True)
class Plan:
    """One API request, checked. `requests[i]` makes choice i; choices of one prompt are neighbours. `asked`: the
    sampling parameters as the client gave them."""

    id: str
    created: int
    chat: bool
    model: ServedModel
    prompts: list[list[int]]
    asked: SamplingParams
    requests: list[GenerateRequest]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    return_tokens_as_token_ids: bool
    kv_mode: KVMode | None


def plan_completion(request: CompletionRequest, model: ServedModel) -> Plan:
    """Raises `RequestError` naming what cannot be served, `UnknownModelError` for another model."""
    _check_model(request.model, model)
    special = request.add_special_tokens is not False
    prompts = _prompts(request.prompt, model, special)
    default = 16
    if request.max_tokens is None:  # the default must not make a long prompt fail
        default = max(1, min(16, model.max_model_len - max(len(p) for p in prompts)))
    max_tokens = default if request.max_tokens is None else request.max_tokens
    _check_lengths(prompts, max_tokens, "max_tokens", "prompt", model)
    params = sampling_params(request, max_tokens, request.logprobs, model.vocab_size)
    return _plan(request, model, prompts, params, chat=False)


def plan_chat(request: ChatRequest, model: ServedModel) -> Plan:
    """Raises `RequestError` naming what cannot be served, `UnknownModelError` for another model."""
    _check_model(request.model, model)
    if not request.messages:
        raise RequestError("messages must not be empty", "messages")
    messages = [_message(index, message) for index, message in enumerate(request.messages)]
    text = model.tokenizer.apply_chat_template(messages, request.add_generation_prompt is not False)
    prompt = model.tokenizer.encode(text, add_special_tokens=False)  # the template wrote BOS itself
    asked, param = request.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, param = request.max_tokens, "max_tokens"
    max_tokens = max(1, model.max_model_len - len(prompt)) if asked is None else asked
    if max_tokens < 1:
        raise RequestError(f"{param} must be at least 1, got {max_tokens}", param)
    _check_lengths([prompt], max_tokens, param, "messages", model)
    params = sampling_params(request, max_tokens, chat_logprobs(request), model.vocab_size)
    return _plan(request, model, [prompt], params, chat=True)


def _plan(
    request: CompletionRequest | ChatRequest,
    model: ServedModel,
    prompts: list[list[int]],
    params: SamplingParams,
    chat: bool,
) -> Plan:
    if len(prompts) * params.n > MAX_CHOICES:
        raise RequestError(f"prompts times n must be at most {MAX_CHOICES}", "n")
    plan_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    requests: list[GenerateRequest] = []
    for prompt in prompts:
        # A request without a seed gets one here, so that every leg and every retry draws the same noise.
        seed = secrets.randbits(63) if params.seed is None else params.seed
        for index in range(params.n):
            own = msgspec.structs.replace(params, n=1, sample_index=index, seed=seed)
            requests.append(
                GenerateRequest(request_id=f"{plan_id}-{len(requests)}", prompt_token_ids=prompt, sampling_params=own)
            )
    options = request.stream_options
    return Plan(
        id=plan_id,
        created=int(time.time()),
        chat=chat,
        model=model,
        prompts=prompts,
        asked=params,
        requests=requests,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        return_token_ids=bool(request.return_token_ids),
        return_tokens_as_token_ids=bool(request.return_tokens_as_token_ids),
        kv_mode=request.kv_mode,
    )


def _check_model(asked: str | None, model: ServedModel) -> None:
    if asked is not None and asked != model.name:
        raise UnknownModelError(f"the model {asked!r} does not exist; this endpoint serves {model.name!r}", "model")


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


def _prompts(value: str | list[str | int | list[int]], model: ServedModel, special: bool) -> list[list[int]]:
    if isinstance(value, str):
        return [model.tokenizer.encode(value, special)]
    if not value:
        raise RequestError("prompt must not be empty", "prompt")
    if len(value) > MAX_CHOICES and not isinstance(value[0], int):
        raise RequestError(f"prompt must be at most {MAX_CHOICES} prompts", "prompt")
    texts = [item for item in value if isinstance(item, str)]
    if len(texts) == len(value):
        return [model.tokenizer.encode(text, special) for text in texts]
    if all(isinstance(item, int) for item in value):
        lists = [[item for item in value if isinstance(item, int)]]
    else:
        lists = [item for item in value if isinstance(item, list)]
        if len(lists) != len(value):
            raise RequestError("prompt must be text(s) or (lists of) token ids, not a mixture", "prompt")
    for prompt in lists:
        if not all(0 <= i < model.vocab_size for i in prompt):
            raise RequestError(f"prompt token ids must be in [0, {model.vocab_size})", "prompt")
    return lists


def _message(index: int, message: Message) -> dict[str, str]:
    param = f"messages[{index}].content"
    if message.tool_calls:
        raise RequestError("tool_calls is not supported", f"messages[{index}].tool_calls")
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise RequestError(f"content parts of type {part.type!r} are not supported, only text", param)
        content = "".join(part.text or "" for part in content)
    out = {"role": message.role, "content": content or ""}
    if message.name is not None:
        out["name"] = message.name
    return out
