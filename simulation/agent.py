"""The agents of a simulated engine: the real agents' calls, run by the simulator's loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.handoff.agent.agent import HandoffAgent
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol.events import DecodeAdmitted, LayersWithdrawn, LayersWritten
from baton.handoff.protocol.messages import AttemptKey, Seeds
from baton.handoff.protocol.ticket import SignedTicket
from baton.kv.interval import Interval

if TYPE_CHECKING:
    from simulation.engine import Engine
    from simulation.rank import Rank


class SimRankAgent(HandoffAgent):
    """One rank's agent without threads and sockets. `Rank` runs its loop."""

    def __init__(self, rank: Rank) -> None:
        self.config, self._node, self._rank = rank.config, rank.node, rank

    def _call(self, call: Callable[[], None]) -> None:
        self._rank.call(call)


class SimAgent(InstanceAgent):
    """An instance agent that checks each statement of the engine against memory at the time of the call."""

    def __init__(self, engine: Engine, instance: Instance) -> None:
        super().__init__(instance, engine.hears)
        self._engine, self._process = engine, engine.process
        self._announces = engine.process.world.settings.announces
        self._unplaced: dict[AttemptKey, SignedTicket] = {}
        self.bind([SimRankAgent(rank) for rank in engine.process.ranks])

    # ------------------------------------------------------------ P

    def open_prefill(self, ticket: SignedTicket) -> None:
        self._engine.prefills[str(ticket.key)] = self._engine.legs.open[ticket.key].request
        super().open_prefill(ticket)

    def declare_final(
        self, key: AttemptKey, prompt_len: int, pages: dict[str, list[int]], final: dict[str, int]
    ) -> None:
        self._check_final(key, final)
        super().declare_final(key, prompt_len, pages, final)

    def finish_prefill(self, key: AttemptKey, seeds: Seeds, finished: bool, final: dict[str, int]) -> None:
        self._check_final(key, final)
        self._process.cluster.seeds[str(key)] = seeds
        super().finish_prefill(key, seeds, finished, final)

    def stream_layers(self, key: AttemptKey, event: LayersWritten | LayersWithdrawn) -> None:
        self._process.cluster.rungs["layers"] += 1
        # A forward that is about to fail withdraws this event, so it is not checked.
        if isinstance(event, LayersWritten) and not self._engine.executor.broken:
            self._check_final(key, event.final, event.layers)
        super().stream_layers(key, event)

    def _check_final(self, key: AttemptKey, final: dict[str, int], below: int | None = None) -> None:
        request = self._engine.legs.open[key].request
        story = self._engine.stories[request.request_id]
        for group, stop in final.items():
            memory, n = self._engine.memory(group), request.prefill_len
            # No peer asks for entries that no query after the prompt sees.
            start = 0 if memory.model.window is None else max(0, n - memory.model.window + 1 - memory.model.reach)
            bad = memory.wrong(story, n, request.kv.pages[group], min(start, stop), stop, below)
            if bad is not None:
                self._process.world.fail(
                    "early_final", f"{self._process.name} declares {group} final up to {stop}: entry {bad} is not"
                )

    # ------------------------------------------------------------ D

    def announce_decode(self, ticket: SignedTicket) -> None:
        """Some engines skip ANNOUNCE: they have pages for all requests."""
        if self._announces:
            super().announce_decode(ticket)
        else:
            self._unplaced[ticket.key] = ticket
            self._process.post(lambda: self._engine.on_handoff(DecodeAdmitted(ticket.key)))

    def open_decode(
        self, ticket: SignedTicket, prompt_len: int, wanted: dict[str, Interval], pages: dict[str, list[int]]
    ) -> None:
        self._process.world.progress()
        self._unplaced.pop(ticket.key, None)
        self._engine.opens(ticket.key, prompt_len, wanted, pages)
        super().open_decode(ticket, prompt_len, wanted, pages)

    def abort(self, key: AttemptKey, reason: str, taken: Callable[[], None] | None = None) -> None:
        receipt = self._engine.receipts.get(str(key))
        if receipt is not None:
            receipt.given_up = True
        ticket = self._unplaced.pop(key, None)
        if ticket is not None:
            # P may already hold pages for the attempt, and would keep them until the ticket expires if D stayed silent.
            super().open_decode(ticket, 1, {}, {})
        super().abort(key, reason, taken)
