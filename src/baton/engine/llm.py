"""Offline generation in one process, as in vLLM."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
from tqdm import tqdm

from baton.engine.build import build_engine
from baton.engine.config import EngineConfig, declared_settings
from baton.engine.metrics import EngineMetrics
from baton.engine.request_checks import make_request
from baton.errors import ConfigError, RequestError
from baton.openai.output import ChoiceOutput
from baton.sampling_params import SamplingParams
from baton.text.content_format import ContentFormatOption
from baton.wire import FinishReason, GenerateRequest, TokenChunk, TokenLogprobs, check_salt

# Text, token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
_IDS = "prompt_token_ids"


@dataclass(slots=True)
class CompletionOutput:
    """`accepted`: accepted drafts per verification."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    accepted: list[int]


@dataclass(slots=True)
class RequestOutput:
    """All samples of one prompt. `prompt`: if it came as text. `prompt_logprobs`: as `TokenChunk`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class LLM:
    """An engine in the caller's thread. Takes `EngineConfig`'s fields; `speculative_config` may be a dict.

    Raises `ConfigError` for an unknown or bad setting, `CheckpointError` for a bad checkpoint.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self._chunks: dict[str, list[TokenChunk]] = {}
        config = _config(model, settings)
        self._skips_tokenizer = config.skip_tokenizer_init
        self._engine = build_engine(config, self._emit)
        self._ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees pool and weights; `metrics` stays."""
        self._engine.close()

    @property
    def metrics(self) -> EngineMetrics:
        core = self._engine.core
        core.metrics.num_preemptions = core.scheduler.num_preemptions
        return core.metrics

    def get_default_sampling_params(self) -> SamplingParams:
        defaults = self._engine.info.sampling_defaults
        params = SamplingParams(**defaults.given())
        if defaults.max_tokens is None:
            return params
        return msgspec.structs.replace(params, max_tokens=defaults.max_tokens)

    def _emit(self, chunk: TokenChunk, last: bool) -> None:
        self._chunks[chunk.request_id].append(chunk)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormatOption = "auto",
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One conversation, or each of many. `chat_template`: Jinja text in place of the model's.
        `chat_template_content_format`: the template gets the content of messages as one `string`, or as a list of parts
        (`openai`); `auto` detects it.

        Raises `RequestError` for messages that the template refuses, `ConfigError`, and as `generate`.
        """
        chats: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokenizer = self._engine.tokenizer.with_templates(chat_template, chat_template_content_format)
        prompts = []
        for chat in chats:
            text = tokenizer.apply_chat_template(chat, add_generation_prompt, chat_template_kwargs, tools)
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Complete one prompt, or each of many, in order. `use_tqdm`: may be a callable that makes another bar like
        tqdm's.

        Raises `RequestError` before anything has run, or the first request's error, and aborts the others.
        """
        alone = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many: Any = [prompts] if alone else prompts
        if isinstance(sampling_params, Sequence):
            params = list(sampling_params)
        else:
            params = [sampling_params or self.get_default_sampling_params()] * len(many)
        engine = self._engine
        results: list[RequestOutput] = []
        samples: list[list[ChoiceOutput]] = []
        records = []
        for prompt, one in zip(many, params, strict=True):
            text, ids, salt = self._read_prompt(prompt)
            results.append(RequestOutput(f"llm-{next(self._ids)}", text, ids, 0))
            outputs = []
            for index in range(one.n):
                wire = GenerateRequest(
                    request_id=f"{results[-1].request_id}-{index}",
                    prompt_token_ids=ids,
                    sampling_params=msgspec.structs.replace(one, n=1, sample_index=one.sample_index + index),
                    cache_salt=salt,
                )
                records.append(make_request(engine, wire))
                outputs.append(ChoiceOutput(engine.tokenizer, wire))
            samples.append(outputs)
        self._chunks = {record.request_id: [] for record in records}
        try:
            for record in records:
                engine.core.add(record)
            with _bar(use_tqdm, len(results)) as bar:
                self._run(results, samples, bar.update)
        finally:
            for record in records:  # if one has failed, the others still run
                engine.core.abort(record.request_id)
        for result, outputs in zip(results, samples, strict=True):
            result.num_cached_tokens = outputs[0].num_cached_tokens
            result.prompt_logprobs = outputs[0].prompt_logprobs or None
            for index, out in enumerate(outputs):
                result.outputs.append(
                    CompletionOutput(
                        index, out.text, out.token_ids, out.logprobs, out.finish_reason, out.stop_reason, out.accepted
                    )
                )
        return results

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        if not isinstance(prompt, Mapping):
            prompt = {"prompt" if isinstance(prompt, str) else _IDS: prompt}
        if not prompt or not {"cache_salt"} < {*prompt, "cache_salt"} <= {"prompt", _IDS, "cache_salt"}:
            raise RequestError(
                f"a prompt has prompt or {_IDS}, cache_salt, and nothing else: {sorted(prompt)}", "prompt"
            )
        text, ids = prompt.get("prompt"), prompt.get(_IDS)
        if ids is None:
            if self._skips_tokenizer:
                raise RequestError(f"must be {_IDS}, since skip_tokenizer_init is on", "prompt")
            ids = self._engine.tokenizer.encode(str(text))
        return text, list(ids), check_salt(prompt.get("cache_salt"))

    def _run(
        self,
        results: Sequence[RequestOutput],
        samples: Sequence[Sequence[ChoiceOutput]],
        complete: Callable[[], object],
    ) -> None:
        """`complete`: called after each prompt's last sample."""
        core = self._engine.core
        left = Counter({result.request_id: len(outputs) for result, outputs in zip(results, samples, strict=True)})
        open_samples = {
            f"{result.request_id}-{index}": sample
            for result, outputs in zip(results, samples, strict=True)
            for index, sample in enumerate(outputs)
        }
        while open_samples:
            core.turn()
            for request_id, sample in list(open_samples.items()):
                chunks, self._chunks[request_id] = self._chunks[request_id], []
                for chunk in chunks:
                    sample.push(chunk)
                    if sample.finish_reason is not None:
                        # A stop string may end a sample that the engine would continue.
                        del open_samples[request_id]
                        core.abort(request_id)
                        prompt = request_id.rpartition("-")[0]
                        left[prompt] -= 1
                        if not left[prompt]:
                            complete()
                        break


def _bar(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    if callable(use_tqdm):
        return use_tqdm(total=total)
    disable = None if use_tqdm else True  # None: off if not a terminal
    return tqdm(total=total, desc="Processed prompts", unit="prompt", delay=1.0, leave=False, disable=disable)


def _config(model: str, settings: dict[str, Any]) -> EngineConfig:
    known = {one.name for one in fields(EngineConfig)}
    for name in settings:
        if name not in known:
            raise ConfigError(name, f"is unknown; known: {', '.join(sorted(known))}")
    settings.setdefault("max_decode_gap_s", 0.0)
    for name, one in declared_settings(EngineConfig).items():
        if one.setting.parse is not None and isinstance(settings.get(name), str | dict):
            settings[name] = one.setting.parse(settings[name])
    return EngineConfig(model=model, **settings).check().located()
