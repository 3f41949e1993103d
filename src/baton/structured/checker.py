"""Checks grammars in a separate process, with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from baton.children import PYTHON
from baton.errors import EngineUnavailableError
from baton.structured.source import grammar_error

START_LIMIT_S = 60.0
CHECK_LIMIT_S = 5.0


class Checker:
    """Runs `baton.structured.check_process`, started with the first grammar. Thread-safe; checks one grammar at a
    time."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer_json, self._vocab_size, self._eos_ids = tokenizer_json, vocab_size, list(eos_ids)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, source: str) -> None:
        """Raise `RequestError` for a grammar that cannot be compiled, or not in time, and `EngineUnavailableError` if
        no process can start."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._start()
            try:
                problem = self._ask(source, CHECK_LIMIT_S)
            except TimeoutError:
                self._end()
                raise grammar_error(f"it takes more than {CHECK_LIMIT_S:g} s to compile") from None
            except (OSError, ValueError):
                self._end()
                raise grammar_error("it takes too much memory or nests too deeply to be compiled") from None
            if problem:
                raise grammar_error(problem)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                [*PYTHON, "-m", "baton.structured.check_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # A new session, so that Ctrl-C does not reach it.
                env={**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
                start_new_session=True,
            )
        except OSError as error:
            what = "the process that checks grammars cannot be started"
            raise EngineUnavailableError(f"{what}: {error.strerror}") from None
        try:
            problem = self._ask([self._tokenizer_json(), self._vocab_size, self._eos_ids], START_LIMIT_S)
        except (TimeoutError, OSError, ValueError):
            problem = "the process that checks grammars did not start"
        if problem:
            self._end()
            raise grammar_error(problem)

    def _ask(self, value: object, limit_s: float) -> str:
        """Raises `TimeoutError`, and `OSError` or `ValueError` if the process has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        unsent, said = memoryview(json.dumps(value).encode() + b"\n"), bytearray()
        # A process that hangs must not block the write: a tokenizer is larger than a pipe.
        stdin, stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(stdin, False)
        with selectors.DefaultSelector() as ready:
            ready.register(stdin, selectors.EVENT_WRITE)
            ready.register(stdout, selectors.EVENT_READ)
            while not said.endswith(b"\n"):
                remaining_s = deadline - time.monotonic()
                events = ready.select(remaining_s) if remaining_s > 0 else []
                if not events:
                    raise TimeoutError
                for key, _ in events:
                    if key.fd == stdin:
                        unsent = unsent[os.write(stdin, unsent) :]
                        if not unsent:
                            ready.unregister(stdin)
                        continue
                    data = os.read(stdout, 1 << 16)
                    if not data:
                        raise ValueError("the process ended")
                    said += data
        return str(json.loads(said))

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
