"""Child processes with a pipe for reports or lines, which die with their parent (PR_SET_PDEATHSIG)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

END_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1
# Imports nothing from the working directory, which may have a `types.py`; Python 3.10 cannot.
PYTHON = (sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []))


def start_reporting(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command of `baton` with `--ready-fd`. Returns the process and the pipe of its reports.

    The process has its own session, so Ctrl-C reaches only this process, which shuts its children down cleanly.
    `output`: for stdout and stderr.
    """
    read, write = os.pipe()
    try:
        process = subprocess.Popen(
            [*command, "--ready-fd", str(write)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=environment,
            pass_fds=(write,),
            start_new_session=True,
        )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    return process, read


class LineProcess:
    """A process that answers lines on stdin with lines on stdout."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)

    def write_line(self, line: str) -> None:
        """Raises `BrokenPipeError` if the process has ended."""
        stdin = self.process.stdin
        assert stdin is not None
        stdin.write(line + "\n")
        stdin.flush()

    def read_line(self) -> str:
        """The next line, or an empty string if the process has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self, limit_s: float | None = None) -> None:
        """Closes stdin and waits for the end, after `limit_s` seconds by SIGKILL."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.close()
        wait_or_kill(self.process, limit_s)
        stdout.close()


def wait_or_kill(process: subprocess.Popen[Any], limit_s: float | None = None) -> None:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_processes(processes: Sequence[subprocess.Popen[bytes]], limit_s: float = END_TIMEOUT_S) -> None:
    """Send SIGTERM in this order; after `limit_s` seconds SIGKILL."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # a stopped process cannot end
    deadline = time.monotonic() + limit_s
    for process in processes:
        wait_or_kill(process, max(0.0, deadline - time.monotonic()))


def die_with_parent(by: signal.Signals = signal.SIGTERM, pipe: int | None = None) -> None:
    """Have the kernel send this process `by` when its parent dies. Linux only.

    `pipe`: only the parent has its other end; tells of a death before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)
    if pipe is not None:
        poll = select.poll()
        poll.register(pipe, 0)
        if poll.poll(0):
            os.kill(os.getpid(), by)
