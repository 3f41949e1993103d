"""Shared by the tests of models."""

from __future__ import annotations

import pytest

from baton.models.layers import linear


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if PyTorch or the CPU had no packed weights: weights stay as loaded."""
    monkeypatch.setattr(linear, "packed", lambda weight: None)
