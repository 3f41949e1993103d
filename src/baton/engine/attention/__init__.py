"""Attention backends, and scans of recurrent layers."""
