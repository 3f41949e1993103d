"""Broken protocols and engines: each undoes one safety rule of the machines, of what runs them, or of the engine, so
that it can be shown that the simulator finds it.
"""

from simulation.mutations import commits, engine, kinds, layers, pages, ranks, router, sessions, sockets
from simulation.mutations.registry import MUTATIONS, Mutation, applied

__all__ = [
    "MUTATIONS",
    "Mutation",
    "applied",
    "commits",
    "engine",
    "kinds",
    "layers",
    "pages",
    "ranks",
    "router",
    "sessions",
    "sockets",
]
