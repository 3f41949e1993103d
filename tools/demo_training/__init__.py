"""Training of the demo checkpoints: a Llama target and two EAGLE heads, from text every Python carries."""
