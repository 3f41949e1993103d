"""Target models: one file per architecture, loaded from Hugging Face checkpoint directories."""
