"""Responses of an API whose requests run as chats: one body, or a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Protocol

from baton.openai.format import Json
from baton.openai.http.api_errors import ApiError, to_api_error
from baton.openai.output import ChoiceOutput, Delta
from baton.openai.plan import Plan
from baton.openai.service import OpenAIService
from baton.openai.streams import StartedStream


class ChatAnswer(Protocol):
    """Turns the output of one choice into the objects of an API."""

    def begin(self) -> Iterable[Json]: ...

    def push(self, delta: Delta) -> Iterable[Json]:
        """Yields the events of a delta, which is added during iteration."""
        ...

    def end(self) -> Iterable[Json]: ...

    def body(self) -> bytes: ...

    def encode(self, event: Json) -> bytes: ...

    def encode_error(self, error: ApiError) -> bytes: ...


async def respond_as_chat(
    service: OpenAIService, plan: Plan, outputs: list[ChoiceOutput], answer: ChatAnswer
) -> bytes | AsyncGenerator[bytes, None]:
    """A body, or server-sent events to stream. `outputs`: from `service.begin(plan)`."""
    if plan.stream:
        events = _events(service, plan, outputs, answer)
        # A refusal must set the HTTP status.
        return await StartedStream.of(events)
    async with service.running(plan, outputs) as deltas:
        async for _, delta in deltas:
            for _event in answer.push(delta):
                pass
    return answer.body()


async def _events(
    service: OpenAIService, plan: Plan, outputs: list[ChoiceOutput], answer: ChatAnswer
) -> AsyncGenerator[bytes, None]:
    begun = False
    try:
        async with service.running(plan, outputs) as deltas:
            async for _, delta in deltas:
                if not begun:
                    begun = True
                    for event in answer.begin():
                        yield answer.encode(event)
                for event in answer.push(delta):
                    yield answer.encode(event)
        for event in answer.end():
            yield answer.encode(event)
    except Exception as error:
        if not begun:
            raise
        yield answer.encode_error(to_api_error(error))
