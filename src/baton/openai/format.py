"""Response bodies of the OpenAI API."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from baton.openai.answers import Logprobs, SpecDecode, Usage
from baton.openai.output import ChoiceOutput, Delta
from baton.openai.plan import Plan
from baton.parsing import Content, Reasoning
from baton.text import IncrementalDetokenizer
from baton.wire import FinishReason, TokenLogprobs

Json = dict[str, Any]
# Never sent.
_MARK = secrets.token_hex(16)


def usage(plan: Plan, outputs: Sequence[ChoiceOutput]) -> Usage:
    """A prompt counts once for all its choices. Drafts are not counted if the engine reports no verifications
    (vLLM).
    """
    num_prompt = sum(len(prompt) for prompt in plan.prompts)
    num_output = sum(len(output.token_ids) for output in outputs)
    k = plan.model.num_speculative_tokens
    accepted = sum(sum(output.accepted) for output in outputs)
    drafted = sum(sum(output.drafted) for output in outputs)
    # The choices of a prompt share its cached tokens.
    per_prompt = max(1, len(outputs) // len(plan.prompts))
    cached = sum(output.num_cached_tokens for output in outputs[::per_prompt])
    drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    known = drafts if drafted or not k else None
    return Usage(num_prompt, num_output, num_prompt + num_output, {"cached_tokens": cached}, known)


def usage_so_far(plan: Plan, index: int, num_output: int) -> Usage:
    num_prompt = len(plan.requests[index].prompt_token_ids)
    return Usage(num_prompt, num_output, num_prompt + num_output)


def response_body(plan: Plan, outputs: Sequence[ChoiceOutput]) -> Json:
    choices = []
    for index, output in enumerate(outputs):
        choice = _choice(plan, index, output)
        if plan.echo:
            _echo(plan, index, output, choice)
        elif plan.chat:
            choice["message"] = {"role": "assistant"} | _message(plan, output)
        else:
            choice["text"] = output.text
        choice["finish_reason"] = _finish_reason(plan, output, output.finish_reason)
        choice["stop_reason"] = output.stop_reason
        if plan.prompt_logprobs is not None and not plan.chat:
            choice["prompt_logprobs"] = _prompt_logprobs(plan, index, output)
        if plan.return_token_ids:
            choice["spec_decode"] = SpecDecode(output.accepted, plan.model.num_speculative_tokens)
            if not plan.chat:
                choice["prompt_token_ids"] = plan.requests[index].prompt_token_ids
        choices.append(choice)
    body = _head(plan, "chat.completion" if plan.chat else "text_completion")
    body |= {"choices": choices, "usage": usage(plan, outputs)}
    if plan.chat and plan.prompt_logprobs is not None:
        body["prompt_logprobs"] = _prompt_logprobs(plan, 0, outputs[0])
    if plan.chat and plan.return_token_ids:
        body["prompt_token_ids"] = plan.prompts[0]
    return body


def stream_event(plan: Plan, index: int, delta: Delta, output: ChoiceOutput, first: bool) -> Json:
    choice = _choice(plan, index, delta)
    if plan.chat:
        choice["delta"] = ({"role": "assistant"} if first else {}) | _delta(plan, delta, output)
    else:
        choice["text"] = delta.text
    choice["finish_reason"] = _finish_reason(plan, output, delta.finish_reason)
    choice["stop_reason"] = delta.stop_reason
    body = _head(plan, "chat.completion.chunk" if plan.chat else "text_completion")
    body["choices"] = [choice]
    if plan.return_token_ids:
        if delta.finish_reason is not None:
            choice["spec_decode"] = SpecDecode(output.accepted, plan.model.num_speculative_tokens)
        if first and plan.chat:
            body["prompt_token_ids"] = plan.prompts[0]
        elif first:
            choice["prompt_token_ids"] = plan.requests[index].prompt_token_ids
    if plan.include_usage:
        body["usage"] = None
    return body


class PlainEvents:
    """Events that differ in their text alone; the rest is encoded once."""

    def __init__(self, plan: Plan, index: int, output: ChoiceOutput) -> None:
        self._plan, self._index, self._output = plan, index, output
        self._parts: tuple[bytes, bytes] | None = None

    def event(self, text: str) -> bytes:
        before, after = self._parts or self._split()
        return before + msgspec.json.encode(text) + after

    def _split(self) -> tuple[bytes, bytes]:
        whole = encode_event(stream_event(self._plan, self._index, Delta(text=_MARK), self._output, False))
        before, after = whole.split(b'"%b"' % _MARK.encode())
        self._parts = before, after
        return self._parts


def encode_event(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def streamed_usage(plan: Plan, outputs: Sequence[ChoiceOutput]) -> Json:
    """The last event of a stream with `include_usage`."""
    body = _head(plan, "chat.completion.chunk" if plan.chat else "text_completion")
    return body | {"choices": [], "usage": usage(plan, outputs)}


def is_visible(plan: Plan, delta: Delta) -> bool:
    if delta.finish_reason is not None or plan.reader is None:
        return bool(delta.text or delta.finish_reason)
    return any(plan.returns_reasoning or not isinstance(event, Reasoning) for event in delta.events)


def _finish_reason(plan: Plan, output: ChoiceOutput, reason: FinishReason | None) -> str | None:
    return "tool_calls" if reason == "stop" and output.parsed.calls and plan.returns_calls else reason


def _message(plan: Plan, output: ChoiceOutput) -> Json:
    if plan.reader is None:
        return {"content": output.text}
    message: Json = {"content": output.parsed.content or (None if output.parsed.calls else "")}
    if plan.returns_reasoning and output.parsed.reasoning:
        # Names of DeepSeek and of vLLM.
        message["reasoning_content"] = message["reasoning"] = output.parsed.reasoning
    if output.parsed.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in output.parsed.calls
        ]
    return message


def _delta(plan: Plan, delta: Delta, output: ChoiceOutput) -> Json:
    """Only the first part of a call has its id and name."""
    if plan.reader is None:
        return {"content": delta.text}
    fields: Json = {}
    calls: dict[int, Json] = {}
    for event in delta.events:
        if isinstance(event, Content):
            fields["content"] = fields.get("content", "") + event.text
        elif isinstance(event, Reasoning):
            if plan.returns_reasoning:
                fields["reasoning_content"] = fields["reasoning"] = fields.get("reasoning", "") + event.text
        else:
            call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            if event.name is not None:
                call |= {"id": output.parsed.calls[event.index].id, "type": "function"}
                call["function"] = {"name": event.name, "arguments": call["function"]["arguments"]}
            call["function"]["arguments"] += event.arguments
    return fields | ({"tool_calls": list(calls.values())} if calls else {})


def _head(plan: Plan, kind: str) -> Json:
    return {"id": plan.id, "object": kind, "created": plan.created, "model": plan.model.name}


def _choice(plan: Plan, index: int, said: Delta | ChoiceOutput) -> Json:
    choice: Json = {"index": index, "logprobs": None}
    if plan.requests[index].sampling_params.logprobs is not None:
        if plan.chat:
            choice["logprobs"] = _chat_logprobs(plan, said.token_ids, said.logprobs)
        else:
            choice["logprobs"] = _completion_logprobs(plan, said.token_ids, said.logprobs, said.text_offsets)
    if plan.return_token_ids:
        choice["token_ids"] = list(said.token_ids)
    return choice


def _echo(plan: Plan, index: int, output: ChoiceOutput, choice: Json) -> None:
    """The prompt comes before the output, in text and logprobs."""
    prompt = plan.requests[index].prompt_token_ids
    detokenizer = IncrementalDetokenizer(plan.model.tokenizer, skip_special_tokens=False)
    text, offsets = "", []
    num_added = plan.num_added[index // (len(plan.requests) // len(plan.prompts))]
    for number, token in enumerate(prompt):
        offsets.append(len(text))
        text += detokenizer.push(token) if number >= num_added else ""
    if not output.text:
        text += detokenizer.flush()  # the output may complete the last character
    choice["text"] = text + output.text
    num_top = plan.requests[index].sampling_params.logprobs
    if num_top is not None:
        scores = [s and TokenLogprobs(s.logprob, s.top[:num_top], s.rank) for s in output.prompt_logprobs]
        tokens = [*prompt, *output.token_ids]
        offsets += [len(text) + offset for offset in output.text_offsets]
        choice["logprobs"] = _completion_logprobs(plan, tokens, [*scores, *output.logprobs], offsets)
    if plan.return_token_ids:
        choice["token_ids"] = [*prompt, *output.token_ids]


def _prompt_logprobs(plan: Plan, index: int, output: ChoiceOutput) -> list[Json | None]:
    """Per token its own entry and the most likely ones, by token id, as in vLLM."""
    text, found = plan.model.tokenizer.token_text, list[Json | None]()
    for token, score in zip(plan.requests[index].prompt_token_ids, output.prompt_logprobs, strict=True):
        if score is None:
            found.append(None)
            continue
        entries = {i: (value, rank) for rank, (i, value) in enumerate(score.top[: plan.prompt_logprobs], 1)}
        entries[token] = score.logprob, score.rank
        found.append({str(i): {"logprob": v, "rank": r, "decoded_token": text(i)} for i, (v, r) in entries.items()})
    return found


def _token_name(plan: Plan, token_id: int) -> str:
    """An incomplete character is named `bytes:...`, as in OpenAI's API."""
    if plan.return_tokens_as_token_ids:
        return f"token_id:{token_id}"
    name = plan.model.tokenizer.token_text(token_id)
    return name if name.encode() == plan.model.tokenizer.spelling.token_bytes(token_id) else f"bytes:{name}"


def _completion_logprobs(
    plan: Plan, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offsets: Sequence[int]
) -> Logprobs:
    top = [
        None if entry is None else _alternatives(plan, token, entry)
        for token, entry in zip(token_ids, logprobs, strict=False)
    ]
    names = [_token_name(plan, i) for i in token_ids]
    return Logprobs([None if entry is None else entry.logprob for entry in logprobs], top, names, list(offsets))


def _alternatives(plan: Plan, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
    """Logprobs by name. Of two tokens with the same text, the less likely is `token_id:N`."""
    own = _token_name(plan, token_id)
    logprobs: dict[str, float] = {}
    for other, value in entry.top:
        if other != token_id:
            name = _token_name(plan, other)
            logprobs[f"token_id:{other}" if name == own or name in logprobs else name] = value
    return {own: entry.logprob} | logprobs


def _chat_logprobs(plan: Plan, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json:
    tokenizer = plan.model.tokenizer

    def entry(token_id: int, logprob: float) -> Json:
        name = f"token_id:{token_id}" if plan.return_tokens_as_token_ids else tokenizer.token_text(token_id)
        return {"token": name, "logprob": logprob, "bytes": list(tokenizer.spelling.token_bytes(token_id))}

    content = [
        entry(i, value.logprob) | {"top_logprobs": [entry(j, other) for j, other in value.top]}
        for i, value in zip(token_ids, logprobs, strict=False)
    ]
    return {"content": content, "refusal": None}
