"""Random shapes through every compiled CPU kernel, against float64, under allocators that expose stale addresses."""
