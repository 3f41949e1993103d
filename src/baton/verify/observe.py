"""Sends requests to a side (an engine in this process, or an OpenAI server) and records its answers."""

from __future__ import annotations

import asyncio
import pydoc_data.topics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from baton.engine.config import SpeculativeConfig
from baton.errors import BatonError, ProtocolError
from baton.openai.answers import Completion, Logprobs, answer_token_ids, token_id
from baton.openai.client import OpenAIClient
from baton.sampling_params import SamplingParams
from baton.text import Tokenizer
from baton.verify.prompts import Chat

if TYPE_CHECKING:
    from baton.engine.llm import LLM

REQUEST_TIMEOUT_S = 300.0
_BAR_DELAY_S = 2.0
# New tokens in a later turn.
_NEXT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt in token ids or a chat, and sampling parameters. A chat's token ids are for an engine in this process; a
    server gets the messages."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    chat: Chat | None = None

    def __str__(self) -> str:
        if self.chat is not None:
            return f"chat of {len(self.chat.messages)} messages"
        return f"prompt of {len(self.prompt_token_ids)} tokens"


@dataclass(frozen=True, slots=True)
class Observed:
    """One answer. What the source does not report is None. `error` is set without an answer.

    - `prompt_token_ids`: only of chats, from the side's template.
    - `top`: per token, the logprobs of the most likely token ids and of the chosen one.
    - `accepted`: accepted drafts per verification.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    top: tuple[dict[int, float], ...] | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    accepted: tuple[int, ...] | None = None
    num_speculative_tokens: int = 0
    prompt_token_ids: tuple[int, ...] | None = None
    error: str | None = None


def make_cases(tokenizer: Tokenizer, lengths: Sequence[int], params: SamplingParams) -> list[Case]:
    """One case per length: different excerpts of Python's documentation, the same on every machine."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = tokenizer.encode(text[: 600 * (max(lengths) + 400)], add_special_tokens=False)
    cases = []
    for index, length in enumerate(lengths):
        start = (index * 997) % (len(ids) - length)
        cases.append(Case(tuple(ids[start : start + length]), params))
    return cases


def next_turns(cases: Sequence[Case], answers: Sequence[Observed]) -> list[Case]:
    """Prompt, answer, and the prompt's first tokens again. A failed answer has no next turn."""
    turns = []
    for case, answer in zip(cases, answers, strict=True):
        if answer.error is None:
            repeated = case.prompt_token_ids[:_NEXT_TOKENS]
            turns.append(Case((*case.prompt_token_ids, *answer.token_ids, *repeated), case.params))
    return turns


def progress_bar(**options: Any) -> tqdm[NoReturn]:
    return tqdm(**{"desc": "answers"} | options, unit="request", delay=_BAR_DELAY_S, leave=False, disable=None)


def num_drafts(settings: Mapping[str, Any]) -> int:
    """0 if the engine chooses it: acceptance then differs between runs."""
    spec = SpeculativeConfig.parse(settings.get("speculative_config"))
    return 0 if spec is None or spec.num_speculative_tokens == "auto" else spec.num_speculative_tokens


def observe_llm(llm: LLM, cases: Sequence[Case], num_speculative_tokens: int) -> list[Observed]:
    prompts, params = [list(case.prompt_token_ids) for case in cases], [case.params for case in cases]
    results = llm.generate(prompts, params, use_tqdm=progress_bar)
    observed = []
    for case, result in zip(cases, results, strict=True):
        out = result.outputs[0]
        chosen = zip(out.token_ids, out.logprobs, strict=False)
        observed.append(
            Observed(
                token_ids=tuple(out.token_ids),
                logprobs=tuple(entry.logprob for entry in out.logprobs),
                top=tuple({token: entry.logprob} | dict(entry.top) for token, entry in chosen),
                finish_reason=out.finish_reason,
                num_prompt_tokens=len(result.prompt_token_ids),
                num_completion_tokens=len(out.token_ids),
                accepted=tuple(out.accepted),
                num_speculative_tokens=num_speculative_tokens,
                prompt_token_ids=case.prompt_token_ids if case.chat else None,
            )
        )
    return observed


async def observe_client(
    client: OpenAIClient,
    model: str,
    cases: Sequence[Case],
    concurrency: int,
    kv_mode: str | None = None,
    cache_salts: Sequence[str] | None = None,
) -> list[Observed]:
    """`POST /v1/completions` or `/v1/chat/completions`. A failed request is an `Observed` with its error.
    `cache_salts`: one per case."""
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int, case: Case) -> Observed:
        body = completion_body(model, case) if case.chat is None else chat_body(model, case, case.chat)
        if kv_mode is not None:
            body["kv_mode"] = kv_mode
        if cache_salts is not None:
            body["cache_salt"] = cache_salts[index]
        async with gate:
            try:
                answer = await (client.complete(body) if case.chat is None else client.chat(body))
                return observed(answer, case.params.max_tokens)
            except BatonError as error:
                return Observed(error=str(error))
            finally:
                bar.update()

    with progress_bar(total=len(cases)) as bar:
        return list(await asyncio.gather(*(one(index, case) for index, case in enumerate(cases))))


def completion_body(model: str, case: Case) -> dict[str, Any]:
    return _body(model, case.params) | {"prompt": list(case.prompt_token_ids), "logprobs": case.params.logprobs}


def chat_body(model: str, case: Case, chat: Chat) -> dict[str, Any]:
    """The model sees its tools, but calls stay text (`tool_choice` none), which needs no parser."""
    body = _body(model, case.params) | {"messages": chat.messages}
    if case.params.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": case.params.logprobs}
    if chat.tools:
        body |= {"tools": chat.tools, "tool_choice": "none"}
    if chat.chat_template_kwargs:
        body["chat_template_kwargs"] = chat.chat_template_kwargs
    return body


def _body(model: str, params: SamplingParams) -> dict[str, Any]:
    """Sets every parameter that a server may have a default for."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "ignore_eos": params.ignore_eos,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if params.temperature > 0:
        body["seed"] = params.seed
    return body


def observed(answer: Completion, max_tokens: int) -> Observed:
    """Raises `ProtocolError`."""
    choice = answer.choices[0]
    token_ids = answer_token_ids(choice)
    if len(token_ids) > max_tokens:
        raise ProtocolError(f"the server sent {len(token_ids)} tokens where at most {max_tokens} were asked for")
    spec, usage = choice.spec_decode, answer.usage
    return Observed(
        token_ids=tuple(token_ids),
        logprobs=_chosen(choice.logprobs, len(token_ids)),
        top=_top(choice.logprobs, len(token_ids)),
        finish_reason=choice.finish_reason,
        num_prompt_tokens=usage.prompt_tokens if usage else None,
        num_completion_tokens=usage.completion_tokens if usage else None,
        accepted=tuple(spec.accepted) if spec else None,
        num_speculative_tokens=spec.num_speculative_tokens if spec else 0,
        prompt_token_ids=None if answer.prompt_token_ids is None else tuple(answer.prompt_token_ids),
    )


def _chosen(logprobs: Logprobs | None, num_tokens: int) -> tuple[float, ...] | None:
    if logprobs is None:
        return None
    known = tuple(value for value in logprobs.token_logprobs if value is not None)
    if len(known) != num_tokens:
        raise ProtocolError(f"the server sent {len(known)} logprobs for {num_tokens} tokens")
    return known


def _top(logprobs: Logprobs | None, num_tokens: int) -> tuple[dict[int, float], ...] | None:
    if logprobs is None or logprobs.top_logprobs is None:
        return None
    if len(logprobs.top_logprobs) != num_tokens:
        raise ProtocolError(f"the server sent top_logprobs of {len(logprobs.top_logprobs)} for {num_tokens} tokens")
    tops = []
    for entry in logprobs.top_logprobs:
        ids = {token_id(name): value for name, value in (entry or {}).items()}
        tops.append({token: value for token, value in ids.items() if token is not None})
    return tuple(tops)
