"""Layers that architectures share, and how ranks share them."""
