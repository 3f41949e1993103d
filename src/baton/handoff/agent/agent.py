"""The handoff agent of one rank: a thread that runs its state machines, and thread-safe calls for the engine.

It never waits for one peer: the leases of others would run out.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from baton.clock import SystemClock
from baton.errors import ConfigError, ProtocolError
from baton.handoff.agent.leg_events import Agent, DecodeLeg, DecodePages, LegEvent, PrefillLeg
from baton.handoff.agent.machine_runner import OnPeer
from baton.handoff.agent.rank_handoffs import RankHandoffs
from baton.handoff.agent.stats import AgentStats
from baton.handoff.agent.thread_watch import ThreadWatch
from baton.handoff.agent.worker_thread import WorkerThread
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.digests import Digester, cells_of
from baton.handoff.protocol.messages import MAX_HASHES, AttemptKey, Bye
from baton.handoff.session.config import AgentConfig, Timers
from baton.handoff.session.keys import TicketKeys
from baton.handoff.session.sessions import Sessions
from baton.handoff.session.sockets import Channel
from baton.transports.base import Transport

__all__ = ["AgentConfig", "HandoffAgent", "Timers"]

log = logging.getLogger(__name__)
_CLOSING_WAIT_S = 0.01


@dataclass(frozen=True, slots=True)
class EngineWatch:
    """While `is_stalled()`, peers are notified that this engine hangs. `on_lost` is called once, with the cause and on
    another thread, if the agent's thread has ended or hangs. The process must then end, since nobody can prove that its
    pages are free.
    """

    is_stalled: Callable[[], bool] = lambda: False
    on_lost: Callable[[str], None] = lambda why: None


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("handoff agent: unexpected error")


class HandoffAgent(Agent):
    """Sends and receives the handoffs of one rank.

    `descriptor`: what `transport.register` returned. `on_peer`: of an `InstanceAgent`; without it, a peer of several
    ranks is refused. `on_event`, on the agent's thread, should return soon. `digester` is required unless
    `config.integrity` is off. Close the transport after the agent.

    Each opened leg gets exactly one event that returns its pages (docs/protocol.md, "Events for the engine"); until
    then they belong to the agent.

    Raises `ConfigError`, also for a piece with more digests than a message may carry.
    """

    def __init__(
        self,
        config: AgentConfig,
        instance: Instance,
        transport: Transport,
        descriptor: bytes,
        on_event: Callable[[ev.HandoffEvent], None],
        digester: Digester | None = None,
        on_peer: OnPeer | None = None,
        watch: EngineWatch | None = None,
    ) -> None:
        if config.integrity != "off":
            if digester is None:
                raise ConfigError("integrity", f"{config.integrity!r} needs a digester")
            for group, rank in instance.own.items():
                if (count := len(cells_of(rank.geometry))) > MAX_HASHES:
                    raise ConfigError(
                        "integrity", f"group {group!r} has {count} planes in all, at most {MAX_HASHES} fit"
                    )
        self.config = config
        self._channel = Channel(config.bind, config.keys or TicketKeys(config.ticket_key))
        self.address = self._channel.address
        self._worker = WorkerThread("baton-digests")
        gathered = on_peer is not None
        sessions = Sessions(config, instance, transport, descriptor, self._channel, SystemClock(), gathered)
        watch = watch or EngineWatch()
        sessions.is_stalled = watch.is_stalled
        self._handoffs = RankHandoffs(sessions, instance, transport, on_event, digester, self._worker, on_peer)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._woken = False  # the thread will drain the calls soon
        self._thread = threading.Thread(target=self._run, name="baton-handoff", daemon=True)
        self._last_step = time.monotonic()
        self._watch = ThreadWatch(self._thread, lambda: self._last_step, config.timers.hang, watch.on_lost)

    def start(self) -> None:
        self._thread.start()
        self._watch.start()

    def close(self) -> None:
        """End open attempts, and wait a bounded time for copies. Idempotent."""
        HandoffAgent.close_all([self])

    @staticmethod
    def close_all(agents: Sequence[HandoffAgent]) -> None:
        """Close all; they wait for their copies at the same time."""
        open_ones = [agent for agent in agents if not agent._closing]
        for agent in open_ones:
            agent._closing = True
            agent._watch.close()
            agent._channel.wake()
        for agent in open_ones:
            agent._end_close()

    def _end_close(self) -> None:
        if self._thread.ident is not None and self._watch.lost is None:
            self._thread.join()
        elif not self._thread.is_alive():
            self._channel.close()

    def post(self, key: AttemptKey, event: LegEvent) -> None:
        match event:
            case PrefillLeg(ticket):
                self._check_engine(ticket.prefill_engine, ticket.prefill_incarnation)
            case DecodeLeg(ticket) | DecodePages(ticket):
                self._check_engine(ticket.decode_engine, ticket.decode_incarnation)
        if isinstance(event, DecodePages):
            n = event.prompt_len
            if beyond := [group for group, tokens in event.wanted.items() if tokens.stop > n]:
                raise ProtocolError(f"groups {beyond} are wanted beyond the prompt's {n} tokens")
        # A leg of P needs no wake before D mentions the transfer: a wake costs the engine up to 0.4 ms before its
        # forward.
        self._call(
            lambda: self._handoffs.post(key, event),
            lambda: not isinstance(event, PrefillLeg | ev.PagesGiven) or self._handoffs.knows(key),
        )

    def stats(self) -> AgentStats:
        channel = self._channel
        return replace(self._handoffs.stats(), frames=channel.frames, refused=channel.refused, evicted=channel.evicted)

    def _check_engine(self, engine_id: str, incarnation: str) -> None:
        if (engine_id, incarnation) != (self.config.engine_id, self.config.incarnation):
            raise ProtocolError("the ticket names another engine")

    def _call(self, call: Callable[[], None], soon: Callable[[], bool] = lambda: True) -> None:
        """`soon`: whether to wake the thread for this call."""
        self._calls.put(call)
        # Checked after `put`, since the thread takes messages before it drains the calls.
        if soon() and not self._woken:
            self._woken = True
            self._channel.wake()

    def _run(self) -> None:
        while not self._closing:
            self._step()
        self._step()  # calls from before the close
        self._handoffs.abort_all()
        until = time.monotonic() + self.config.timers.close
        while len(self._handoffs.operations) and time.monotonic() < until:
            self._step()
        quiet = len(self._handoffs.operations) == 0
        self._handoffs.sessions.say_bye("engine_closed", quiet)
        self._worker.close()
        self._channel.close(Bye("engine_closed", quiet))

    def _step(self) -> None:
        """No error ends the thread or skips the other handlers."""
        self._last_step = time.monotonic()
        wait = self.config.timers.retry_min
        with _logged():
            wait = self._handoffs.run_timers()
        if self._closing:
            wait = min(wait, _CLOSING_WAIT_S)
        with _logged():
            for connection, message in self._channel.receive(wait):
                self._handoffs.on_message(connection, message)
        self._drain_calls()
        with _logged():
            self._handoffs.poll()

    def _drain_calls(self) -> None:
        self._woken = False  # before draining, so that a later call wakes again
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            try:
                call()
            except Exception:
                log.exception("handoff agent: a call of the engine failed")
