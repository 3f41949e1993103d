"""Stored KV, and prefixes of prompts in it."""
