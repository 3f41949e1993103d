"""A killed server leaves no shared memory, and no other process gets the port of a server that starts. Without vLLM."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.openai.http.serving import bind
from benchmarks.vllm.servers import VllmServer, free_port
from testkit.inside import processes_of
from testkit.sglang import servers

# As an engine does: it makes shared memory that a resource tracker knows, and starts a process that uses it too.
ENGINE = """
import multiprocessing, time
from multiprocessing.shared_memory import SharedMemory

memory = SharedMemory(create=True, size=64)
child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
child.start()
print(memory.name, child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("find", [free_port, servers.free_port], ids=["vllm", "sglang"])
def test_a_port_belongs_to_the_server_that_it_was_found_for(find: Callable[[], int]) -> None:
    port = find()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    for _ in range(2):  # a server that starts again too
        with contextlib.closing(bind("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port)).close()


def test_a_killed_server_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENGINE]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, start_new_session=True)
    server = VllmServer("engine", "", process, tmp_path / "log")
    try:
        assert process.stdout is not None
        with process.stdout:
            name, child = process.stdout.readline().decode().split()
        memory = Path("/dev/shm") / name
        assert memory.exists()
        assert int(child) in processes_of(server)
    finally:
        server.kill()
    assert not memory.exists()
    assert not processes_of(server)
