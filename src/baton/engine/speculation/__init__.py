"""The number of drafts per request, if the engine chooses it (`num_speculative_tokens` "auto")."""
