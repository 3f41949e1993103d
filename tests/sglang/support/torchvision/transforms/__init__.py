"""Any name."""

from __future__ import annotations

from torchvision import __getattr__

__all__ = ["__getattr__"]
