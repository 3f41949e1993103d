"""How many drafts a request gets, if the engine chooses (`num_speculative_tokens` "auto")."""
