"""From a checkpoint to a loaded model and its facts."""
