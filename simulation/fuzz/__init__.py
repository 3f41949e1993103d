"""Attacks on live engines: random messages, bytes below messages, and whole processes."""
