"""One engine's speed and memory."""
