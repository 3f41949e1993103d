"""Reads text files of checkpoints and tokenizers. Without torch: checkpoints are checked before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.errors import CheckpointError


def read_text(path: Path) -> str:
    """Raises `CheckpointError`."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not UTF-8: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `CheckpointError`."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def json_if_there(path: Path) -> dict[str, Any]:
    """{} without such a file. Raises `CheckpointError`."""
    return read_json(path) if path.is_file() else {}


def json_if_usable(path: Path) -> dict[str, Any]:
    """{} for an unusable file: loading raises a better error."""
    try:
        return read_json(path)
    except CheckpointError:
        return {}
