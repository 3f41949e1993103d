"""Directories of keys and of stored KV are refused if they belong to another user or are open to others."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.directories import RunDirectory, own_secret, sweep_runs
from baton.errors import ConfigError
from baton.handoff.protocol.ticket import load_or_create_key
from baton.handoff.session.keys import KeyRing, make_keys, ticket_key_file
from baton.kvstore.store import FileStore

Spoil = Callable[[Path], None]


def another_users(path: Path) -> None:
    """As root, change the owner; otherwise pretend to be another user."""
    if os.geteuid() == 0:
        os.chown(path, 4711, 4711)


@pytest.fixture(params=["0777", "1777", "0770", "another user's"])
def spoil(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Spoil, str]:
    if request.param == "another user's":
        if os.geteuid() != 0:
            monkeypatch.setattr("baton.directories.os.geteuid", lambda: 4711)
        return another_users, "belongs to another user"
    return lambda path: path.chmod(int(request.param, 8)), "may be written by others; chmod go-w"


@pytest.mark.parametrize("what", [".", "public", "secret"])
def test_an_unsafe_key_directory_is_refused(tmp_path: Path, spoil: tuple[Spoil, str], what: str) -> None:
    make_keys(tmp_path / "keys", ["P"])
    KeyRing(tmp_path / "keys", "P")
    change, why = spoil
    change(tmp_path / "keys" / what)
    with pytest.raises(ConfigError, match=why):
        KeyRing(tmp_path / "keys", "P")
    if what == ".":
        with pytest.raises(ConfigError, match=why):
            ticket_key_file(tmp_path / "keys")
        with pytest.raises(ConfigError, match=why):
            make_keys(tmp_path / "keys", ["Q"])


def test_an_unsafe_store_directory_is_refused(tmp_path: Path, spoil: tuple[Spoil, str]) -> None:
    FileStore(tmp_path / "kv")
    change, why = spoil
    change(tmp_path / "kv")
    with pytest.raises(ConfigError, match=why):
        FileStore(tmp_path / "kv")


@pytest.mark.parametrize("file", ["keys/secret/P.key", "keys/public/P.pub", "keys/ticket.key"])
def test_a_key_file_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    make_keys(tmp_path / "keys", ["P"])
    path = tmp_path / file
    another_users(path)
    if os.geteuid() != 0:
        monkeypatch.setattr("baton.directories.os.geteuid", lambda: 4711)
    with pytest.raises(ConfigError, match="belongs to another user"):
        load_or_create_key(path) if path.name == "ticket.key" else KeyRing(tmp_path / "keys", "P")


def test_a_secret_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    def full() -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConfigError, match=r"^token: .*No space left on device$"):
        own_secret(tmp_path / "token", "token", full)
    assert not list(tmp_path.iterdir())


_OWNER = """
import sys
from baton.directories import RunDirectory
directory = RunDirectory("test-")
(directory.path / "secret").write_text("key")
print(directory.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_directories_of_a_killed_run_are_removed_by_the_next(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", _OWNER]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        assert left.parent == temporary
        own = RunDirectory()
        assert left.exists(), "its owner lives"
        owner.kill()
    assert (left / "secret").exists()
    other = RunDirectory()
    assert not left.exists()
    assert own.path.exists()
    for directory in (own, other, own):
        directory.close()
    assert not list(temporary.iterdir())


def test_a_directory_in_use_is_locked_so_that_no_cleaner_of_temporary_files_removes_it(temporary: Path) -> None:
    with contextlib.closing(RunDirectory()) as own:
        descriptor = os.open(own.path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def _run_until(event: int, done: Callable[[], object]) -> bool:
    """`done` in a fork that is killed at its `event`-th change of a file. Returns whether it ended before."""
    changes = itertools.count(1)

    def count(name: str, arguments: tuple[Any, ...]) -> None:
        if name in ("os.mkdir", "open", "os.rename", "os.remove", "os.rmdir") and next(changes) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    if (pid := os.fork()) == 0:
        try:
            sys.addaudithook(count)
            done()
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_a_run_that_is_killed_at_any_moment_leaves_nothing_to_the_second_next(temporary: Path) -> None:
    """While it makes its directory, and while it removes that of another."""

    def make() -> None:
        directory = RunDirectory()
        (directory.path / "keys").mkdir()
        (directory.path / "keys" / "secret").touch()
        (directory.path / "log").touch()

    assert _run_until(0, make)
    left = max(len(list(path.rglob("*"))) for path in temporary.iterdir())
    for event in range(1, 100):
        ended = _run_until(event, make)
        assert len(list(temporary.iterdir())) <= 2, "a run that was killed before"
        if ended:
            break
    assert 99 > event > left > 3
    sweep_runs()
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("moment", ["open", "fcntl.flock"])
def test_a_directory_that_is_swept_before_it_is_locked(temporary: Path, moment: str) -> None:
    def make() -> None:
        swept: list[str] = []

        def sweep(name: str, arguments: tuple[Any, ...]) -> None:
            if name == moment and not swept and (made := list(temporary.iterdir())):
                swept.append(name)
                sweep_runs()
                assert not made[0].exists()

        sys.addaudithook(sweep)
        RunDirectory()
        assert swept

    assert _run_until(0, make)
    (left,) = temporary.iterdir()
    assert sweep_runs() == [left.name]


def test_without_a_writable_temporary_directory_the_error_names_it(temporary: Path) -> None:
    temporary.rmdir()
    with pytest.raises(ConfigError, match=r"^TMPDIR: a directory for temporary files is needed: ") as caught:
        RunDirectory()
    assert caught.value.field == "TMPDIR"
    temporary.mkdir()


class OnAFullDisk(RunDirectory):
    def _take(self) -> None:
        (self.path / "begun").touch()
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_run_directory_that_cannot_be_completed_is_removed(temporary: Path) -> None:
    with pytest.raises(ConfigError, match="No space left on device"):
        OnAFullDisk()
    assert not list(temporary.iterdir())


def test_only_directories_of_runs_are_removed(temporary: Path) -> None:
    (temporary / "baton-mine").mkdir(mode=0o700)
    (temporary / "baton-open").mkdir()
    (temporary / "baton-open").chmod(0o755)
    (temporary / "baton-open" / ".lock").touch()
    (temporary / "baton-link").symlink_to(temporary / "baton-mine")
    (temporary / "baton-file").touch()
    assert sweep_runs() == []
    (temporary / "baton-mine" / ".lock").touch()
    assert sweep_runs() == ["baton-mine"]
    assert (temporary / "baton-link").is_symlink()
