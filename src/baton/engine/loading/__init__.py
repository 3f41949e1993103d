"""From a checkpoint to a loaded model, and what other engines must know of it."""
