"""The processes of data-parallel ranks: they start together, and end together with the cause."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.cli import data_ranks
from baton.cli.data_ranks import DataRanks, free_ports
from baton.cli.options import EngineOptions
from baton.cli.roles import RoleOptions
from baton.deployment import Reporter
from baton.deployment.processes import rank_ids
from baton.errors import ConfigError, EngineUnavailableError
from baton.openai.http.serving import bind
from testkit.inside import processes_of

# A rank that prints its flags when it serves, and ends with status 3 if it finds a file `end-RANK`.
RANK = """
import json, os, signal, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
def end(*_): sys.exit(0)
signal.signal(signal.SIGTERM, end)
fd, rank = int(flags["--ready-fd"]), flags["--data-parallel-rank"]
os.write(fd, b'{"progress": "loading"}\\n')
if os.path.exists(f"refuse-{rank}"):
    os.write(fd, json.dumps({"refused": "block_size", "why": "is odd"}).encode() + b"\\n")
    time.sleep(60)
if os.path.exists(f"fail-{rank}"): sys.exit(2)
while os.path.exists(f"load-{rank}"): time.sleep(0.01)
os.write(fd, json.dumps({"ready": "http://h:" + flags["--port"], "kv": json.dumps(flags)}).encode() + b"\\n")
while not os.path.exists(f"end-{rank}"): time.sleep(0.01)
sys.exit(3)
"""


@pytest.fixture
def reporter() -> Iterator[Reporter]:
    with Reporter(None, print) as told:
        yield told


@contextmanager
def ranks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[DataRanks]:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(data_ranks, "BATON", (sys.executable, "-c", RANK))
    monkeypatch.setattr(sys, "argv", ["baton", "serve", "MODEL"])
    with contextlib.closing(DataRanks(2, "p", [7000, 7001], 3)) as started:
        yield started


def test_ranks_serve_together_and_the_end_of_one_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], reporter: Reporter
) -> None:
    with ranks(monkeypatch, tmp_path) as started:
        urls, kv = started.await_ready(reporter)
        assert urls == ["http://h:7000", "http://h:7001"]
        flags = json.loads(kv)
        assert flags["serve"] == "MODEL", "those of the command come first"
        assert (flags["--engine-id"][:-1], flags["--engines-per-host"]) == ("p_dp", "6")
        store = Path(flags["--data-parallel-store"])
        assert store.stat().st_mode & 0o777 == 0o700
        (tmp_path / "end-1").touch()
        with pytest.raises(EngineUnavailableError, match="data-parallel rank 1 ended with status 3"):
            started.wait()
        pids = [process.pid for process in processes_of(started)]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not store.exists()
    assert "rank 0: loading" in capsys.readouterr().out


def test_the_one_that_was_killed_is_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reporter: Reporter
) -> None:
    with ranks(monkeypatch, tmp_path) as started:
        started.await_ready(reporter)
        (tmp_path / "end-0").touch()
        processes_of(started)[0].wait()
        processes_of(started)[1].kill()
        processes_of(started)[1].wait()
        # Both appear to run at the first check.
        monkeypatch.setattr(started, "_processes", [*processes_of(started), _Running()])
        with pytest.raises(EngineUnavailableError, match="data-parallel rank 1 ended with status -9"):
            started.wait()
        monkeypatch.undo()


class _Running:
    returncode = None

    def poll(self) -> None:
        return None


def test_a_rank_that_does_not_start_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reporter: Reporter
) -> None:
    (tmp_path / "fail-0").touch()
    with (
        ranks(monkeypatch, tmp_path) as started,
        pytest.raises(EngineUnavailableError, match="data-parallel rank 0 ended with status 2"),
    ):
        started.await_ready(reporter)


def test_a_rank_whose_process_cannot_be_made_is_told() -> None:
    with pytest.raises(EngineUnavailableError, match=r"a process could not be started: .*Argument list too long"):
        DataRanks(2, "p" * (1 << 18), [7000, 7001], 3)


@pytest.mark.parametrize("also", [[], ["fail-0"]])
def test_a_setting_that_a_rank_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reporter: Reporter, also: list[str]
) -> None:
    """Whichever rank ends first."""
    for name in ("refuse-1", *also):
        (tmp_path / name).touch()
    with ranks(monkeypatch, tmp_path) as started:
        if also:
            processes_of(started)[0].wait()
            wait_for_report(started._pipes[1])
        with pytest.raises(ConfigError, match=r"^block_size: is odd$"):
            started.await_ready(reporter)


def wait_for_report(pipe: int) -> None:
    """Wait until a pipe has both lines of a rank that refuses."""
    waiting = array.array("i", [0])
    while waiting[0] < len(b'{"progress": "loading"}\n') + 1:
        fcntl.ioctl(pipe, termios.FIONREAD, waiting)
        time.sleep(0.01)


def test_signals_reach_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reporter: Reporter) -> None:
    with ranks(monkeypatch, tmp_path) as started, started.forwarding_signals():
        started.await_ready(reporter)
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()
        started.wait()
        assert [process.wait() for process in processes_of(started)] == [0, 0]


def test_a_signal_while_ranks_start_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reporter: Reporter
) -> None:
    for rank in range(2):
        (tmp_path / f"load-{rank}").touch()
    with ranks(monkeypatch, tmp_path) as started, started.forwarding_signals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            started.await_ready(reporter)
    assert ended.value.code == 128 + signal.SIGTERM


def test_ranks_that_all_exit_by_themselves_have_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reporter: Reporter
) -> None:
    with ranks(monkeypatch, tmp_path) as started:
        started.await_ready(reporter)
        for process in processes_of(started):  # without a signal to this process
            process.terminate()
            assert process.wait() == 0
        with pytest.raises(EngineUnavailableError, match="data-parallel rank 0 ended with status 0"):
            started.wait()


def test_ports_of_ranks_are_in_a_row() -> None:
    with free_ports("127.0.0.1", 0, 3) as (first, second, third):
        assert (second, third) == (first + 1, first + 2)
        with (
            contextlib.closing(bind("127.0.0.1", second)),
            pytest.raises(ConfigError, match=f"port: {second} on"),
            free_ports("127.0.0.1", first, 2),
        ):
            pass


def test_a_port_is_kept_for_its_rank_until_it_listens() -> None:
    """Any connection of this host might get it while a rank imports its libraries."""
    with free_ports("127.0.0.1", 0, 2) as ports:
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
                other.bind(("127.0.0.1", port))
            for _ in range(2):
                bind("127.0.0.1", port).close()
    for port in ports:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))


def test_roles_have_ranks_of_their_own() -> None:
    roles = RoleOptions(prefill_data_parallel_size=2)
    assert roles.data_ranks(EngineOptions()) == {"prefill": 2, "decode": 1, "both": 1}
    assert roles.data_ranks(EngineOptions(data_parallel_size=4)) == {"prefill": 2, "decode": 4, "both": 4}
    assert rank_ids("prefill-0", 2) == ["prefill-0_dp0", "prefill-0_dp1"]
    assert rank_ids("decode-0", 1) == ["decode-0"]
