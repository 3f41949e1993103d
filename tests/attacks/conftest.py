"""Attack scenes without and with keys; makes the fakes of `tests/server` importable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.attacker import Scene


@contextlib.contextmanager
def still_served(made: Scene) -> Iterator[Scene]:
    """A scene in which a handoff succeeds after the attack as before it."""
    try:
        yield made
        made.traffic.serve_one()
    finally:
        made.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with still_served(Scene(None)) as made:
        yield made


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Scene]:
    with still_served(Scene(tmp_path / "keys")) as made:
        yield made
