"""What an engine keeps in memory: the size and place of its pools, states of drafters, and stored prefixes."""
