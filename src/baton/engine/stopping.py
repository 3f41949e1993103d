"""When a request is over, as far as tokens tell."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from baton.engine.request import Request
from baton.wire import FinishReason


def until_stop(
    request: Request, token_ids: Sequence[int], eos_ids: Collection[int], max_model_len: int
) -> tuple[list[int], FinishReason | None, int | None]:
    """The new tokens up to the one that ends the request, why it ends (None: it goes on), and which stop token it was.

    Counts from the client's prompt, however many tokens the request began with.
    """
    params = request.params
    kept: list[int] = []
    for token in token_ids:
        kept.append(token)
        num_output = request.num_output + len(kept)
        if token in eos_ids and params.structured_outputs is not None:
            # A grammar says where the output may end. Before `min_tokens` it does so where nothing else is allowed.
            return kept, "stop", None
        if num_output >= params.min_tokens:
            if token in eos_ids and not params.ignore_eos:
                return kept, "stop", None
            if token in request.stop_token_ids:
                return kept, "stop", token
        if num_output >= params.max_tokens or request.num_prompt + num_output >= max_model_len:
            return kept, "length", None
    return kept, None, None
