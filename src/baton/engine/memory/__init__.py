"""The size and place of an engine's pools, states of drafters, and stored prefixes."""
