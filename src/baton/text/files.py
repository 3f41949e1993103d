"""Reads optional JSON files of a tokenizer's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    """{} without such a file. Raises `CheckpointError`."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value
