"""Engines and routers as child processes, which die with their parent.

If a child's pipe (`deployment/child.py`) ends before `ready`, the child has failed: it has refused a setting, or its
log says why.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from baton.children import END_TIMEOUT_S, PYTHON, end_processes, start_reporting
from baton.deployment.child import read_reports
from baton.deployment.child_log import ChildLog, LogLine
from baton.deployment.child_process import Child
from baton.directories import RunDirectory
from baton.errors import ConfigError, EngineUnavailableError
from baton.handoff.session.keys import make_keys, ticket_key_file
from baton.transports.mapped.segments import remove_stale_segments
from baton.transports.registry import parse_uri, with_path

D = TypeVar("D", bound="Deployment")
BATON = (*PYTHON, "-m", "baton.cli")
CONFIG_STATUS = 2
# Prefix of environment variables that are flags of `baton`.
FLAG_VARIABLES = "BATON_FLAG_"
# `cli._SPIN_COUNT` of engines that share cores.
_SHARED_SPINS = 100


def _environment(engines: int) -> dict[str, str]:
    """Without `baton`'s flags; the user's win. Each engine gets twice its even share of the cores, unbound:
    P and D are busy at different times, or wait for memory."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(FLAG_VARIABLES)}
    if engines == 1 or not hasattr(os, "sched_getaffinity"):
        return own
    cores = len(os.sched_getaffinity(0))
    threads = max(1, min(cores, 2 * cores // engines))
    spins = {} if "OMP_WAIT_POLICY" in own else {"GOMP_SPINCOUNT": str(_SHARED_SPINS)}
    return {"OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "false", **spins, **own}


def check_shared_transport(uri: str) -> None:
    """Raises `ConfigError` for a transport that works within one process only, or an unknown one."""
    if parse_uri(uri)[0].rpartition("+")[2] == "local":
        raise ConfigError("kv_transport", "local moves KV within one process only")


@dataclass(eq=False)
class Deployment:
    """Engines of one model, and `routers` routers unless `router` is False. All serve after construction.

    - `role_flags`: flags for the engines of one role, after `engine_flags`.
    - `port`: the first router's. `engine_port_base`: the first engine's. 0, and other routers: free ports.
    - `named`: gives the setting in a child's error the user's name for it.
    - `forward`: called with a child's name and each line of its log.
    - `start_timeout_s`: without progress.
    - `shutdown_timeout_s`: for a child that gets a signal. Close the deployment only after its requests have ended.
    - `data_ranks`: data-parallel ranks per engine, by role.

    `url` is the first router's, or else the first engine's. Create it on a thread that outlives it: on Linux children
    die with that thread.

    Raises `EngineUnavailableError` with the error line of a child that does not start, or its `ConfigError`;
    `ConfigError` for a transport that processes cannot share. No child is left after an error.
    """

    model: str
    prefill: int = 1
    decode: int = 1
    both: int = 0
    engine_flags: Sequence[str] = ()
    role_flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    kv_transport: str | None = None
    router_flags: Sequence[str] = ()
    port: int = 0
    router: bool = True
    routers: int = 1
    on_progress: Callable[[str], None] = lambda text: None
    forward: Callable[[str, LogLine], None] | None = None
    log_format: str = "text"
    command: Sequence[str] | None = None
    start_timeout_s: float = 300.0
    shutdown_timeout_s: float = 0.0
    engine_port_base: int = 0
    data_ranks: Mapping[str, int] = field(default_factory=dict)
    named: Callable[[str, ConfigError], ConfigError] = lambda role, error: error

    def __post_init__(self) -> None:
        counts = self.prefill, self.decode, self.both
        if min(counts) < 0 or (self.prefill == 0) != (self.decode == 0) or self.prefill + self.both == 0:
            raise ConfigError("prefill", "there must be engines of both roles, or engines of role both")
        if self.kv_transport is not None:
            check_shared_transport(self.kv_transport)
        self._children: list[Child] = []
        self._run = RunDirectory()
        self._directory = self._run.path
        self._urls: dict[str, list[str]] = {"prefill": [], "decode": [], "both": []}
        try:
            self._start_engines()
            self.url = self.engine_urls[0]
            if self.router:
                self._start_routers()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise EngineUnavailableError(f"a process could not be started: {error}") from error
            raise

    def _start_engines(self) -> None:
        roles = ["prefill"] * self.prefill + ["decode"] * self.decode + ["both"] * self.both
        self._environment = _environment(len(roles))
        names = [f"{role}-{roles[:number].count(role)}" for number, role in enumerate(roles)]
        sizes = [self.data_ranks.get(role, 1) for role in roles]
        keys = self._directory / "keys"
        try:
            make_keys(keys, [id_ for name, size in zip(names, sizes, strict=True) for id_ in rank_ids(name, size)])
        except ConfigError as error:
            raise ConfigError("TMPDIR", error.message) from None
        self.ticket_key_file = str(ticket_key_file(keys))
        if self.engine_port_base + sum(sizes) > 65536:
            raise ConfigError("engine_port_base", f"leaves no ports for {sum(sizes)} engines")
        common = ["--engines-per-host", str(len(names)), "--log-level", "warning", "--log-format", self.log_format]
        common += self.engine_flags
        if self.kv_transport is not None:
            common += ["--kv-transport", with_path(self.kv_transport, str(self._directory / "kv"))]
        for number, (name, role) in enumerate(zip(names, roles, strict=True)):
            port = self.engine_port_base + sum(sizes[:number]) if self.engine_port_base else 0
            flags = ["--role", role, "--engine-id", name, "--port", str(port), *common, *self.role_flags.get(role, ())]
            if max(sizes) > 1:
                flags += ["--data-parallel-size", str(sizes[number])]
            if role != "both":
                flags += ["--keys", str(keys)]
            elif self.router:
                flags.append("--token-api")
            self._children.append(self._spawn(name, ["serve", self.model, *flags]))
        self._await_ready(self._children)
        for child, role in zip(self._children, roles, strict=True):
            self._urls[role] += child.urls

    def _start_routers(self) -> None:
        started = []
        for number in range(self.routers):
            flags = [*self._router_flags(0 if number else self.port), *self.router_flags]
            started.append(self._spawn("router" + f"-{number}" * (number > 0), ["router", *flags]))
            self._children.append(started[-1])
        self._await_ready(started)
        self.url = started[0].url or ""

    @property
    def prefill_urls(self) -> list[str]:
        return list(self._urls["prefill"])

    @property
    def decode_urls(self) -> list[str]:
        return list(self._urls["decode"])

    @property
    def both_urls(self) -> list[str]:
        return list(self._urls["both"])

    @property
    def engine_urls(self) -> list[str]:
        return self.prefill_urls + self.decode_urls + self.both_urls

    def engines(self) -> dict[str, str]:
        return {
            child.name: f"{', '.join(child.urls)}, {child.kv}"
            for child in self._children
            if child.url in self.engine_urls
        }

    def ended(self) -> dict[str, str]:
        return {c.name: self._cause(c) for c in self._children if c.process.poll() is not None}

    def ended_cleanly(self, name: str) -> bool:
        """Whether the child ended with status 0 because of a signal. One that exits by itself has failed."""
        child = self._child(name)
        if child.process.poll() != 0:
            return False
        child.read_last_reports()
        return child.signalled

    def kill(self, name: str) -> None:
        """Send SIGKILL, which also ends a stopped child, and wait."""
        child = self._child(name)
        child.process.kill()
        child.process.wait()

    def restart(self, name: str, wait: bool = True) -> None:
        """Start a child again on the same port; it is killed if it runs.

        With `wait`, raises `EngineUnavailableError` if it does not start.
        """
        self.kill(name)
        old = self._child(name)
        if old.pipe >= 0:
            os.close(old.pipe)
            old.pipe = -1
        arguments = list(old.arguments)
        if old.url is not None:
            arguments[arguments.index("--port") + 1] = old.url.rpartition(":")[2]
        self._children[self._children.index(old)] = new = self._spawn(name, arguments)
        if wait:
            self._await_ready([new])

    def close(self) -> None:
        """End all children with SIGTERM, then SIGKILL, and delete their files. Idempotent."""
        children = self._children[::-1]  # the router, which uses engines, first
        end_processes([child.process for child in children])
        for child in children:
            if child.pipe >= 0:
                os.close(child.pipe)
                child.pipe = -1
        # Killed engines cannot unlink their shared-memory segments.
        remove_stale_segments()
        self._run.close()

    def __enter__(self: D) -> D:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _child(self, name: str) -> Child:
        return next(child for child in self._children if child.name == name)

    def _router_flags(self, port: int) -> list[str]:
        flags = ["--port", str(port), "--ticket-key-file", self.ticket_key_file]
        flags += ["--max-local-prefill-length", "0"]
        for role, urls in self._urls.items():
            for url in urls:
                flags += [f"--{role}", url]
        return flags

    def _spawn(self, name: str, arguments: list[str]) -> Child:
        forward = self.forward and functools.partial(self.forward, name)
        log = ChildLog(self._directory / f"{name}.log", forward)
        command = [*(self.command or BATON), *arguments, "--shutdown-timeout", str(self.shutdown_timeout_s)]
        with log.writing() as output:
            process, pipe = start_reporting(command, self._environment, output)
        return Child(name, arguments, process, pipe, log)

    def _await_ready(self, children: Sequence[Child]) -> None:
        heard = time.monotonic()
        with selectors.DefaultSelector() as selector:
            waiting = [child for child in children if child.url is None]
            for child in waiting:
                selector.register(child.pipe, selectors.EVENT_READ, child)
            while any(child.url is None for child in waiting):
                events = selector.select(max(0.0, heard + self.start_timeout_s - time.monotonic()))
                if not events:
                    names = ", ".join(child.name for child in waiting if child.url is None)
                    raise EngineUnavailableError(f"{names}: no progress for {self.start_timeout_s:g} s of the start")
                for key, _ in events:
                    if self._has_progressed(key.data):
                        heard = time.monotonic()
                    if key.data.url is not None:
                        selector.unregister(key.fileobj)

    def _cause(self, child: Child) -> str:
        child.read_last_reports()
        return str(self.named(child.role, child.refusal)) if child.refusal is not None else _last_line(child)

    def _has_progressed(self, child: Child) -> bool:
        reports, child.pending = read_reports(child.pipe, child.pending)
        if reports is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(END_TIMEOUT_S)
            if child.refusal is not None:
                # Another start would not help.
                raise self.named(child.role, child.refusal)
            if child.process.returncode == CONFIG_STATUS:
                raise ConfigError(child.name, f"did not start: {_last_line(child)}")
            raise EngineUnavailableError(f"{child.name} did not start: {_last_line(child)}")
        for report in reports:
            child.note(report)
            if "progress" in report or "ready" in report:
                self.on_progress(f"{child.name}: {report.get('progress') or f'ready at {child.url}'}")
        return any("again" not in report for report in reports)


def rank_ids(engine_id: str, data_ranks: int) -> list[str]:
    return [engine_id] if data_ranks == 1 else [f"{engine_id}_dp{rank}" for rank in range(data_ranks)]


def _last_line(child: Child) -> str:
    if child.process.returncode == -signal.SIGKILL:
        return "it was killed (SIGKILL)"
    return child.log.last_words() or f"it ended with status {child.process.returncode}"
