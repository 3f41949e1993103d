"""Handoffs between engines of several ranks that are cut differently: senders, cost, and unchanged answers."""
