"""Reads the files of a tokenizer's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.errors import CheckpointError


def read_text(path: Path) -> str:
    """Raises `CheckpointError`."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not UTF-8: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """{} without such a file. Raises `CheckpointError`."""
    if not path.is_file():
        return {}
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value
