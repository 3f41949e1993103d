"""Baton's plug-in in vLLM beside vLLM's own connectors, and engine against engine."""
