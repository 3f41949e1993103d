"""The exceptions of Baton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_MAX_QUOTED = 2000


class BatonError(Exception): ...


class ConfigError(BatonError):
    """The setting named by `field` is unknown or out of range."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


class CheckpointError(BatonError):
    """A checkpoint cannot be read. The text may quote its files: it is cut to one printable line."""

    def __init__(self, text: str) -> None:
        line = "".join(one if one.isprintable() else " " for one in text[: 2 * _MAX_QUOTED])
        super().__init__(line if len(line) <= _MAX_QUOTED else f"{line[:_MAX_QUOTED]}...")


class RequestError(BatonError):
    """A client's request is refused (HTTP 4xx). `param`: as in OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModelError(RequestError):
    """The request's model is not served (HTTP 404)."""


class UnauthorizedError(RequestError):
    """The request lacks a required token (HTTP 401)."""


class InvalidApiKeyError(UnauthorizedError):
    """The request has none of the server's API keys (HTTP 401)."""


class ForbiddenError(RequestError):
    """The router has not signed the request's ticket for it, or the request's origin is not allowed (HTTP 403)."""


class OverloadedError(BatonError):
    """Too many requests wait (HTTP 429). `retry_after_s`: an estimate; None: soon."""

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailableError(BatonError):
    """No engine can take the request now (HTTP 503). `status`: the HTTP status of a server's refusal."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineLostError(EngineUnavailableError):
    """An engine that may have taken a request was lost: its connection broke, or its lease expired."""


class EngineStalledError(EngineUnavailableError):
    """An engine's thread has not finished its current work within `stall_timeout_s`; it may hang."""


class LegRefusedError(EngineUnavailableError):
    """An engine refused a leg. `code`: that of its answer."""

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message, status)
        self.code = code


class DrainingError(EngineUnavailableError):
    """A server is about to end, and refuses new requests."""


class ShortageError(EngineUnavailableError):
    """This process has no descriptor, port or memory left to reach an engine."""


class CapacityError(BatonError):
    """The request can never fit into the page pool."""


class NonFiniteLogitsError(BatonError):
    """A request's logits are NaN or infinite, so no token can be chosen (HTTP 500)."""


class ProtocolError(BatonError):
    """A message is malformed, oversized, out of bounds or not allowed in this state. `reason` is sent to the peer as
    the refusal of its claim.
    """

    reason = "register_refused"


class IncompatiblePeerError(ProtocolError):
    """Two engines cannot exchange KV. `fields` has every field that differs."""

    def __init__(self, fields: Mapping[str, tuple[object, object]]) -> None:
        listed = "; ".join(f"{name}: here {here!r}, peer {there!r}" for name, (here, there) in fields.items())
        super().__init__(f"incompatible peer: {listed}")
        self.fields = fields


class ForeignTicketError(ProtocolError):
    """The ticket is signed with another key (HTTP 403)."""


class TicketExpiredError(ProtocolError):
    """A valid ticket came after its expiry. The request can be recomputed."""

    reason = "ticket_expired"


class UndefinedTransitionError(ProtocolError):
    """A state machine's table does not define the event in its phase: a dishonest peer, or a bug. `history`: the
    machine's last events, oldest first."""

    def __init__(self, machine: str, phase: str, event: str, history: Sequence[str]) -> None:
        super().__init__(
            f"{machine}: {event} cannot happen in phase {phase!r}; before: {', '.join(history) or 'nothing'}"
        )
        self.machine, self.phase, self.event, self.history = machine, phase, event, tuple(history)


class WrongEngineError(ProtocolError):
    """A valid ticket names another engine, or an earlier incarnation of this one (HTTP 409)."""


# Baton's own reasons for a failed handoff or leg.
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
        "no_prefix_cache",
        "no_room",
        "no_such_role",
        "nonfinite_logits",
        "not_answering",
        "not_final",
        "not_received",
        "other_blocks",
        "peer_lost",
        "preempted",
        "prefix_missing",
        "prefix_refused",
        "queue_timeout",
        "refused",
        "register_refused",
        "shutdown",
        "step_failed",
        "superseded",
        "ticket_expired",
        "token_mismatch",
        "too_short",
        "transfer_failed",
        "unhealthy_peer",
        "unknown",
        "unreachable_peer",
    }
)


def refusal_text(error: RequestError) -> str:
    """The error text of a leg whose request is invalid."""
    return f"invalid_request: {error.param or ''}: {error}"


def is_refusal(error: str | None) -> bool:
    """Whether a leg's error comes from `refusal_text`; then every engine would give it."""
    return error is not None and error.startswith("invalid_request: ")


def reason_label(reason: str) -> str:
    """Unknown reasons become `other`, or a peer could create any number of series."""
    return reason if reason in REASONS else "other"


class HandoffError(BatonError):
    """A handoff ended without commit. `reason`: one of `REASONS`, or a peer's own."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason = reason


class TransportError(BatonError):
    """A transport could not register, connect or copy."""
