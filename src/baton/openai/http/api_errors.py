"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with an HTTP status."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import msgspec

from baton.error_help import code_of
from baton.errors import (
    BatonError,
    CapacityError,
    EngineUnavailableError,
    ForbiddenError,
    ForeignTicketError,
    HandoffError,
    InvalidApiKeyError,
    OverloadedError,
    ProtocolError,
    RequestError,
    UnauthorizedError,
    UnknownModelError,
    is_refusal,
)
from baton.log_limit import LogLimit

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

_MAX_MESSAGE_CHARS = 2000  # a message may quote what the client sent
# URLs, socket addresses as Python prints them, IPv4, IPv6, and names with ports. Unbounded lengths would make the
# search quadratic.
_ADDRESS = re.compile(
    r"""[a-z][a-z0-9+.-]{0,15}://[^\s'",;)]*[^\s'",;):]|\('[^']{0,253}',\ \d+[^)]{0,99}\)"""
    r"""|\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?|\[(?=[0-9a-f]{0,4}:)[0-9a-f:]{2,45}\](?::\d+)?"""
    r"""|\b[A-Za-z][\w.-]{0,252}:\d{2,5}\b""",
    re.VERBOSE,
)

# Codes that tell routers of an engine that may hang, or that shuts down.
ENGINE_STALLED, DRAINING = "engine_stalled", "draining"

# Reasons in an error chunk: the engine cannot serve now.
_UNAVAILABLE_REASONS = frozenset(
    {"engine_unavailable", "engine_lost", ENGINE_STALLED, "peer_lost", "queue_timeout", "shutdown"}
)


@dataclass(frozen=True, slots=True)
class ApiError:
    """`retry_after_s`: for status 429; None: soon."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    def body(self) -> bytes:
        fields = {
            "message": self.message[:_MAX_MESSAGE_CHARS],
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": fields})


# The first matching class counts.
_STATUS_BY_ERROR: tuple[tuple[type[BatonError], int, str], ...] = (
    (UnknownModelError, 404, "invalid_request_error"),
    (InvalidApiKeyError, 401, "invalid_request_error"),
    (UnauthorizedError, 401, "authentication_error"),
    (ForbiddenError, 403, "permission_error"),
    (RequestError, 400, "invalid_request_error"),
    (OverloadedError, 429, "rate_limit_error"),
    (CapacityError, 400, "invalid_request_error"),
    (EngineUnavailableError, 503, "service_unavailable_error"),
    (ForeignTicketError, 403, "permission_error"),
    (ProtocolError, 409, "server_error"),
    (BatonError, 500, "server_error"),
)


def to_api_error(error: BaseException) -> ApiError:
    """Logs exceptions that are not Baton's, and hides their details."""
    text, param = str(error), None
    if isinstance(error, RequestError):
        param = error.param
    else:
        text = _ADDRESS.sub("(address)", text)
        if text != str(error):
            logger.warning("a client is told an error without its addresses: %s", error)
    if isinstance(error, RecursionError):
        # Only client input is nested.
        return ApiError(400, "the request nests too deeply", "invalid_request_error", None, "invalid_request")
    if isinstance(error, BatonError):
        status, shape = next((status, shape) for kind, status, shape in _STATUS_BY_ERROR if isinstance(error, kind))
        retry = error.retry_after_s if isinstance(error, OverloadedError) else None
        return ApiError(status, text, shape, param, code_of(error), retry)
    logger.error("unexpected error while serving a request", exc_info=error)
    return ApiError(500, "internal error", "server_error", None, "internal_error")


def error_of_chunk(text: str | None) -> BatonError:
    """The exception for a `TokenChunk.error`, `"<reason>: <message>"`. A refusal's message begins with its field."""
    reason, _, message = (text or "unknown").partition(": ")
    if reason in _UNAVAILABLE_REASONS:
        return EngineUnavailableError(message or reason)
    if is_refusal(text):
        field, _, message = message.partition(": ")
        return RequestError(message, field or None)
    return HandoffError(reason, message)
