"""vLLM's requests, as far as the connector reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class VllmRequest(Protocol):
    """The part of vLLM's `Request` used here."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    prompt_embeds: Any
    max_tokens: int
    sampling_params: Any
    output_token_ids: Sequence[int]
    kv_transfer_params: dict[str, Any] | None
    lora_request: Any
    mm_features: Sequence[Any]


def beside_tokens(request: VllmRequest) -> str | None:
    """What the KV depends on besides token ids and adapters."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "embeddings"
    return "images or other media" if request.mm_features else None
