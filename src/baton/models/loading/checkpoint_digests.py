"""Digests of a checkpoint's files, to compare two engines' model and tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import xxhash

from baton.models.loading.config_json import read_config
from baton.models.loading.stored import weight_files

# Fields without effect on results.
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "use_cache")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_READ_SIZE = 1 << 22


def fingerprint(path: str | Path) -> str:
    """128-bit hex digest of a checkpoint's config (without `_CONFIG_NOISE`) and weight files: equal digests mean equal
    results.

    Not cached: the directory may change. xxh3 takes 0.04 s per GB (BLAKE2b 0.7 s). It detects accidents only, but a
    peer that lies could send any digest.
    """
    raw = {key: value for key, value in read_config(path).items() if key not in _CONFIG_NOISE}
    digest = xxhash.xxh3_128(json.dumps(raw, sort_keys=True).encode())
    for file in weight_files(path):
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode(errors="surrogateescape"))
        with file.open("rb") as stream:
            while chunk := stream.read(_READ_SIZE):
                digest.update(chunk)
    return digest.hexdigest()


def tokenizer_hash(directory: Path) -> str:
    """16 hex digits over the tokenizer's files and the chat templates."""
    digest = hashlib.sha256()
    further = sorted(f"{path.parent.name}/{path.name}" for path in directory.glob("additional_chat_templates/*.jinja"))
    for name in (*_TOKENIZER_FILES, *further):
        path = directory / name
        content = path.read_bytes() if path.exists() else b""
        digest.update(f"\0{name}\0{len(content)}\0".encode(errors="surrogateescape") + content)
    return digest.hexdigest()[:16]
