"""Decides from tokens when a request ends. The API layer applies stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from baton.engine.request import Request
from baton.wire import FinishReason


def until_stop(
    request: Request, token_ids: Sequence[int], eos_ids: Collection[int], max_model_len: int
) -> tuple[list[int], FinishReason | None, int | None]:
    """The new tokens up to the one that ends the request, the finish reason (None: not ended), and the stop token if
    one of `stop_token_ids` ended it. Limits count from the end of the client's prompt.
    """
    params = request.params
    kept: list[int] = []
    for token in token_ids:
        kept.append(token)
        num_output = request.num_output + len(kept)
        if token in eos_ids and params.structured_outputs is not None:
            # The grammar decides when the output may end, even before `min_tokens` if it allows nothing else.
            return kept, "stop", None
        if num_output >= params.min_tokens:
            if token in eos_ids and not params.ignore_eos:
                return kept, "stop", None
            if token in request.stop_token_ids:
                return kept, "stop", token
        if num_output >= params.max_tokens or request.num_prompt + num_output >= max_model_len:
            return kept, "length", None
    return kept, None, None
