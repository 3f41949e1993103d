"""The content of `/status`."""
