"""Sizes and places of an engine's pools, states of drafters, and stored prefixes."""
