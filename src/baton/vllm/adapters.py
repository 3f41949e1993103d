"""What KV depends on besides tokens. LoRA adapters are named with a digest of their files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# The files that vLLM reads in an adapter's directory.
_FILES = ("adapter_config.json", "adapter_model.*", "new_embeddings.*")
_READ_SIZE = 1 << 20


class LoraRequest(Protocol):
    lora_name: str
    lora_int_id: int
    lora_path: str


class VllmRequest(Protocol):
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
    """What a request consists of besides tokens and an adapter, which no handoff carries. None: nothing."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "embeddings"
    return "images or other media" if request.mm_features else None


@dataclass(frozen=True, slots=True)
class _Adapter:
    text: str
    versions: tuple[tuple[str, int, int], ...]  # of its files: name, bytes, time of last change


class Adapters:
    """The adapters named by requests of one server. vLLM reads an adapter's files when it loads it, under a new number
    each time, so a number stands for the files when it was first seen."""

    def __init__(self) -> None:
        self._known: dict[int, _Adapter] = {}

    def describe(self, lora: LoraRequest) -> str | None:
        """`NAME@DIGEST`; None if the adapter is no directory here, or its files changed after it was first seen: vLLM
        may have loaded either version. Reads the files once per adapter."""
        directory = Path(os.path.expanduser(lora.lora_path))
        try:
            files = sorted({path for pattern in _FILES for path in directory.glob(pattern)})
            versions = tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
            known = self._known.get(lora.lora_int_id)
            if known is None and files:
                known = _Adapter(f"{lora.lora_name}@{_digest(files)}", versions)
                self._known[lora.lora_int_id] = known
        except OSError:
            return None
        return known.text if known is not None and known.versions == versions else None


def _digest(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as stream:
            while chunk := stream.read(_READ_SIZE):
                digest.update(chunk)
    return digest.hexdigest()
