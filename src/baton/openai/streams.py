"""Streams of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Generic, TypeVar

from baton.openai.format import PlainEvents
from baton.openai.output import ChoiceOutput, Delta
from baton.openai.records import SequenceRecord
from baton.wire import TokenChunk

T = TypeVar("T")


class ShortCut:
    """From a chunk that adds plain text to the client, without waking a task. `write` sends an event, once the response
    has begun, and raises `ConnectionResetError`; `plain` makes it, once the first one is sent.
    """

    def __init__(self) -> None:
        self.write: Callable[[bytes], None] | None = None
        self.plain: PlainEvents | None = None


class LastEvents(bytes):
    """The end of a stream, in one packet."""


class ChoiceSequence:
    """Pushes the chunks of one choice into its output and its record. While the reader waits, plain text takes the
    short cut."""

    def __init__(self, output: ChoiceOutput, record: SequenceRecord, short_cut: ShortCut | None) -> None:
        self._output, self._record, self._short_cut = output, record, short_cut
        self._last: Delta | None = None

    def push(self, chunk: TokenChunk) -> Delta:
        """Raises the errors of `ChoiceOutput.push`."""
        if self._last is not None:
            return self._last
        output, record = self._output, self._record
        num_rounds = len(output.accepted)
        delta = output.push(chunk)
        record.tokens(len(delta.token_ids), output.accepted[num_rounds:])
        record.num_cached_tokens = output.num_cached_tokens
        return delta

    def take(self, chunk: TokenChunk) -> bool:
        """Push and send a chunk that only adds tokens. False if that cannot be done yet, or if a stop string is
        complete: the next `push` then returns the end.
        """
        cut = self._short_cut
        if cut is None or cut.write is None or cut.plain is None or self._last is not None:
            return False
        text = self._output.push_plain(chunk)
        if text is not None:
            self._record.tokens(1)
        else:
            delta = self.push(chunk)
            if delta.finish_reason is not None:
                self._last = delta
                return False
            text = delta.text
        if text:
            try:
                cut.write(cut.plain.event(text))
            except ConnectionResetError:
                return True  # the client has left: the task is being cancelled
        return True


class StartedStream(AsyncGenerator[T, None], Generic[T]):
    """A generator whose first item is already there."""

    def __init__(self, first: T, rest: AsyncGenerator[T, None], short_cut: ShortCut | None = None) -> None:
        self._first: list[T] = [first]
        self._rest = rest
        self.short_cut = short_cut

    @classmethod
    async def of(cls, items: AsyncGenerator[T, None], short_cut: ShortCut | None = None) -> StartedStream[T]:
        return cls(await anext(items), items, short_cut)

    def __anext__(self) -> Coroutine[Any, Any, T]:
        return self.asend(None)

    def asend(self, value: None) -> Coroutine[Any, Any, T]:
        return _value(self._first.pop()) if self._first else self._rest.asend(value)

    def athrow(self, *error: Any) -> Coroutine[Any, Any, T]:
        return self._rest.athrow(*error)

    def aclose(self) -> Coroutine[Any, Any, None]:
        return self._rest.aclose()


async def _value(value: T) -> T:
    return value
