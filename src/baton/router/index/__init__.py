"""Cached prompts of engines, from their KV events."""
