"""The agents of a simulated engine: the real agents' calls, run by the simulator's loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.handoff.agent.agent import HandoffAgent
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.agent.leg_events import DecodeLeg, DecodePages, GiveUp, LegEvent, PrefillLeg
from baton.handoff.plan.planner import Instance
from baton.handoff.protocol.events import Declared, DecodeAdmitted, LayersWithdrawn, LayersWritten, Sampled
from baton.handoff.protocol.messages import AttemptKey
from baton.handoff.protocol.ticket import SignedTicket

if TYPE_CHECKING:
    from simulation.engine import Engine
    from simulation.rank import Rank


class SimRankAgent(HandoffAgent):
    """One rank's agent without threads and sockets. `Rank` runs its loop."""

    def __init__(self, rank: Rank) -> None:
        self.config, self._handoffs, self._rank = rank.config, rank.handoffs, rank

    def _call(self, call: Callable[[], None], soon: Callable[[], bool] = lambda: True) -> None:
        self._rank.call(call, soon)


class SimAgent(InstanceAgent):
    """An instance agent that checks each statement of the engine against memory at the time of the call."""

    def __init__(self, engine: Engine, instance: Instance) -> None:
        super().__init__(instance, engine.hears)
        self._engine, self._process = engine, engine.process
        self._announces = engine.process.world.settings.announces
        self._unplaced: dict[AttemptKey, SignedTicket] = {}
        self.bind([SimRankAgent(rank) for rank in engine.process.ranks])

    def post(self, key: AttemptKey, event: LegEvent) -> None:
        engine = self._engine
        match event:
            case PrefillLeg():
                engine.prefills[str(key)] = engine.legs.open[key].request
            case Declared(_, _, final):
                self._check_final(key, final)
            case Sampled(seeds, _, final):
                self._check_final(key, final)
                self._process.cluster.seeds[str(key)] = seeds
            case LayersWritten() | LayersWithdrawn():
                self._process.cluster.rungs["layers"] += 1
                # A forward that is about to fail withdraws this event, so it is not checked.
                if isinstance(event, LayersWritten) and not engine.executor.broken:
                    self._check_final(key, event.final, event.layers)
            case DecodeLeg(ticket) if not self._announces:
                # Some engines skip ANNOUNCE: they have pages for all requests.
                self._unplaced[key] = ticket
                self._process.post(lambda: engine.on_handoff(DecodeAdmitted(key)))
                return
            case DecodePages(_, prompt_len, wanted, pages):
                self._process.world.progress()
                self._unplaced.pop(key, None)
                engine.opens(key, prompt_len, wanted, pages)
            case GiveUp():
                self._given_up(key)
        super().post(key, event)

    def _given_up(self, key: AttemptKey) -> None:
        receipt = self._engine.receipts.get(str(key))
        if receipt is not None:
            receipt.given_up = True
        ticket = self._unplaced.pop(key, None)
        if ticket is not None:
            # P may already hold pages for the attempt, and would keep them until the ticket expires if D stayed silent.
            super().post(key, DecodePages(ticket, 1, {}, {}))

    def _check_final(self, key: AttemptKey, final: dict[str, int], below: int | None = None) -> None:
        request = self._engine.legs.open[key].request
        story = self._engine.stories[request.request_id]
        for group, stop in final.items():
            memory, n = self._engine.memory(group), request.prefill_len
            # No peer asks for entries that no query after the prompt sees, nor for those before `window_start`.
            window, reach = memory.model.window, memory.model.reach
            start = 0 if window is None else max(request.window_start, n - window + 1 - reach)
            bad = memory.wrong(story, n, request.kv.pages[group], min(start, stop), stop, below)
            if bad is not None:
                self._process.world.fail(
                    "early_final", f"{self._process.name} declares {group} final up to {stop}: entry {bad} is not"
                )
