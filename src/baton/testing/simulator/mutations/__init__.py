"""Broken protocols: each undoes one safety rule of the machines or of what runs them, so that it can be shown that
the simulator finds it.
"""

from baton.testing.simulator.mutations import commits, pages, sessions
from baton.testing.simulator.mutations.registry import MUTATIONS, Mutation, applied

__all__ = ["MUTATIONS", "Mutation", "applied", "commits", "pages", "sessions"]
