"""Shared by the tests of models."""

from __future__ import annotations

import pytest

from baton.models.layers.linear import Linear


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if PyTorch or the CPU had no packed weights: weights stay as loaded."""
    monkeypatch.setattr(Linear, "pack", lambda layer: None)
