"""A deployment whose processes can be observed and stopped."""

from __future__ import annotations

import signal

from baton.deployment import Deployment


class BreakableDeployment(Deployment):
    """A `Deployment` with process control and URLs, for chaos tests and measurements."""

    @property
    def router_urls(self) -> list[str]:
        return [child.url or "" for child in self._children if child.name.startswith("router")]

    @property
    def engines_urls(self) -> dict[str, tuple[str, ...]]:
        """Base URLs of each engine by its name, one per data-parallel rank."""
        return {child.name: child.urls for child in self._children if not child.name.startswith("router")}

    @property
    def pids(self) -> dict[str, int]:
        """Process id by name: `prefill-0`, ..., `decode-0`, ..., `both-0`, ..., `router`, `router-1`, ..."""
        return {child.name: child.process.pid for child in self._children}

    def stop(self, name: str) -> None:
        """Send SIGSTOP: the child keeps its memory and sockets, and does nothing until `cont`."""
        self._child(name).process.send_signal(signal.SIGSTOP)

    def cont(self, name: str) -> None:
        self._child(name).process.send_signal(signal.SIGCONT)

    def terminate(self, name: str) -> None:
        """Send SIGTERM: the child may finish its requests."""
        self._child(name).process.terminate()

    def wait(self, name: str) -> int:
        """Wait until a child has ended. Returns its exit status. Blocks; may be called on another thread."""
        return self._child(name).process.wait()

    def await_ready(self, name: str) -> None:
        """Wait for a child that `restart` has started. Blocks; may be called on another thread."""
        self._await_ready([self._child(name)])

    def log(self, name: str) -> str:
        return self._child(name).log.path.read_text(errors="replace")
