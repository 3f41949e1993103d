"""The thread that computes digests, and the check that a healthy pair never loses its lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from baton.handoff.session.session import Session

if TYPE_CHECKING:
    from simulation.process import Process
    from simulation.rank import Rank

_DIGEST_S = (0.0, 0.005)
_SLOW_DIGEST_S = (0.1, 2.5)
_LOOK_S = 0.05
# Faults that can lose or delay a message or its answer: with them a lease may end between healthy engines.
_DEAF = ("drop", "delay", "reorder", "slow_work", "full_socket", "no_descriptor")


class SimWorker:
    """The digest thread: it runs jobs one after the other, each for a random time."""

    def __init__(self, process: Rank) -> None:
        self._process, self._world = process, process.world
        self._free_at = 0.0

    def start(self, job: Callable[[], None]) -> None:
        took = self._world.random.uniform(*(_SLOW_DIGEST_S if self._world.hit("slow_call") else _DIGEST_S))
        self._free_at = max(self._free_at, self._world.now) + took
        self._world.after(self._free_at - self._world.now, self._run, job)

    def _run(self, job: Callable[[], None]) -> None:
        if self._process.paused and not self._process.dead:
            self._world.after(_LOOK_S, self._run, job)
        elif not self._process.dead:
            job()


def check_innocence(process: Rank, silent: Sequence[Session]) -> None:
    """Check sessions that were `silent` for their lease and are gone now: none may lead to an engine that was running
    and reachable all the time, and also held this session.
    """
    world, sessions = process.world, process.handoffs.sessions
    if any(world.settings.has(fault) for fault in _DEAF):
        return
    for session in silent:
        held = (
            sessions.clients.get(session.connection) is session
            or sessions.servers.get(session.connection.address) is session
        )
        if held or session.hello is None:
            continue
        far = process.cluster.by_uid.get(session.hello.incarnation)
        since = world.now - 3 * session.lease
        if far is None or not (_there(process.process, since) and _there(far, since)):
            continue
        if not process.cluster.network.reached(process, far.ranks[session.hello.instance.rank], since):
            continue
        held_by = [rank.handoffs.sessions for rank in far.ranks]
        theirs = [session for each in held_by for session in (*each.clients.values(), *each.servers.values())]
        if any(other.connection.session == session.connection.session and other.established for other in theirs):
            world.fail("innocent_lease", f"{process.name} evicts {far.name}: both were there, in one session")


def _there(process: Process, since: float) -> bool:
    away = process.dead or process.closed or process.leaving or not process.whole
    return not away and process.awake_since <= since
