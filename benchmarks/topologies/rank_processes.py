"""Instances whose ranks are processes without a model, each with memory, transport and agent; this process
joins them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.protocol.events import DecodeProgress, HandoffEvent
from testkit.handoffs.ranks import UNTOUCHED, Rank, Shape

_ANSWER_S = 30.0
# Calls with an answer. All others are calls of the agent, without one.
_ASKED = ("fill", "check", "clear", "outstanding")


def serve(pipe: Connection, name: str, shape: Shape, rank: int, scheme: str, config: dict[str, object]) -> None:
    """Take calls from the pipe, and send the agent's events there. The main function of a rank's process."""
    lock = threading.Lock()

    def say(*what: object) -> None:
        with lock:
            pipe.send(what)

    made = Rank(
        name,
        shape,
        rank,
        scheme,
        lambda event: say("on_event", event),
        lambda key, peer: say("on_peer", key, peer),
        **config,
    )

    def clear() -> None:
        for region in made.regions:
            region.view(np.float32)[:] = UNTOUCHED

    asked: dict[str, Callable[..., object]] = {
        "fill": made.fill,
        "check": made.check,
        "clear": clear,
        "outstanding": lambda: made.agent.stats().outstanding,
    }
    say("address", made.agent.address)
    while (call := pipe.recv()) is not None:
        what, *arguments = call
        if what not in asked:
            getattr(made.agent, what)(*arguments)
            continue
        try:
            say("answer", asked[what](*arguments))
        except AssertionError as error:
            say("answer", error)
    made.close()


class RemoteRank:
    """The agent of a rank in another process. Calls to a dead one are lost."""

    def __init__(self, name: str, shape: Shape, rank: int, scheme: str, config: dict[str, object]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._answers: queue.Queue[Any] = queue.Queue()
        self._lock = threading.Lock()
        order = (there, name, shape, rank, scheme, config)
        self.process = context.Process(target=serve, args=order, daemon=True)
        self.process.start()
        there.close()

    def begin(self, together: InstanceAgent) -> None:
        """Wait until it listens. Its events go to `together` from now on."""
        if not self._pipe.poll(60):
            raise TimeoutError("a rank's process did not start")
        self.address: str = self._pipe.recv()[1]
        threading.Thread(target=self._listen, args=(together,), daemon=True).start()

    def _listen(self, together: InstanceAgent) -> None:
        try:
            while True:
                name, *what = self._pipe.recv()
                if name == "answer":
                    self._answers.put(what[0])
                else:
                    getattr(together, name)(*what)
        except (EOFError, OSError):
            pass

    def _send(self, *what: object) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._pipe.send(what)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        # A callback cannot cross the pipe.
        return lambda *arguments: self._send(name, *(each for each in arguments if not callable(each)))

    def ask(self, name: str, *arguments: object) -> Any:
        """Make one of the calls with an answer. Raises the rank's `AssertionError`, or `queue.Empty` if no answer
        comes.
        """
        assert name in _ASKED
        self._send(name, *arguments)
        answer = self._answers.get(timeout=_ANSWER_S)
        if isinstance(answer, AssertionError):
            raise answer
        return answer

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(20)

    def end(self) -> None:
        """End in order, or by SIGKILL."""
        if self.process.is_alive():
            with self._lock, contextlib.suppress(OSError):
                self._pipe.send(None)
        self.process.join(20)
        if self.process.is_alive():
            self.kill()
        self._pipe.close()


class RemoteEngine:
    """As `testkit.handoffs.ranks.Engine`, with a process per rank."""

    def __init__(self, name: str, shape: Shape, scheme: str = "shm://", **config: object) -> None:
        self.name, self.shape = name, shape
        self.events: queue.Queue[HandoffEvent] = queue.Queue()
        self.together = InstanceAgent(shape.instance(0), self._note)
        self.ranks = [RemoteRank(name, shape, rank, scheme, config) for rank in range(shape.num_ranks)]

    def begin(self) -> None:
        """Wait until all ranks listen."""
        for rank in self.ranks:
            rank.begin(self.together)
        remotes: list[Any] = list(self.ranks)
        self.together.bind(remotes)
        self.addresses = [rank.address for rank in self.ranks]

    def _note(self, event: HandoffEvent) -> None:
        if not isinstance(event, DecodeProgress):
            self.events.put(event)

    def pages(self, first: int, tokens: int) -> dict[str, list[int]]:
        count = -(-tokens // self.shape.page_size)
        return {
            group: [first + count - 1 - i + shift for i in range(count)]
            for shift, group in enumerate(self.shape.groups)
        }

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()
