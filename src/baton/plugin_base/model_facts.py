"""Facts that P and D compare to be sure of the same model and tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from baton.models.loading.checkpoint_digests import fingerprint, tokenizer_hash


def weights_fact(path: str, config: Any, revision: str | None) -> str:
    """For a checkpoint from a hub: name and commit, since a branch may move between two hosts' downloads. `config`:
    transformers'.
    """
    if os.path.isdir(path):
        return fingerprint(Path(path))
    return f"{path}@{getattr(config, '_commit_hash', None) or revision}"


def tokenizer_fact(path: str, revision: str | None) -> str:
    return tokenizer_hash(Path(path)) if os.path.isdir(path) else f"{path}@{revision}"
