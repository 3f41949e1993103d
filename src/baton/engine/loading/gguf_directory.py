"""GGUF files as checkpoint directories: `config.json`, the tokenizer, and a link to the file."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

from baton.directories import own_directory
from baton.errors import CheckpointError, ConfigError
from baton.models.loading.gguf_config import gguf_config
from baton.models.loading.gguf_header import read_header
from baton.models.loading.gguf_names import GGUF_FILE

_UNUSUAL = re.compile(r"[^\w.-]", re.ASCII)


def lone_gguf(directory: Path) -> Path | None:
    if (directory / GGUF_FILE).is_file() and (directory / "config.json").is_file():
        return None
    files = [path for path in directory.iterdir() if path.suffix in (".gguf", ".safetensors")]
    return files[0] if len(files) == 1 and files[0].suffix == ".gguf" else None


def gguf_directory(file: Path, field: str) -> str:
    """The directory for `file` in the user's cache. Raises `ConfigError` naming `field` without the package `gguf` or
    without a cache, `CheckpointError` for a file that cannot be served.
    """
    if not file.is_file():
        raise ConfigError(field, f"{file}: no such file")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(field, f"{file} is read with the package gguf: pip install 'baton-serve[gguf]'")
    content = checkpoint_files(file)
    path = file.resolve()
    name = f"{_UNUSUAL.sub('_', path.stem)[:80]}-{hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()}"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = own_directory(cache / "baton" / "gguf" / name, field)
        for name, text in content.items():
            _replace(directory / name, text)
        if not (directory / GGUF_FILE).is_symlink() or (directory / GGUF_FILE).readlink() != path:
            link = directory / f".{secrets.token_hex(4)}"
            link.symlink_to(path)
            link.replace(directory / GGUF_FILE)
    except (OSError, RuntimeError) as error:  # without a home
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        raise ConfigError(field, f"{why}; XDG_CACHE_HOME names another cache") from None
    return str(directory)


def checkpoint_files(file: Path) -> dict[str, str]:
    """A checkpoint's files except the weights, by name. Raises `CheckpointError`."""
    from baton.text.gguf_tokenizer import end_tokens, gguf_tokenizer

    header = read_header(file)
    config = gguf_config(header)
    try:
        backend, settings = gguf_tokenizer(header.metadata)
        ends = end_tokens(header.metadata)
        if backend.get_vocab_size() > config["vocab_size"]:
            raise CheckpointError(f"{backend.get_vocab_size()} tokens, embeddings of {config['vocab_size']}")
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    objects: dict[str, dict[str, Any]] = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": ends},
        "tokenizer_config.json": settings,
    }
    return {
        "tokenizer.json": backend.to_str(),
        **{name: json.dumps(value, indent=2) for name, value in objects.items()},
    }


def _replace(path: Path, text: str) -> None:
    """Other engines may be reading the file."""
    content = text.encode()
    if path.is_file() and path.read_bytes() == content:
        return
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
