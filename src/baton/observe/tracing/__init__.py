"""Traces of requests: spans, and where they go (OTLP, or a file for Perfetto)."""
