"""What is asked of both sides, and what is seen of an answer; sources are an in-process engine or an OpenAI URL."""

from __future__ import annotations

import asyncio
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from baton.errors import BatonError, EngineUnavailableError
from baton.text import Tokenizer
from baton.wire import SamplingParams

REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """One request: a prompt in token ids and how to sample."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams

    @property
    def length(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Observed:
    """One answer. `accepted` is None where the source does not tell; `error` set means there is no answer."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    accepted: tuple[int, ...] | None = None
    num_speculative_tokens: int = 0
    error: str | None = None


def make_cases(tokenizer: Tokenizer, lengths: Sequence[int], params: SamplingParams) -> list[Case]:
    """One case per length: excerpts of Python's own documentation, each from another place, the same everywhere."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = tokenizer.encode(text[: 600 * (max(lengths) + 400)], add_special_tokens=False)
    cases = []
    for index, length in enumerate(lengths):
        start = (index * 997) % (len(ids) - length)
        cases.append(Case(tuple(ids[start : start + length]), params))
    return cases


def observe_in_process(settings: dict[str, Any], cases: Sequence[Case]) -> list[Observed]:
    """Answers of one engine in this process. `settings` are those of `baton.LLM`, `model` included."""
    from baton.engine.llm import LLM

    with LLM(**settings) as llm:
        results = llm.generate([list(case.prompt_token_ids) for case in cases], [case.params for case in cases])
    spec = settings.get("speculative_config") or {}
    observed = []
    for result in results:
        out = result.outputs[0]
        observed.append(
            Observed(
                token_ids=tuple(out.token_ids),
                logprobs=tuple(entry.logprob for entry in out.logprobs),
                finish_reason=out.finish_reason,
                num_prompt_tokens=len(result.prompt_token_ids),
                num_completion_tokens=len(out.token_ids),
                accepted=tuple(out.accepted),
                num_speculative_tokens=spec.get("num_speculative_tokens", 3) if spec else 0,
            )
        )
    return observed


async def observe_url(
    url: str, model: str, cases: Sequence[Case], concurrency: int, kv_mode: str | None = None
) -> list[Observed]:
    """Answers of `POST {url}/v1/completions`. A failed request is an `Observed` with its error, not an exception."""
    gate = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(case: Case) -> Observed:
            async with gate:
                try:
                    return await _complete(session, url, model, case, kv_mode)
                except (aiohttp.ClientError, asyncio.TimeoutError, BatonError, LookupError) as error:
                    return Observed(error=f"{type(error).__name__}: {error}")

        return list(await asyncio.gather(*(one(case) for case in cases)))


async def _complete(session: aiohttp.ClientSession, url: str, model: str, case: Case, kv_mode: str | None) -> Observed:
    params = case.params
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(case.prompt_token_ids),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "seed": params.seed,
        "ignore_eos": params.ignore_eos,
        "logprobs": params.logprobs,
        "return_token_ids": True,
    }
    if kv_mode is not None:
        body["kv_mode"] = kv_mode
    async with session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json(content_type=None)
        if response.status != 200:
            message = answer.get("error", {}).get("message", answer) if isinstance(answer, dict) else answer
            return Observed(error=f"HTTP {response.status}: {message}")
    choice = answer["choices"][0]
    spec = choice.get("spec_decode")
    logprobs = choice.get("logprobs")
    return Observed(
        token_ids=tuple(choice["token_ids"]),
        logprobs=tuple(logprobs["token_logprobs"]) if logprobs else None,
        finish_reason=choice["finish_reason"],
        num_prompt_tokens=answer["usage"]["prompt_tokens"],
        num_completion_tokens=answer["usage"]["completion_tokens"],
        accepted=tuple(spec["accepted"]) if spec else None,
        num_speculative_tokens=spec["num_speculative_tokens"] if spec else 0,
    )


async def served_model(url: str) -> str:
    """Name of the first model of `GET {url}/v1/models`. Raises EngineUnavailableError when nothing answers."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            return str((await response.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, asyncio.TimeoutError, LookupError, ValueError, TypeError) as error:
        raise EngineUnavailableError(f"{url} lists no model: {error}") from None
