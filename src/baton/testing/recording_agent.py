"""An agent that records what an engine posts, for tests of an engine or a plug-in without peers or KV."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import TypeVar

from baton.handoff.agent.leg_events import Agent, GiveUp, LegEvent
from baton.handoff.protocol.messages import AttemptKey

E = TypeVar("E")


def _nothing(key: AttemptKey, event: LegEvent) -> None: ...


class RecordingAgent(Agent):
    """Takes every event, in the place of `InstanceAgent`.

    It sends the engine nothing: the test does, such as `DecodeCommitted`; `on_post` may do so at once. Unless it
    `hangs`, another thread calls `GiveUp.taken`, as in a real agent; that is not recorded.
    """

    def __init__(self, on_post: Callable[[AttemptKey, LegEvent], None] = _nothing) -> None:
        self.posted: list[tuple[AttemptKey, LegEvent]] = []
        self.on_post = on_post
        self.hangs = False

    def post(self, key: AttemptKey, event: LegEvent) -> None:
        taken = event.taken if isinstance(event, GiveUp) else None
        bare = dataclasses.replace(event, taken=None) if isinstance(event, GiveUp) else event
        self.posted.append((key, bare))
        self.on_post(key, bare)
        if taken is not None and not self.hangs:
            threading.Thread(target=taken, daemon=True).start()

    @property
    def kinds(self) -> list[type[LegEvent]]:
        return [type(event) for _, event in self.posted]

    def of(self, kind: type[E]) -> list[E]:
        return [event for _, event in self.posted if isinstance(event, kind)]
