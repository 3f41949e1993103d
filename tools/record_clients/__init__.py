"""Records requests of real clients for `tests/clients`, whose environment they are too large for."""
