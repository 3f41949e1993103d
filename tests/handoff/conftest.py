"""Fixtures: agents of engines, and the network between them, for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testkit.handoffs.modelled_network import World
from testkit.handoffs.nodes import Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Complete agents with threads and sockets."""
    made = Pair()
    yield made
    for node in made.nodes:
        node.close()


@pytest.fixture
def world() -> Iterator[World]:
    """Agents in modelled time, on a modelled network."""
    made = World()
    yield made
    for node in made.nodes.values():
        node.transport.close()
