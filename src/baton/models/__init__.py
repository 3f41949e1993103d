"""Target models, from Hugging Face checkpoint directories."""
