"""Facts that P and D compare to be sure of the same model and tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baton.models.loading.checkpoint_digests import fingerprint, tokenizer_hash


def weights_fact(path: str, config: Any, revision: str | None) -> str:
    """From a hub: name and commit, since a branch may move. `config`: transformers'."""
    if os.path.isdir(path):
        return fingerprint(Path(path))
    return f"{path}@{getattr(config, '_commit_hash', None) or revision}"


def tokenizer_fact(path: str, revision: str | None) -> str:
    return tokenizer_hash(Path(path)) if os.path.isdir(path) else f"{path}@{revision}"


def override_facts(given: Mapping[str, Any] | Callable[..., Any], config_path: str | None = None) -> dict[str, str]:
    """An operator's changes to a checkpoint's configuration, if any."""
    facts = {}
    if callable(given):
        facts["model.overrides"] = f"{given.__module__}.{getattr(given, '__qualname__', type(given).__qualname__)}"
    elif given:
        facts["model.overrides"] = json.dumps(given, sort_keys=True, default=str)
    if config_path is not None:
        file = Path(config_path, "config.json")
        digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() if file.is_file() else config_path
        facts["model.config"] = digest
    return facts
