"""Request bodies into plans: prompts in token ids, and one `GenerateRequest` per choice."""

from __future__ import annotations

import reprlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.errors import RequestError, UnknownModelError
from baton.openai.backend import ServedModel
from baton.openai.requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    TokenizeRequest,
    chat_logprobs,
    decode,
    sampling_params,
)
from baton.openai.structured import structured_params
from baton.wire import GenerateRequest, Mode, PromptIds, SamplingParams

MAX_CHOICES = 256  # prompts times n in one request
MAX_MESSAGES = 4096
# Marks the end of a message that the model goes on with. The space shows whether the template trims messages.
_END = "<|baton-end-of-message|> "


@dataclass(frozen=True, slots=True)
class Plan:
    """One API request, checked. `requests[i]` makes choice i; choices of one prompt are neighbours. `asked`: the
    sampling parameters as the client gave them. The front applies stop strings, so `requests` have none.
    `grammar_field`: which field names the grammar, if there is one."""

    id: str
    created: int
    chat: bool
    model: ServedModel
    prompts: list[PromptIds]
    asked: SamplingParams
    requests: list[GenerateRequest]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    return_tokens_as_token_ids: bool
    kv_mode: Mode | None
    grammar_field: str


def plan_completion(request: CompletionRequest, model: ServedModel) -> Plan:
    """Raises `RequestError` naming what cannot be served, `UnknownModelError` for another model."""
    check_model(request.model, model)
    special = request.add_special_tokens is not False
    prompts = _prompts(request.prompt, model, special)
    default = 16
    if request.max_tokens is None:  # with the plain default a long prompt would exceed the context
        default = max(1, min(16, model.max_model_len - max(len(p) for p in prompts)))
    max_tokens = default if request.max_tokens is None else request.max_tokens
    _check_lengths(prompts, max_tokens, "max_tokens", "prompt", model)
    params = sampling_params(request, max_tokens, request.logprobs, model.vocab_size)
    return _plan(request, model, prompts, params, chat=False)


def plan_chat(request: ChatRequest, model: ServedModel) -> Plan:
    """Raises `RequestError` naming what cannot be served, `UnknownModelError` for another model."""
    check_model(request.model, model)
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        if "reasoning_effort" not in model.tokenizer.template_variables:
            raise RequestError("reasoning_effort: this model's chat template knows no such thing", "reasoning_effort")
    prompt = chat_prompt(request, request.messages, variables, model)
    asked, param = request.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, param = request.max_tokens, "max_tokens"
    max_tokens = max(1, model.max_model_len - len(prompt)) if asked is None else asked
    if max_tokens < 1:
        raise RequestError(f"{param} must be at least 1, got {max_tokens}", param)
    _check_lengths([prompt], max_tokens, param, "messages", model)
    params = sampling_params(request, max_tokens, chat_logprobs(request), model.vocab_size)
    return _plan(request, model, [prompt], params, chat=True)


def chat_prompt(
    request: ChatRequest | TokenizeRequest, messages: list[Message], variables: dict[str, Any], model: ServedModel
) -> PromptIds:
    """The tokens of a conversation by the model's chat template, which gets `variables` too.

    Raises `RequestError` naming what cannot be served.
    """
    if not messages:
        raise RequestError("messages must not be empty", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages must be at most {MAX_MESSAGES} messages", "messages")
    shown = [_message(index, message) for index, message in enumerate(messages)]
    # Checked before the template runs, whose time grows with the messages.
    check_num_chars(sum(len(text) for message in shown for text in message.values()), "messages", model)
    goes_on = bool(request.continue_final_message)
    if goes_on and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    if goes_on:
        shown[-1]["content"] += _END
    begins = not goes_on and request.add_generation_prompt is not False
    text = model.tokenizer.apply_chat_template(shown, begins, variables)
    if goes_on:
        text = _until_end(text)
    # The template wrote BOS itself.
    return encode(text, model, request.add_special_tokens is True, "messages")


def _until_end(text: str) -> str:
    """A rendered conversation up to `_END`, without the spaces that its template would have trimmed there."""
    found = text.rfind(_END.strip())
    if found < 0:
        what = "continue_final_message"
        raise RequestError(f"{what}: the chat template does not show the end of the last message", what)
    return text[:found] if text.startswith(_END, found) else text[:found].rstrip()


def make_plan(body: bytes, model: ServedModel, chat: bool) -> Plan:
    """Return the plan of a request's body, which may take seconds for a long one; other threads run meanwhile.

    Raises as `decode`, `plan_completion` and `plan_chat` do.
    """
    if chat:
        return plan_chat(decode(body, ChatRequest), model)
    return plan_completion(decode(body, CompletionRequest), model)


def _plan(
    request: CompletionRequest | ChatRequest,
    model: ServedModel,
    prompts: list[PromptIds],
    params: SamplingParams,
    chat: bool,
) -> Plan:
    if len(prompts) * params.n > MAX_CHOICES:
        raise RequestError(f"prompts times n must be at most {MAX_CHOICES}", "n")
    plan_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    requests: list[GenerateRequest] = []
    for prompt in prompts:
        # A request without a seed gets one here, so that every leg and every retry draws the same noise.
        seed = model.default_seed if params.seed is None else params.seed
        seed = secrets.randbits(63) if seed is None else seed
        for index in range(params.n):
            own = msgspec.structs.replace(params, n=1, sample_index=index, seed=seed, stop=())
            requests.append(
                GenerateRequest(
                    request_id=f"{plan_id}-{len(requests)}",
                    prompt_token_ids=prompt,
                    sampling_params=own,
                    cache_salt=request.cache_salt,
                )
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
        grammar_field=structured_params(request.response_format, request.structured_outputs)[1],
    )


def check_model(asked: str | None, model: ServedModel) -> None:
    if asked is not None and asked != model.name:
        raise UnknownModelError(
            f"the model {reprlib.repr(asked)} does not exist; this endpoint serves {model.name!r}", "model"
        )


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


def check_num_chars(num_chars: int, param: str, model: ServedModel) -> None:
    """Raise `RequestError` for text that cannot fit whatever its tokens are, without the cost of tokenising it."""
    limit = model.max_model_len * model.tokenizer.max_token_chars
    if num_chars > limit:
        raise RequestError(
            f"{param} has {num_chars} characters, and this model's context of {model.max_model_len} tokens holds "
            f"at most {limit}",
            param,
        )


def encode(text: str, model: ServedModel, special: bool, param: str) -> PromptIds:
    check_num_chars(len(text), param, model)
    return PromptIds(model.tokenizer.encode(text, special))


def _prompts(value: str | list[str | int | list[int]], model: ServedModel, special: bool) -> list[PromptIds]:
    if isinstance(value, str):
        return [encode(value, model, special, "prompt")]
    if not value:
        raise RequestError("prompt must not be empty", "prompt")
    if len(value) > MAX_CHOICES and not isinstance(value[0], int):
        raise RequestError(f"prompt must be at most {MAX_CHOICES} prompts", "prompt")
    texts = [item for item in value if isinstance(item, str)]
    if len(texts) == len(value):
        return [encode(text, model, special, "prompt") for text in texts]
    if all(isinstance(item, int) for item in value):
        lists = [PromptIds(item for item in value if isinstance(item, int))]
    else:
        lists = [PromptIds(item) for item in value if isinstance(item, list)]
        if len(lists) != len(value):
            raise RequestError("prompt must be text(s) or (lists of) token ids, not a mixture", "prompt")
    for prompt in lists:
        if len(prompt) < model.max_model_len and not all(0 <= i < model.vocab_size for i in prompt):
            raise RequestError(f"prompt token ids must be in [0, {model.vocab_size})", "prompt")
    return lists


def _message(index: int, message: Message) -> dict[str, str]:
    param = f"messages[{index}].content"
    for name in ("tool_calls", "function_call", "audio", "refusal", "tools"):
        if getattr(message, name):
            raise RequestError(f"{name} is not supported in a message", f"messages[{index}].{name}")
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise RequestError(f"content parts of type {part.type!r} are not supported, only text", param)
        content = "".join(part.text or "" for part in content)
    out = {"role": message.role, "content": content or ""}
    for name in ("name", "reasoning_content", "reasoning", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    return out
