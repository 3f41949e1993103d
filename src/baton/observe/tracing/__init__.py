"""Traces of requests: spans and their exporters (OTLP, or a file for Perfetto)."""
