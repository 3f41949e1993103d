"""Random shapes through every compiled CPU kernel, against float64, with allocators that expose invalid memory
accesses.
"""
