"""Logging to a pipe: waits for no reader, and loses no line that it has room for."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_a_slow_reader_has_time_for_each_line_at_the_end() -> None:
    """It reads for longer than a process waits for one line."""
    code = (
        "import logging, sys; from baton.cli.log_stream import LogStream\n"
        "logging.getLogger().addHandler(LogStream(sys.stderr))\n"
        "for number in range(50): logging.error('%d' + 'x' * 4_090, number)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stderr is not None
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        text = b""
        while data := process.stderr.read(4096):
            text += data
            time.sleep(0.06)
    assert [line.rstrip("x") for line in text.decode().splitlines()] == [str(number) for number in range(50)]


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


def fill(pipe: int) -> None:
    """As another process that has the pipe too."""
    own = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(own, b"y" * 4095 + b"\n")
    os.close(own)


def test_a_malformed_line_is_told_and_waits_for_no_reader(pipe: tuple[logging.Logger, int]) -> None:
    logger, reads = pipe
    writer = threading.Thread(target=lambda: [logger.warning("%d", "x" * 9) for _ in range(900)], daemon=True)
    writer.start()
    writer.join(60)
    assert not writer.is_alive()
    logger.warning("last")
    told = read_until(reads, "last")
    assert len(told) == 901
    assert told[0].startswith("'%d' cannot be logged: ")


class RacedStream(LogStream):
    """Another process fills the pipe when this one has found room for the first time."""

    is_filled = False

    def has_room(self, timeout_s: float | None) -> bool:
        has_room = super().has_room(timeout_s)
        if not self.is_filled:
            self.is_filled = True
            fill(self.stream.fileno())
        return has_room


def test_a_pipe_that_another_process_fills_first_is_not_waited_for() -> None:
    reads, writes = os.pipe()
    with os.fdopen(writes, "w") as stream:
        logger, handler = logging.Logger("t"), RacedStream(stream)
        logger.addHandler(handler)
        writer = threading.Thread(target=logger.warning, args=("x" * 99,), daemon=True)
        writer.start()
        writer.join(60)
        assert not writer.is_alive()
        assert "x" * 99 in read_until(reads, "x" * 99)
        handler.close()
    os.close(reads)


def test_a_character_that_the_encoding_lacks_takes_ten_bytes() -> None:
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(writes, "w", encoding="ascii", errors="backslashreplace") as stream:
        logger, handler = logging.Logger("t"), LogStream(stream)
        logger.addHandler(handler)
        writer = threading.Thread(target=logger.warning, args=("\U0001f600" * 1000,), daemon=True)
        writer.start()
        writer.join(60)
        assert not writer.is_alive()
        logger.warning("last")
        assert read_until(reads, "last") == ["\\U0001f600" * 1000, "last"]
        handler.close()
    os.close(reads)


def test_a_forked_process_does_not_repeat_the_lines_of_its_parent(pipe: tuple[logging.Logger, int]) -> None:
    logger, reads = pipe
    lines = [f"{number}: {'x' * 99}" for number in range(500)]
    for line in lines:
        logger.warning("%s", line)
    if not (child := os.fork()):
        logger.warning("child")
        for thread in threading.enumerate():
            if thread.name == "baton-log":
                thread.join()
        os.kill(os.getpid(), signal.SIGKILL)
    logger.warning("parent")
    found: list[str] = []
    while not {"parent", "child"} <= set(found):
        found += os.read(reads, 1 << 16).decode().splitlines()
    os.waitpid(child, 0)
    found.remove("child")
    assert found == [*lines, "parent"]


def test_a_log_that_dropped_lines_goes_on_with_another_reader(tmp_path: Path) -> None:
    """Of a named pipe, whose first reader ends."""
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    reads = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with open(fifo, "w") as stream:
        logger, handler = logging.Logger("t"), LogStream(stream)
        logger.addHandler(handler)
        for _ in range(5000):
            logger.warning("x" * 99)
        (thread,) = (found for found in threading.enumerate() if found.name == "baton-log")
        os.close(reads)
        thread.join(60)
        reads = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(reads, True)
        told = b""
        while b"again\n" not in told:
            logger.warning("again")
            told += os.read(reads, 1 << 16)
        assert b" lines of this log were dropped, since nobody read them\n" in told
        handler.close()
    os.close(reads)
