"""Shared by the tests of the simulator."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from simulation.parallel import quiet_logs


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A simulation causes the protocol's warnings all the time; other tests need theirs."""
    logger = logging.getLogger("baton")
    level = logger.level
    quiet_logs()
    yield
    logger.setLevel(level)
