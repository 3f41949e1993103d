"""An engine's side of its handoffs: legs, and what the agent's events mean for requests."""
