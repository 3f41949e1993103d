"""Small checkpoints of drafters. Each is in a folder of its target's, `DRAFTER`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

DRAFTER = "drafter"


def write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """A checkpoint without a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    own = {name: weight.clone(memory_format=torch.contiguous_format) for name, weight in weights.items()}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
