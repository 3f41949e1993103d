"""The target of drafters that are tested against references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.models.base import CausalLM
from baton.models.loading.loader import load_model


@pytest.fixture(scope="session")
def target_path(checkpoint: Any) -> Path:
    return Path(checkpoint("llama"))


@pytest.fixture(scope="session")
def target(target_path: Path) -> CausalLM:
    return load_model(target_path)
