"""Every transport passes the whole public suite, and the suite detects broken transports."""

from __future__ import annotations

import os

import pytest

from baton.testing import check_transport
from baton.testing.transport_suite import check_names
from baton.transports.mapped.segments import SHM_DIR
from baton.transports.registry import create_transport
from testkit.handoffs.remote_uris import FORKABLE, STOPPING
from testkit.processes.baton_forks import forking
from testkit.processes.launcher import Launcher


def own_segments() -> list[str]:
    return [name for name in os.listdir(SHM_DIR) if name.startswith(f"baton-{os.getpid()}-")]


@pytest.mark.parametrize("uri", ["local://", "shm://", "faulty+shm://?fault=delay&delay_s=0.001"])
def test_local_transports_conform(uri: str) -> None:
    assert len(check_transport(lambda: create_transport(uri))) == len(check_names())
    assert own_segments() == []


def test_transports_conform_across_processes(launcher: Launcher) -> None:
    passed = []
    with forking(launcher):
        passed += check_transport(lambda: create_transport("shm://"), spawn_uri="shm://", only=FORKABLE)
    passed += check_transport(lambda: create_transport("shm://"), spawn_uri="shm://", only=STOPPING)
    assert sorted(passed) == sorted(check_names())
    assert own_segments() == []


@pytest.mark.parametrize("fault", ["drop", "drop-last-page", "shift-page", "corrupt", "fail"])
def test_broken_transport_is_found(fault: str) -> None:
    with pytest.raises(AssertionError, match=r"^copies_exactly: "):
        check_transport(lambda: create_transport(f"faulty+local://?fault={fault}"))
