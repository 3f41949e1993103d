"""Logging to a pipe: waits for no reader, and loses no line that it has room for."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from baton.cli import log_stream
from baton.cli.log_stream import LogStream


@pytest.fixture
def pipe() -> Iterator[tuple[logging.Logger, int]]:
    """A logger that writes into a pipe of 4 KiB, and the end to read."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    logger = logging.Logger("t")
    with os.fdopen(writes, "w") as stream:
        handler = LogStream(stream)
        logger.addHandler(handler)
        yield logger, reads
        handler.close()
    os.close(reads)


def read_until(reads: int, last: str) -> list[str]:
    text = ""
    while not text.endswith(f"{last}\n"):
        text += os.read(reads, 1 << 16).decode()
    return text.splitlines()


def test_lines_that_find_a_full_pipe_are_written_later(pipe: tuple[logging.Logger, int]) -> None:
    logger, reads = pipe
    lines = [f"{number}: {'ä€𐍈' * number}" for number in range(600)]
    for line in lines:
        logger.warning("%s", line)
    assert read_until(reads, lines[-1]) == lines


def test_what_is_dropped_is_told(pipe: tuple[logging.Logger, int]) -> None:
    logger, reads = pipe
    for number in range(5000):
        logger.warning("%d", number)
    told = read_until(reads, "since nobody read them")
    dropped = re.fullmatch(r"(\d+) lines of this log were dropped, since nobody read them", told[-1])
    assert dropped is not None
    assert told[:-1] == [str(number) for number in range(5000 - int(dropped[1]))]
    assert 1000 <= len(told) < 2500
    logger.warning("again")
    assert read_until(reads, "again") == ["again"]


def test_a_process_ends_though_nobody_reads() -> None:
    code = (
        "import logging, sys; from baton.cli.log_stream import LogStream\n"
        "logging.getLogger().addHandler(LogStream(sys.stderr))\n"
        "for _ in range(9): logging.error('x' * 30_000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        assert process.wait(60) == 0


def test_a_slow_reader_has_time_for_each_line_at_the_end(
    pipe: tuple[logging.Logger, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, reads = pipe
    (stream,) = logger.handlers
    assert isinstance(stream, LogStream)
    waits = list[float | None]()
    monkeypatch.setattr(stream, "_has_room", lambda limit_s: waits.append(limit_s) or limit_s != 0.0)
    monkeypatch.setattr(stream, "_write_later", lambda: None)
    for number in range(9):
        logger.warning("%d", number)
    stream.close()
    assert waits[-9:] == [log_stream._CLOSE_S] * 9
    assert read_until(reads, "8") == [str(number) for number in range(9)]


def test_a_reader_that_is_gone_ends_no_thread_with_an_error() -> None:
    """The thread waits for room when the pipe is closed."""
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    stream = LogStream(os.fdopen(writes, "w"))
    logger = logging.Logger("t")
    logger.addHandler(stream)
    for _ in range(900):
        logger.warning("x" * 99)
    (thread,) = (found for found in threading.enumerate() if found.name == "baton-log")
    os.close(reads)
    thread.join(60)
    assert not thread.is_alive()
    stream.close()
    with contextlib.suppress(BrokenPipeError):
        stream.stream.close()
