"""The one error tree of Baton.

BatonError
├── ConfigError          a setting is unknown or has a bad value; names the field
├── CheckpointError      a checkpoint file is missing, truncated or of another shape
├── RequestError         a client's request is malformed; names the parameter (HTTP 4xx)
│   ├── UnknownModelError
│   ├── UnauthorizedError   administration without its token (HTTP 401)
│   └── ForbiddenError   the request carries a ticket that is not for it, or may not be made at all (HTTP 403)
├── OverloadedError      too much is waiting already (HTTP 429)
├── EngineUnavailableError   an engine is down or refuses work (HTTP 503)
│   ├── EngineLostError      an engine went away with a request that it had taken
│   ├── EngineStalledError   an engine's thread has been at one step for too long
│   └── DrainingError        a server ends what runs and takes nothing new
├── CapacityError        pages or slots that can never fit were asked for
├── NonFiniteLogitsError    the model made no numbers from which a token could be chosen (HTTP 500)
├── ProtocolError        a peer sent a message that is malformed or out of bounds
│   ├── IncompatiblePeerError   P and D differ in a field that must be equal
│   ├── TicketExpiredError   a good ticket came too late
│   └── WrongEngineError     a good ticket is for another engine, or for this one before it was restarted
├── HandoffError         a handoff ended without commit; carries the reason
└── TransportError       a transport could not copy, connect or register
"""

from __future__ import annotations

from collections.abc import Mapping


class BatonError(Exception):
    """Root of every error that Baton raises on purpose."""


class ConfigError(BatonError):
    """A setting is unknown or out of range. `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class CheckpointError(BatonError):
    """A checkpoint cannot be read: file missing, truncated, or a tensor of another shape."""


class RequestError(BatonError):
    """A client's request is refused. `param` names the parameter, as in OpenAI's error shape."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModelError(RequestError):
    """The request names a model that is not served here (HTTP 404)."""


class UnauthorizedError(RequestError):
    """The request needs a token that it does not bring (HTTP 401)."""


class InvalidApiKeyError(UnauthorizedError):
    """The request brings none of the server's API keys (HTTP 401)."""


class ForbiddenError(RequestError):
    """The request carries a ticket that the router has not signed for it, or comes from where none may (HTTP 403)."""


class OverloadedError(BatonError):
    """Too many requests wait already (HTTP 429); one that comes later may be taken."""


class EngineUnavailableError(BatonError):
    """No engine can take the request now (HTTP 503)."""


class EngineLostError(EngineUnavailableError):
    """An engine that may have taken a request went away: its connection broke, or its lease ended."""


class EngineStalledError(EngineUnavailableError):
    """An engine's thread has not come to an end of what it does for `stall_timeout_s`: it may hang."""


class DrainingError(EngineUnavailableError):
    """A server is about to end: what runs there may end first, and nothing new is taken."""


class CapacityError(BatonError):
    """The request can never fit into the page pool."""


class NonFiniteLogitsError(BatonError):
    """The target's logits of a request are not all finite (NaN or infinite), so that no token may be chosen."""


class ProtocolError(BatonError):
    """A message is malformed, oversized, out of bounds or not allowed in this state. `reason`: what a claim that is
    refused for it is told."""

    reason = "register_refused"


class IncompatiblePeerError(ProtocolError):
    """Two engines cannot exchange KV. `fields` names every field that differs."""

    def __init__(self, fields: Mapping[str, tuple[object, object]]) -> None:
        listed = "; ".join(f"{name}: here {here!r}, peer {there!r}" for name, (here, there) in fields.items())
        super().__init__(f"incompatible peer: {listed}")
        self.fields = fields


class TicketExpiredError(ProtocolError):
    """A ticket with a good signature came after its expiry: its bearer may have been paused, or its peer. The request
    itself is good, and can be computed anew.
    """

    reason = "ticket_expired"


class WrongEngineError(ProtocolError):
    """A ticket with a good signature names another engine, or this one before it was restarted (HTTP 409)."""


# Why a handoff, or a leg of one, may have failed: the reasons that Baton's own code gives.
REASONS = frozenset(
    {
        "aborted",
        "agent_lost",
        "bad_seeds",
        "cancelled",
        "engine_closed",
        "engine_error",
        "engine_lost",
        "engine_stalled",
        "engine_unavailable",
        "failed",
        "forgotten",
        "handoff_failed",
        "handoff_timeout",
        "incompatible_peer",
        "incomplete_commit",
        "integrity_failed",
        "internal_error",
        "invalid_request",
        "lease_expired",
        "message_too_large",
        "no_room",
        "nonfinite_logits",
        "not_answering",
        "not_final",
        "peer_lost",
        "preempted",
        "prefix_missing",
        "queue_timeout",
        "refused",
        "register_refused",
        "shutdown",
        "step_failed",
        "superseded",
        "ticket_expired",
        "transfer_failed",
        "unhealthy_peer",
        "unknown",
        "unreachable_peer",
    }
)


def refusal(error: RequestError) -> str:
    """The error of a leg whose request turned out to ask for what cannot be: its reason, its field, its message."""
    return f"invalid_request: {error.param or ''}: {error}"


def is_refusal(error: str | None) -> bool:
    """Whether a leg's error is one that every engine would give."""
    return error is not None and error.startswith("invalid_request: ")


def reason_label(reason: str) -> str:
    """A reason as a metric's label. Whatever a peer may have made up is `other`: each text would be a time series."""
    return reason if reason in REASONS else "other"


class HandoffError(BatonError):
    """A handoff ended without commit. `reason` is a short stable name, one of `REASONS` or a peer's own."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason = reason


class TransportError(BatonError):
    """A transport could not register, connect or copy."""
