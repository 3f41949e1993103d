"""Drafters: one file per method of speculative decoding, behind one protocol. Importing this needs no torch."""
