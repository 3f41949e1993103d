"""A deployment whose processes can be seen, halted, killed and restarted."""

from __future__ import annotations

import os
import signal

from baton.deployment import Child, Deployment


class BreakableDeployment(Deployment):
    """A `Deployment`, with what chaos and measurements need beside."""

    @property
    def router_urls(self) -> list[str]:
        """Base URLs of the routers."""
        return [child.url or "" for child in self._children if child.name.startswith("router")]

    @property
    def pids(self) -> dict[str, int]:
        """Process id by name: `prefill-0`, ..., `decode-0`, ..., `both-0`, ..., `router`, `router-1`, ..."""
        return {child.name: child.process.pid for child in self._children}

    def kill(self, name: str) -> None:
        """End a child by SIGKILL, also one that is stopped, and wait until it is gone."""
        child = self._child(name)
        child.process.kill()
        child.process.wait()

    def stop(self, name: str) -> None:
        """Halt a child by SIGSTOP: it keeps its memory and sockets, and does nothing until `cont`."""
        self._child(name).process.send_signal(signal.SIGSTOP)

    def cont(self, name: str) -> None:
        """Let a child go on that `stop` halted."""
        self._child(name).process.send_signal(signal.SIGCONT)

    def restart(self, name: str, wait: bool = True) -> None:
        """Start a child anew at the port it had; one that still runs is killed first.

        With `wait` it runs when this returns, else `await_ready` tells. Raises `EngineUnavailableError` with the
        child's own error line when it does not start.
        """
        self.kill(name)
        old = self._child(name)
        if old.pipe >= 0:
            os.close(old.pipe)
        arguments = list(old.arguments)
        if old.url is not None:
            arguments[arguments.index("--port") + 1] = old.url.rpartition(":")[2]
        self._children[self._children.index(old)] = self._spawn(name, arguments)
        if wait:
            self.await_ready(name)

    def await_ready(self, name: str) -> None:
        """Wait for a child that `restart` has started. Blocks; may be called on another thread."""
        self._await_ready([self._child(name)])

    def log(self, name: str) -> str:
        """What a child has written so far."""
        return self._child(name).log.read_text(errors="replace")

    def _child(self, name: str) -> Child:
        return next(child for child in self._children if child.name == name)
