"""An engine's side of its handoffs."""
