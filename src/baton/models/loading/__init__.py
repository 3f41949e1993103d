"""From a checkpoint directory to a filled model."""
