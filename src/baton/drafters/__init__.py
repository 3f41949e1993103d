"""Drafters: one file per method of speculative decoding, behind one protocol."""

from baton.drafters.base import Drafter
from baton.drafters.registry import load_drafter

__all__ = ["Drafter", "load_drafter"]
