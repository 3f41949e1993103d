"""Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

import msgspec

from baton.openai.http.api_errors import ApiError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> bytes:
    """As in Anthropic's API, the HTTP status determines the type."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    fields = {"type": _TYPES.get(error.status, other), "message": error.message}
    return msgspec.json.encode({"type": "error", "error": fields})


def error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
