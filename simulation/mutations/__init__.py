"""Broken protocols and engines: each mutation undoes one safety rule, to show that the simulator detects it."""

from simulation.mutations import commits, engine, kinds, layers, pages, prefixes, ranks, router, sessions, sockets
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
    "prefixes",
    "ranks",
    "router",
    "sessions",
    "sockets",
]
