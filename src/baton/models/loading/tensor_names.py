"""Names of tensors in Hugging Face checkpoints."""

from __future__ import annotations

import re

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def layer_index(name: str) -> int | None:
    """The layer that a tensor belongs to. None for parts outside the layers."""
    found = LAYER.match(name)
    return int(found[1]) if found else None
