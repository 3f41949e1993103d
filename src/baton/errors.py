"""The exceptions of Baton.

BatonError
├── ConfigError          a setting is unknown or has a bad value; names the field
├── CheckpointError      a checkpoint file is missing, truncated or has another shape
├── RequestError         a client's request is malformed; names the parameter (HTTP 4xx)
│   ├── UnknownModelError
│   ├── UnauthorizedError   the required token is missing (HTTP 401)
│   └── ForbiddenError   the request's ticket is not for it, or the request is not allowed at all (HTTP 403)
├── OverloadedError      too many requests wait (HTTP 429)
├── EngineUnavailableError   an engine is down or refuses work (HTTP 503)
│   ├── EngineLostError      an engine was lost with a request that it may have taken
│   ├── EngineStalledError   an engine's thread has been in one step for too long
│   └── DrainingError        a server completes its requests and takes no new ones
├── CapacityError        the request needs more pages or slots than exist
├── NonFiniteLogitsError    the target's logits are NaN or infinite (HTTP 500)
├── ProtocolError        a peer sent a message that is malformed or out of bounds
│   ├── IncompatiblePeerError   P and D differ in a field that must be equal
│   ├── TicketExpiredError   a valid ticket came too late
│   └── WrongEngineError     a valid ticket names another engine, or an earlier incarnation of this one
├── HandoffError         a handoff ended without commit; carries the reason
└── TransportError       a transport could not copy, connect or register
"""

from __future__ import annotations

from collections.abc import Mapping


class BatonError(Exception):
    """Base class of all errors that Baton raises on purpose."""


class ConfigError(BatonError):
    """The setting named by `field` is unknown or out of range."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class CheckpointError(BatonError):
    """A checkpoint cannot be read: a file is missing or truncated, or a tensor has another shape."""


class RequestError(BatonError):
    """A client's request is refused. `param` names the parameter, as in OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModelError(RequestError):
    """The request names a model that is not served (HTTP 404)."""


class UnauthorizedError(RequestError):
    """The request lacks a required token (HTTP 401)."""


class InvalidApiKeyError(UnauthorizedError):
    """The request has none of the server's API keys (HTTP 401)."""


class ForbiddenError(RequestError):
    """The router has not signed the request's ticket for it, or the request's origin is not allowed (HTTP 403)."""


class OverloadedError(BatonError):
    """Too many requests wait (HTTP 429); a later one may be taken."""


class EngineUnavailableError(BatonError):
    """No engine can take the request now (HTTP 503)."""


class EngineLostError(EngineUnavailableError):
    """An engine that may have taken a request was lost: its connection broke, or its lease expired."""


class EngineStalledError(EngineUnavailableError):
    """An engine's thread has not finished its current work within `stall_timeout_s`; it may hang."""


class DrainingError(EngineUnavailableError):
    """A server is about to end. Running requests may complete; new ones are refused."""


class CapacityError(BatonError):
    """The request can never fit into the page pool."""


class NonFiniteLogitsError(BatonError):
    """A request's logits are NaN or infinite, so no token can be chosen."""


class ProtocolError(BatonError):
    """A message is malformed, oversized, out of bounds or not allowed in this state. `reason` is the answer to a claim
    that is refused for it.
    """

    reason = "register_refused"


class IncompatiblePeerError(ProtocolError):
    """Two engines cannot exchange KV. `fields` has every field that differs."""

    def __init__(self, fields: Mapping[str, tuple[object, object]]) -> None:
        listed = "; ".join(f"{name}: here {here!r}, peer {there!r}" for name, (here, there) in fields.items())
        super().__init__(f"incompatible peer: {listed}")
        self.fields = fields


class TicketExpiredError(ProtocolError):
    """A ticket with a valid signature came after its expiry: its bearer, or its peer, may have been paused. The request
    itself is valid and can be recomputed.
    """

    reason = "ticket_expired"


class WrongEngineError(ProtocolError):
    """A ticket with a valid signature names another engine, or an earlier incarnation of this one (HTTP 409)."""


# The reasons that Baton's own code gives for a failed handoff or leg.
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
    """The error text of a leg whose request is invalid: reason, parameter and message."""
    return f"invalid_request: {error.param or ''}: {error}"


def is_refusal(error: str | None) -> bool:
    """Whether a leg's error comes from `refusal`: every engine would give the same."""
    return error is not None and error.startswith("invalid_request: ")


def reason_label(reason: str) -> str:
    """A reason as a metric label. Unknown reasons become `other`, so that a peer cannot create any number of series."""
    return reason if reason in REASONS else "other"


class HandoffError(BatonError):
    """A handoff ended without commit. `reason` is a short stable name: one of `REASONS`, or a peer's own."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason = reason


class TransportError(BatonError):
    """A transport could not register, connect or copy."""
