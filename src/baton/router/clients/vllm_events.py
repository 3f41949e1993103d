"""The streamed response of one leg on a vLLM server, as chunks."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.errors import HandoffError, RequestError
from baton.openai.backend import Take
from baton.openai.client import read_event
from baton.router.clients.vllm_api import to_chunk, with_metrics
from baton.sampling_params import TokenId
from baton.wire import GenerateRequest, TokenChunk

_EVENT = b"data: {"


class _Choice(msgspec.Struct):
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: Any = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


class LegEvents:
    """`more`: the leg is limited to one token, which does not end the request. `is_padded`: see `with_metrics`. `last`:
    a chunk that waits for the server's metrics. `done`: the stream has ended. `where` names the server in errors.
    """

    def __init__(self, request: GenerateRequest, where: str, more: bool, is_padded: bool) -> None:
        self._request, self._where = request, where
        self._more, self._is_padded = more, is_padded
        self._position = request.num_known
        self.last: TokenChunk | None = None
        self.done = False

    def read(self, line: bytes) -> TokenChunk | None:
        """The chunk of a line, unless it is in `last`. Raises the errors of `read_event` and `to_chunk`."""
        try:
            event = read_event(line, self._where)
        except RequestError as error:
            if self._position == self._request.num_known:
                raise
            raise HandoffError("engine_error", str(error)) from None  # vLLM's own errors
        if event is None or event == "done":
            self.done = self.done or event == "done"
            return None
        if self.last is not None and event.metrics is not None:
            self.last = with_metrics(self._request, self.last, event.metrics, self._is_padded)
        if not event.choices:
            return None
        choice = event.choices[0]
        chunk = to_chunk(self._request, choice, self._position)
        self._position += len(chunk.token_ids)
        if choice.finish_reason is None:
            return chunk
        if self._more and choice.finish_reason == "length":
            self.last = TokenChunk(request_id=self._request.request_id)
            return without_finish(chunk)
        self.last = chunk
        return None

    def take(self, take: Take, line: bytes) -> bool:
        """In place of `read`. Raises msgspec's errors."""
        if not line.startswith(_EVENT) or self.last is not None:
            return False
        event = _EVENTS.decode(line[len(_EVENT) - 1 :])
        if event.error is not None or not event.choices:
            return False
        choice = event.choices[0]
        if choice.finish_reason is not None or choice.logprobs is not None or not choice.token_ids:
            return False
        tokens = choice.token_ids
        if not take(TokenChunk(request_id=self._request.request_id, token_ids=tokens, position=self._position)):
            return False
        self._position += len(tokens)
        return True


def without_finish(chunk: TokenChunk) -> TokenChunk:
    """A chunk of a leg limited to one token must not end the request."""
    return msgspec.structs.replace(chunk, finish_reason=None) if chunk.finish_reason == "length" else chunk
