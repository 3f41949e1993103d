"""Baton's processes as forks, as tests start them: what a fork gets and returns is what a new process would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import baton
from baton.children import LineProcess, start_reporting
from baton.deployment import BATON, read_reports
from testkit.processes.baton_forks import popen
from testkit.processes.running import run

PEER = "from baton.testing.transport_peer import serve_peer; serve_peer('shm://', None)"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.usefixtures("forks")
def test_a_command_ends_with_its_output_and_status() -> None:
    shown = run("--version")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, f"{baton.__version__}\n", "")
    refused = run("serve", "--frobnicate")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--frobnicate" in refused.stderr


@pytest.mark.usefixtures("forks")
def test_a_child_reports_through_its_pipe(tmp_path: Path) -> None:
    process, pipe = start_reporting([*BATON, "serve", str(tmp_path / "nowhere"), "--port", "0"], ONE_THREAD)
    assert not isinstance(process, popen)
    found, pending = list[dict[str, object]](), b""
    while (reports := read_reports(pipe, pending))[0] is not None:
        found, pending = found + reports[0], reports[1]
    os.close(pipe)
    assert process.wait(60) == 2
    assert [report["refused"] for report in found] == ["model"]


@pytest.mark.usefixtures("forks")
def test_a_peer_answers_by_lines_and_is_killed() -> None:
    peer = LineProcess([sys.executable, "-c", PEER], ONE_THREAD)
    assert not isinstance(peer.process, popen)
    peer.write_line('{"do": "open", "sizes": [64]}')
    assert peer.read_line()
    peer.process.kill()
    peer.close(60)
    assert peer.process.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ([sys.executable, "-c", "pass"], {}),
        ([*BATON, "--version"], {"env": {**ONE_THREAD, "OMP_NUM_THREADS": "2"}}),
        ([*BATON, "--version"], {"cwd": "/"}),
    ],
    ids=["no part of Baton", "several threads", "another folder"],
)
def test_other_processes_are_new(command: list[str], options: dict[str, object]) -> None:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options) as process:  # type: ignore[call-overload]
        process.kill()
        assert isinstance(process, popen)
