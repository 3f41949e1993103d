"""Turns the token chunks of one choice into text deltas."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.openai.http.api_errors import error_of_chunk
from baton.parsing import Content, ParsedEvent, Parser, Reasoning
from baton.text import IncrementalDetokenizer, StopChecker, Tokenizer
from baton.wire import FinishReason, GenerateRequest, TokenChunk, TokenLogprobs

_ID_LETTERS = string.ascii_letters + string.digits


class Delta(msgspec.Struct):
    """The additions of one chunk to one choice, after detokenisation and stop strings. `text_offsets`: where each token
    begins in the choice's text, in characters."""

    text: str = ""
    token_ids: list[int] = []
    text_offsets: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[ParsedEvent] = []


class Times(msgspec.Struct, frozen=True):
    """Arrivals in seconds of one clock."""

    arrived: float
    first: float
    last: float


@dataclass(slots=True)
class Call:
    """A tool call. `id` is generated here."""

    id: str
    name: str
    arguments: str = ""


class ParsedAnswer:
    """What one choice's parser has found."""

    def __init__(self, parser: Parser | None) -> None:
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[Call] = []

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def push(self, text: str, is_last: bool) -> list[ParsedEvent]:
        if self._parser is None:
            return []
        events = self._parser.push(text) if text else []
        events += self._parser.finish() if is_last else []
        for event in events:
            self._found(event)
        return events

    def _found(self, event: ParsedEvent) -> None:
        if isinstance(event, Content):
            self._content.append(event.text)
        elif isinstance(event, Reasoning):
            self._reasoning.append(event.text)
        else:
            if event.index == len(self.calls):
                self.calls.append(Call(_call_id(), event.name or ""))
            self.calls[event.index].arguments += event.arguments


class ChoiceOutput:
    """The growing output of one `GenerateRequest`. `times` and `route` (the backend's reason) are set at the end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: GenerateRequest,
        stop: Sequence[str] | None = None,
        parser: Parser | None = None,
        spelt: frozenset[int] = frozenset(),
    ) -> None:
        """`stop` None: the request's own stop strings (legs have none). `spelt`: special tokens that are text even if
        others are skipped."""
        self.parsed = ParsedAnswer(parser)
        params = request.sampling_params
        self._params = params
        hides = params.skip_special_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, hides, spelt)
        stop = params.stop if stop is None else stop
        self._stop = StopChecker(stop, params.include_stop_str_in_output)
        self._is_plain = parser is None and not stop
        self._pieces: list[str] = []
        self._num_chars = 0  # before stop strings
        self.token_ids: list[int] = []
        self.text_offsets: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.accepted: list[int] = []
        self.drafted: list[int] = []
        self.times: Times | None = None
        self.route: str | None = None
        self.num_cached_tokens = 0
        self.queued_s: float | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, chunk: TokenChunk) -> Delta:
        """No chunk may follow a delta with `finish_reason`. Raises the `BatonError` of an error chunk."""
        if chunk.finish_reason == "error":
            raise error_of_chunk(chunk.error)
        if chunk.finish_reason == "abort":
            raise error_of_chunk("shutdown: the engine aborted the request")
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = chunk.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, chunk.num_cached_tokens)
        if chunk.queued_s is not None:
            self.queued_s = chunk.queued_s
        num_used = len(chunk.token_ids)
        # A stop token is counted, but is not in the text.
        hides_last = chunk.finish_reason == "stop" and not self._params.include_stop_str_in_output
        num_shown = num_used - 1 if hides_last else num_used
        text, num_before = "", len(self.token_ids)
        offsets: list[int] = []
        for index, token_id in enumerate(chunk.token_ids):
            offsets.append(self._num_chars)
            if index == num_shown:
                break
            piece = self._detokenizer.push(token_id)
            self._num_chars += len(piece)
            text += self._stop.push(piece, num_before + index >= self._params.min_tokens)
            if self._stop.matched is not None:
                num_used = index + 1
                break
        delta = Delta(text, chunk.token_ids[:num_used], offsets)
        if self._stop.matched is None and chunk.finish_reason is not None:
            delta.text += self._stop.push(self._detokenizer.flush())
            if self._stop.matched is None:
                delta.text += self._stop.flush()
        if self._stop.matched is not None:
            delta.finish_reason, delta.stop_reason = "stop", self._stop.matched
        else:
            delta.finish_reason, delta.stop_reason = chunk.finish_reason, chunk.stop_reason
        if chunk.logprobs is not None:
            delta.logprobs = list(chunk.logprobs[:num_used])
        if chunk.accepted:
            num_rounds = _rounds_used(chunk, num_used)
            self.accepted += chunk.accepted[:num_rounds]
            self.drafted += chunk.drafted[:num_rounds]
        self._add(delta)
        return delta

    def push_plain(self, chunk: TokenChunk) -> str | None:
        """`push` one token of a chunk that `only_adds_tokens`, and return its text. None: `push` it."""
        tokens = chunk.token_ids
        if not self._is_plain or len(tokens) != 1 or chunk.accepted or chunk.num_cached_tokens:
            return None
        text = self._detokenizer.push(tokens[0])
        self.token_ids.append(tokens[0])
        self.text_offsets.append(self._num_chars)
        self._num_chars += len(text)
        self._pieces.append(text)
        return text

    def _add(self, delta: Delta) -> None:
        self._pieces.append(delta.text)
        delta.events = self.parsed.push(delta.text, delta.finish_reason is not None)
        self.token_ids += delta.token_ids
        self.text_offsets += delta.text_offsets
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


def _call_id() -> str:
    """Mistral's chat templates accept only this form."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


def _rounds_used(chunk: TokenChunk, num_used: int) -> int:
    """How many verifications of `chunk` produced its first `num_used` tokens.

    Those after a stop string are excluded: their number depends on timing. Each verification yields its accepted drafts
    and one more token; tokens without a verification come first.
    """
    start = max(0, len(chunk.token_ids) - sum(a + 1 for a in chunk.accepted))
    for number, accepted in enumerate(chunk.accepted):
        if start >= num_used and num_used < len(chunk.token_ids):
            return number
        start += accepted + 1
    return len(chunk.accepted)
