"""P's first token as a draft of D's first step, for a placeholder (docs/reference/vllm-design.md, "The first step")."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PLACEHOLDER = -1  # vLLM's


class FirstTokens:
    """First tokens by request id, until the request's first step is scheduled."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def add(self, request_id: str, token: int) -> None:
        self._tokens[request_id] = token

    def discard(self, request_id: str) -> None:
        self._tokens.pop(request_id, None)

    def place(self, new_requests: Iterable[Any], drafts: dict[str, list[int]]) -> None:
        """`new_requests`, `drafts`: `scheduled_new_reqs`, `scheduled_spec_decode_tokens` of a `SchedulerOutput` not
        sent to a worker yet. vLLM does not pad a step that also computes another prompt."""
        for new in new_requests:
            token, rows = self._tokens.pop(new.req_id, None), drafts.get(new.req_id)
            if token is not None and rows and rows[0] == PLACEHOLDER:
                drafts[new.req_id] = [token, *rows[1:]]
