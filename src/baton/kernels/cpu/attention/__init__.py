"""Attention over pages of keys and values."""
