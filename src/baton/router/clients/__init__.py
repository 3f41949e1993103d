"""HTTP clients of engines: Baton's own and vLLM servers."""
