"""Drafters: one file per method of speculative decoding, with a common protocol. Importing this needs no torch."""
