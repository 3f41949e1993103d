"""Shared by several folders of tests. Imports of torch wait until a test asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def one_thread() -> None:
    """Sums of one order, whatever the machine."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(model_type, **overrides)`: a random checkpoint of an architecture, written once per session."""
    from baton.testing.checkpoints import make_checkpoint

    made: dict[str, Path] = {}

    def make(model_type: str, **overrides: Any) -> Path:
        key = f"{model_type}{sorted(overrides.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(model_type), model_type, **overrides)
        return made[key]

    return make
