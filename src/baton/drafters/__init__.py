"""Drafters: one file per method of speculative decoding, with a common protocol. Imports no torch."""
