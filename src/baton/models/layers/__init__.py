"""Layers that architectures share, and their parallelism."""
