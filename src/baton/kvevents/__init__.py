"""KV events, as vLLM publishes them: which blocks of tokens an engine's prefix cache holds."""
