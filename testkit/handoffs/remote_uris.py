"""Shared by tests of library transports: URIs, and a skip that says what is missing."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.testing.transport_suite import check_names
from baton.transports.registry import create_transport

SCHEMES = ["nixl", "mooncake", "file"]
# Checks that stop their peer wait for that as only its parent can, so it cannot be a fork of another process.
STOPPING = ["waits_for_no_peer"]
FORKABLE = [name for name in check_names() if name not in STOPPING]


@cache
def missing(scheme: str) -> str:
    """Why this machine cannot run a transport; "" if it can."""
    try:
        create_transport(f"{scheme}://").close()
    except ConfigError as error:
        return str(error)
    return ""


def uri_of(scheme: str, directory: Path) -> str:
    """The URI of a transport. Skips the test if this machine cannot run it."""
    if scheme == "file":
        return f"file://{directory}/store"
    if missing(scheme):
        pytest.skip(missing(scheme))
    return f"{scheme}://"
