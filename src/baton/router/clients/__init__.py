"""HTTP clients of engines."""
