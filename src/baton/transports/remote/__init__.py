"""Transports over a transfer library, between engines of a cluster, or over a shared directory."""
