"""A decode leg's first step verifies P's first token: it is placed as a draft, so the step returns two tokens.

vLLM pads the first step of a request whose KV was loaded to 1 + k rows: the prompt's last token and k placeholder
drafts, which vLLM rejects. With P's first token t in the first of them, vLLM itself verifies t as it does any draft
(penalties, grammars, logprobs), and the step returns t and the token after it. Without, it returns t alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PLACEHOLDER = -1  # vLLM's


class FirstTokens:
    """First tokens of received requests, by request id, until their first step is scheduled."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def add(self, request_id: str, token: int) -> None:
        self._tokens[request_id] = token

    def discard(self, request_id: str) -> None:
        self._tokens.pop(request_id, None)

    def place(self, new_requests: Iterable[Any], drafts: dict[str, list[int]]) -> None:
        """Replace the first placeholder of each new request whose first token is known. `new_requests`, `drafts`:
        `scheduled_new_reqs` and `scheduled_spec_decode_tokens` of vLLM's `SchedulerOutput`, before it is sent to the
        workers.

        A step without placeholders, which vLLM schedules beside other prompts, stays as it is.
        """
        for new in new_requests:
            token, rows = self._tokens.pop(new.req_id, None), drafts.get(new.req_id)
            if token is not None and rows and rows[0] == PLACEHOLDER:
                drafts[new.req_id] = [token, *rows[1:]]
