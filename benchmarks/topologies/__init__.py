"""Engines of several ranks, cut otherwise on each side: who sends what, what it costs, and if answers change."""
