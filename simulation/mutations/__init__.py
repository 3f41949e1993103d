"""Broken protocols: each undoes one safety rule of the machines or of what runs them, so that it can be shown that
the simulator finds it.
"""

from simulation.mutations import commits, pages, sessions
from simulation.mutations.registry import MUTATIONS, Mutation, applied

__all__ = ["MUTATIONS", "Mutation", "applied", "commits", "pages", "sessions"]
