"""vLLM servers on this machine's CPU: start, stop, pause, and their CPU time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.children import die_with_parent
from baton.errors import EngineUnavailableError
from baton.transports.process import stat_of
from testkit.processes.launcher import Process

API_SERVER = "vllm.entrypoints.openai.api_server"
START_TIMEOUT_S = 400.0
_STOP_TIMEOUT_S = 30.0
_TRACKER_TIMEOUT_S = 10.0
_LOG_TAIL = 3000
# One thread each: prefill, decode and the server that they are compared with share few cores.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Longer than any client's.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
}
# Flags of all servers, which a server's own may replace.
FLAGS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"]
# By its full name, since vLLM replaces "uni" by "mp" on CPUs: two processes, which spin on a queue between them for a
# second after every message. Servers that share few cores would wait for each other's spinning.
ONE_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One server: `flags` of vLLM besides model, host and connector, with `--port` if it is not any free one;
    `kv_transfer_config` as for vLLM.
    """

    name: str
    flags: Sequence[str] = ()
    kv_transfer_config: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class VllmServer:
    """A running server at `url`. Its processes are one session (setsid)."""

    name: str
    url: str
    process: Process
    log: Path

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End all its processes at once, without a shutdown.

        Python's resource trackers are killed last: after the others are dead they remove their shared memory, which
        nothing else would.
        """
        self.signal(signal.SIGSTOP)
        processes = self._processes()
        trackers = {pid for pid in processes if _is_tracker(pid)}
        for pid in processes.keys() - trackers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.signal(signal.SIGCONT)
        self.process.wait()
        until = time.monotonic() + _TRACKER_TIMEOUT_S
        while self._processes() and time.monotonic() < until:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)

    def cpu_s(self) -> float:
        """CPU seconds that its processes have used so far."""
        return sum(self._processes().values())

    def process_ids(self) -> list[int]:
        """Its living processes."""
        return [*self._processes()]

    def bind(self, engine: Set[int], rest: Set[int]) -> None:
        """`engine`: the cores of its engine core."""
        for pid in self._processes():
            name = Path(f"/proc/{pid}/comm").read_text()
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(task.name), engine if name.startswith("VLLM::Eng") else rest)

    def _processes(self) -> dict[int, float]:
        """CPU seconds of its living processes, by process id."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            fields = stat_of(int(entry.name))
            if fields and int(fields[3]) == self.process.pid and fields[0] != "Z":
                ticks = int(fields[11]) + int(fields[12])
                found[int(entry.name)] = ticks / os.sysconf("SC_CLK_TCK")
        return found


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


_held: list[socket.socket] = []


def free_port(port: int = 0) -> int:
    """A port, or this one, that nobody else finds free while this process lives. A server that sets SO_REUSEADDR, as
    all do that are started here, can listen on it nevertheless. Raises OSError for a port in use."""
    holder = socket.socket()
    try:
        holder.bind(("127.0.0.1", port))
    except OSError:
        holder.close()
        raise
    # Not before: another holder's port would seem free.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held.append(holder)
    return int(holder.getsockname()[1])


@contextlib.contextmanager
def serve(python: str, model: str, folder: Path, configs: Sequence[ServerConfig]) -> Iterator[list[VllmServer]]:
    """Start servers by `configs`, all ready; logs go into `folder`. `python` is an interpreter that has vLLM.

    Raises EngineUnavailableError, with the end of the log, if one does not start.
    """
    servers: list[VllmServer] = []
    try:
        for config in configs:
            servers.append(_start(python, model, folder, config))
        for server in servers:
            _wait_ready(server)
        yield servers
    finally:
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                server.signal(signal.SIGCONT)
            server.process.terminate()
        for server in servers:
            try:
                server.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()


def environment_of(own: Mapping[str, str]) -> dict[str, str]:
    """What a server with these variables of its own has besides this process's environment."""
    found = {**ENVIRONMENT, **own}
    root = Path(__file__).parents[2]
    path = os.pathsep.join(p for p in (found.get("PYTHONPATH"), str(root / "src"), str(root)) if p)
    return {**found, "PYTHONPATH": path}


def spawn(python: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Start vLLM's own command as the leader of a session. `environment`: besides this process's."""
    with log.open("wb") as out:
        return subprocess.Popen(
            [python, "-m", API_SERVER, *arguments],
            env={**os.environ, **environment},
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


# How servers start; tests have another way.
launch = spawn


def _start(python: str, model: str, folder: Path, config: ServerConfig) -> VllmServer:
    flags = list(config.flags)
    port = int(flags[flags.index("--port") + 1]) if "--port" in flags else free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--model", model, "--served-model-name", "demo"]
    arguments += [*FLAGS, *config.flags]
    if config.kv_transfer_config is not None:
        arguments += ["--kv-transfer-config", json.dumps(dict(config.kv_transfer_config))]
    log = folder / f"{config.name}.log"
    process = launch(python, arguments, environment_of(config.environment), log)
    return VllmServer(config.name, f"http://127.0.0.1:{port}", process, log)


def _wait_ready(server: VllmServer) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until and server.process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    tail = server.log.read_text(errors="replace")[-_LOG_TAIL:]
    raise EngineUnavailableError(f"vLLM server {server.name} did not start:\n{tail}")
