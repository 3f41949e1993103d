"""Makes `tools/` importable and offers the demo checkpoints to these tests."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def models() -> Path:
    return ROOT / "models"


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """One thread for all of these tests."""
