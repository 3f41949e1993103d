"""Shared by the tests of models."""

from __future__ import annotations

import pytest

from baton.models import linear


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where PyTorch or the CPU has no packed weights: they stay as they are filled."""
    monkeypatch.setattr(linear, "packed", lambda weight: None)
