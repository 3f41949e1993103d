"""Real SGLang servers on a CPU."""
