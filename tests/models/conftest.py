"""Random checkpoints of every architecture, written once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.testing.checkpoints import make_checkpoint

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    made: dict[str, Path] = {}

    def make(model_type: str, **overrides: Any) -> Path:
        key = f"{model_type}{sorted(overrides.items(), key=lambda item: item[0])}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(model_type), model_type, **overrides)
        return made[key]

    return make
