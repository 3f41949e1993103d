"""`baton up` as a service manager runs it: one process that keeps its engines running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from baton.deployment import BATON, end_processes
from baton.errors import EngineUnavailableError

_START_LIMIT_S = 120.0
_END_LIMIT_S = 30.0
_ENGINE = re.compile(r" INFO baton: ([a-z]+-\d+) +(http://[^\s,]+)")
_READY = re.compile(r" INFO baton: ready: (http://\S+)/v1\s")


class Supervised:
    """`baton up MODEL`, ready when the constructor returns, until `close`. `url` is its router's.

    Raises `EngineUnavailableError` with its output if it does not start.
    """

    def __init__(self, model: str, prefill: int, decode: int, flags: Sequence[str]) -> None:
        descriptor, name = tempfile.mkstemp(prefix="baton-up-", suffix=".log")
        self._log = Path(name)
        command = [*BATON, "up", model, "--prefill", str(prefill), "--decode", str(decode), "--port", "0", *flags]
        with os.fdopen(descriptor, "wb") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        deadline = time.monotonic() + _START_LIMIT_S
        while (ready := _READY.search(self.log())) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = self.log()
                self.close()
                raise EngineUnavailableError(f"baton up does not start: {text}")
            time.sleep(0.05)
        self.url = ready[1]
        self.engines = dict(_ENGINE.findall(self.log()))

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each running engine, by name."""
        found = {}
        main = f"/proc/{self._process.pid}/task/{self._process.pid}/children"
        for pid in Path(main).read_text().split():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            except FileNotFoundError:  # the process has ended
                continue
            if "--engine-id" in words:
                found[words[words.index("--engine-id") + 1]] = int(pid)
        return found

    def log(self) -> str:
        """All lines so far, of every process."""
        return self._log.read_text()

    def kill(self, name: str) -> int:
        """Kill an engine with SIGKILL. Returns its process id."""
        pid = self.pids[name]
        os.kill(pid, signal.SIGKILL)
        return pid

    def close(self) -> None:
        end_processes([self._process], _END_LIMIT_S)
        self._log.unlink(missing_ok=True)

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
