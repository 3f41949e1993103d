"""One choice of a response: token chunks in, text pieces with their tokens and logprobs out."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.openai.errors import error_of_chunk
from baton.parsing import Content, ParsedEvent, Parser, Reasoning
from baton.text import IncrementalDetokenizer, StopChecker, Tokenizer
from baton.wire import FinishReason, GenerateRequest, TokenChunk, TokenLogprobs

_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class Delta:
    """What one chunk added to one choice, after detokenisation and stop strings. `text_offsets`: where in the text of
    the choice each token begins, in characters; the parts of a character begin where it does."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[ParsedEvent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Times:
    """When a request came and when its first and its last token did, in seconds of one clock."""

    arrived: float
    first: float
    last: float


@dataclass(slots=True)
class Call:
    """A tool call, as far as it has come. `id` is this answer's own."""

    id: str
    name: str
    arguments: str = ""


class SampleOutput:
    """The growing output of one `GenerateRequest`.

    Totals are kept for the end: `text`, `token_ids`, `text_offsets`, `logprobs`, `accepted` (draft tokens accepted per
    verification round), `drafted` (of how many), `num_cached_tokens`, `queued_s`, `finish_reason`, `stop_reason`.
    `times` once it has ended. With a `parser` also what it finds in the text: `content`, `reasoning`, `calls`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: GenerateRequest,
        stop: Sequence[str] | None = None,
        parser: Parser | None = None,
        spelt: frozenset[int] = frozenset(),
    ) -> None:
        """`stop` None: the stop strings of the request itself, which legs are not sent. `spelt`: special tokens that
        are text where others are hidden."""
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[Call] = []
        params = request.sampling_params
        self._params = params
        hides = params.skip_special_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, hides, spelt)
        self._stop = StopChecker(params.stop if stop is None else stop, params.include_stop_str_in_output)
        self._pieces: list[str] = []
        self._num_chars = 0  # before stop strings
        self.token_ids: list[int] = []
        self.text_offsets: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.accepted: list[int] = []
        self.drafted: list[int] = []
        self.times: Times | None = None
        self.num_cached_tokens = 0
        self.queued_s: float | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    @property
    def content(self) -> str:
        """All words for the reader so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "".join(self._reasoning)

    def push(self, chunk: TokenChunk) -> Delta:
        """Add one chunk. After a delta with `finish_reason` nothing more may be pushed.

        Raises the chunk's error, when it is one, as the `BatonError` it names.
        """
        if chunk.finish_reason == "error":
            raise error_of_chunk(chunk.error)
        if chunk.finish_reason == "abort":
            raise error_of_chunk("shutdown: the engine aborted the request")
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = chunk.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, chunk.num_cached_tokens)
        if chunk.queued_s is not None:
            self.queued_s = chunk.queued_s
        delta = Delta()
        # A token that stops the sequence (EOS or one of stop_token_ids) is counted but not spelt.
        hides_last = chunk.finish_reason == "stop" and not self._params.include_stop_str_in_output
        num_used = len(chunk.token_ids)
        for index, token_id in enumerate(chunk.token_ids):
            delta.token_ids.append(token_id)
            delta.text_offsets.append(self._num_chars)
            if hides_last and index == len(chunk.token_ids) - 1:
                break
            armed = len(self.token_ids) + len(delta.token_ids) > self._params.min_tokens
            piece = self._detokenizer.push(token_id)
            self._num_chars += len(piece)
            delta.text += self._stop.push(piece, armed)
            if self._stop.matched is not None:
                num_used = index + 1
                break
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
        num_rounds = _rounds_used(chunk, num_used)
        self.accepted += chunk.accepted[:num_rounds]
        self.drafted += chunk.drafted[:num_rounds]
        self._add(delta)
        return delta

    def _add(self, delta: Delta) -> None:
        self._pieces.append(delta.text)
        if self._parser is not None:
            delta.events = self._parser.push(delta.text) if delta.text else []
            delta.events += self._parser.finish() if delta.finish_reason is not None else []
            for event in delta.events:
                self._found(event)
        self.token_ids += delta.token_ids
        self.text_offsets += delta.text_offsets
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def _found(self, event: ParsedEvent) -> None:
        if isinstance(event, Content):
            self._content.append(event.text)
        elif isinstance(event, Reasoning):
            self._reasoning.append(event.text)
        else:
            if event.index == len(self.calls):
                self.calls.append(Call(_call_id(), event.name or ""))
            self.calls[event.index].arguments += event.arguments


def _call_id() -> str:
    """Nine letters and digits: the only ids that Mistral's chat templates take in the messages of a next request."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


def _rounds_used(chunk: TokenChunk, num_used: int) -> int:
    """Return how many rounds of `chunk` made its first `num_used` tokens.

    A chunk may carry several engine steps; a stop string in the first must not count the rounds after it, or
    figures would depend on timing. A round makes its accepted tokens and one more; tokens of no round come
    first.
    """
    start = max(0, len(chunk.token_ids) - sum(a + 1 for a in chunk.accepted))
    for number, accepted in enumerate(chunk.accepted):
        if start >= num_used and num_used < len(chunk.token_ids):
            return number
        start += accepted + 1
    return len(chunk.accepted)
