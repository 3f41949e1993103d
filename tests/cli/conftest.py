"""Logging that a command sets up ends with the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.logging_state import restored


@pytest.fixture(autouse=True)
def _no_log_stays() -> Iterator[None]:
    with restored():
        yield
