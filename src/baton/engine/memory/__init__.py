"""An engine's KV pools: their sizes and addresses, slots of drafters' states, and stored prefixes."""
