"""The timeline of one request, as the router sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from baton.observe.acceptance import HANDED_OFF

RequestStage = Literal["waiting", "prefill", "handoff", "decode", "ended"]
_MAX_EVENTS = 64
_MAX_TEXT = 500


class TimelineEvent(msgspec.Struct, frozen=True):
    """`at`: in seconds of the timeline's clock."""

    at: float
    name: str
    text: str = ""


class RequestTimeline(msgspec.Struct, eq=False):
    """One choice of a request. Times are in seconds of one monotonic clock.

    - `http_id`: its `X-Request-Id`. `began_at`: its arrival in seconds since 1970.
    - `routed`: when engines were first chosen. `queued_s`: how long its prompt waited in an engine; None: unknown.
    - `first`, `second`, `last`: arrivals of these tokens. `num_at_second`: the tokens by then.
    """

    id: str
    http_id: str
    began: float
    began_at: float
    num_prompt_tokens: int
    route: str = ""
    engines: tuple[str, ...] = ()
    num_output_tokens: int = 0
    accepted: list[int] = []
    drafted: list[int] = []
    routed: float | None = None
    queued_s: float | None = None
    first: float | None = None
    second: float | None = None
    num_at_second: int = 0
    last: float | None = None
    ended: float | None = None
    finish: str = ""
    error: str = ""
    resumed: bool = False
    events: list[TimelineEvent] = []

    @property
    def stage(self) -> RequestStage:
        """After a handoff, decoding begins with the second token."""
        if self.ended is not None:
            return "ended"
        if not self.route:
            return "waiting"
        if self.first is None:
            return "prefill"
        return "handoff" if self.route == HANDED_OFF and self.num_output_tokens <= 1 else "decode"

    @property
    def ttft_s(self) -> float | None:
        return None if self.first is None else self.first - self.began

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first."""
        if self.first is None or self.last is None or self.num_output_tokens < 2:
            return None
        return (self.last - self.first) / (self.num_output_tokens - 1)

    @property
    def handoff_s(self) -> float | None:
        """The client's wait for the second token, which is the decode engine's first. None unless the request was
        handed off and ran on one decode engine."""
        if self.route != HANDED_OFF or self.resumed or self.first is None or self.second is None:
            return None
        return self.second - self.first

    @property
    def later_token_s(self) -> float | None:
        """Mean seconds per token after the second: excludes the handoff."""
        num_later = self.num_output_tokens - self.num_at_second
        if self.second is None or self.last is None or num_later < 1:
            return None
        return (self.last - self.second) / num_later

    def on_route(self, now: float, route: str, engines: Sequence[str]) -> None:
        self.resumed |= self.num_output_tokens > 1
        self.route, self.engines = route, tuple(engines)
        self.routed = now if self.routed is None else self.routed
        self._note(now, "route", f"{route.replace('_', ' ')}: {' to '.join(engines)}")

    def on_tokens(self, now: float, num_tokens: int, accepted: Sequence[int], drafted: Sequence[int]) -> None:
        if num_tokens and self.first is None:
            self.first = now
            self._note(now, "first token")
        if accepted and not self.accepted:
            self._note(now, "first verification", f"{accepted[0]} of {drafted[0] if drafted else 0} drafts accepted")
        self.accepted += accepted
        self.drafted += drafted
        if num_tokens and self.second is None and self.num_output_tokens:
            self.second, self.num_at_second = now, self.num_output_tokens + num_tokens
        self.num_output_tokens += num_tokens
        if num_tokens:
            self.last = now

    def on_recovery(self, now: float, rung: str, cause: str) -> None:
        self._note(now, f"recovery: {rung}", cause)

    def on_end(self, now: float, finish: str, error: str = "") -> None:
        """`finish`: its finish reason, `abort`, `error` or `refused`. Only the first call counts."""
        if self.ended is not None:
            return
        self.ended, self.finish, self.error = now, finish, error[:_MAX_TEXT]
        text = error or f"{finish}, {self.num_output_tokens} tokens"
        self.events.append(TimelineEvent(now, "end", text[:_MAX_TEXT]))

    def summary(self) -> dict[str, object]:
        return {
            "id": self.id,
            "request_id": self.http_id,
            "began_at": self.began_at,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "route": self.route,
            "engines": self.engines,
            "stage": self.stage,
            "ttft_ms": _ms(self.ttft_s),
            "tpot_ms": _ms(self.tpot_s),
            "finish": self.finish,
            "error": self.error,
        }

    def describe(self, now: float) -> dict[str, object]:
        """With events and verifications. Times are in milliseconds after the arrival."""
        return {
            **self.summary(),
            "duration_ms": _ms((self.ended if self.ended is not None else now) - self.began),
            "accepted": self.accepted,
            "drafted": self.drafted,
            "events": [
                {"at_ms": _ms(event.at - self.began), "name": event.name, "text": event.text} for event in self.events
            ],
        }

    def _note(self, now: float, name: str, text: str = "") -> None:
        if len(self.events) < _MAX_EVENTS:
            self.events.append(TimelineEvent(now, name, text[:_MAX_TEXT]))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
