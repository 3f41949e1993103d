"""Stored KV: a store of bytes by content key, and prefixes of prompts in it."""
