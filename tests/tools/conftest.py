"""Makes `tools/` importable and offers the demo checkpoints to these tests."""

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def models() -> Path:
    """Directory of the committed checkpoints."""
    return ROOT / "models"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
