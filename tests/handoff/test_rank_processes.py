"""Two ranks of P, each a process with its own memory, joined by one agent; D in this process. Bytes move over shm."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from baton.handoff.agent.leg_events import GiveUp
from baton.handoff.protocol import events as ev
from testkit.handoffs.ranks import Engine, Rank, Shape, prefill, settle, ticket_for, wanted_of

P_SHAPE, D_SHAPE = Shape(tp=2), Shape(tp=1, page_size=5)
N = 13


def serve(pipe: Connection, rank: int) -> None:
    """The main function of one rank of P: takes its agent's calls from the pipe, and sends the agent's events."""
    lock = threading.Lock()

    def say(*what: object) -> None:
        with lock:
            pipe.send(what)

    def on_event(event: ev.HandoffEvent) -> None:
        say("on_event", event)

    made = Rank("P", P_SHAPE, rank, "shm://", on_event, lambda key, peer: say("on_peer", key, peer))
    say("address", made.agent.address)
    while (call := pipe.recv()) is not None:
        name, *arguments = call
        target: Callable[..., Any] = made.fill if name == "fill" else getattr(made.agent, name)
        target(*arguments)
    made.close()


class Remote:
    def __init__(self, together: Any, rank: int) -> None:
        self.pipe, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imported once for all ranks
        self.process = context.Process(target=serve, args=(there, rank), daemon=True)
        self.process.start()
        there.close()
        assert self.pipe.poll(60), "the child did not start"
        self.address = self.pipe.recv()[1]
        self._together = together
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        try:
            while True:
                name, *what = self.pipe.recv()
                getattr(self._together, name)(*what)
        except (EOFError, OSError):
            pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            # A callback cannot cross the pipe; the killed rank takes no call.
            with_arguments = [replace(each, taken=None) if isinstance(each, GiveUp) else each for each in arguments]
            if self.process.is_alive():
                self.pipe.send((name, *with_arguments))

        return call

    def end(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join(60)
        self.process.kill()


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    p = Engine("P", P_SHAPE, ("local://",))
    d = Engine("D", D_SHAPE, ("shm://",))
    for rank in p.ranks:
        rank.close()
    remotes = [Remote(p.together, rank) for rank in range(2)]
    p.together.bind(remotes)
    p.addresses = [remote.address for remote in remotes]
    p.remotes = remotes  # type: ignore[attr-defined]
    yield p, d
    for remote in remotes:
        remote.end()
    d.close()


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_two_processes_fill_one(engines: tuple[Engine, Engine], mode: str) -> None:
    p, d = engines
    for salt in (1, 2):
        ticket = ticket_for(p, d, mode)
        for remote in p.remotes:  # type: ignore[attr-defined]
            remote.fill(p.pages(1, N), N, salt)
        for region in d.ranks[0].regions:
            region.view("float32")[:] = -1
        d.together.announce_decode(ticket)
        p.together.open_prefill(ticket)
        prefill(p, ticket, N, p.pages(1, N))
        d.next(ev.DecodeAdmitted)
        d.together.open_decode(ticket, N, wanted_of(N, 0), d.pages(2, N))
        d.next(ev.DecodeCommitted)
        d.ranks[0].check(d.pages(2, N), wanted_of(N, 0), salt)
        assert p.next(ev.PrefillReleased) == ev.PrefillReleased(ticket.key, "committed")
        settle(d)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_killed_rank_ends_the_whole(engines: tuple[Engine, Engine], mode: str) -> None:
    p, d = engines
    ticket = ticket_for(p, d, mode)
    d.together.announce_decode(ticket)
    p.together.open_prefill(ticket)
    p.together.admit_prefill(ticket.key)
    d.next(ev.DecodeAdmitted)
    d.together.open_decode(ticket, N, wanted_of(N, 0), d.pages(2, N))
    p.remotes[1].process.kill()  # type: ignore[attr-defined]
    failed = d.next(ev.DecodeFailed)
    assert isinstance(failed, ev.DecodeFailed)
    assert (failed.reason, failed.recoverable) == ("peer_lost", True)
    assert failed.message.startswith("rank 1 to rank 0: ")
    d.next(ev.DecodeReleased)
    settle(d)
    # The dead rank proves nothing, so P's engine is not told that its pages are free.
    p.remotes[0].end()  # type: ignore[attr-defined]
    p.remotes[0].listener.join(60)  # type: ignore[attr-defined]
    assert p.events.empty(), "all events of the other rank have come"
