"""Transports between processes of one host: each maps the other's memory."""
