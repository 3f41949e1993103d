"""Mutations of how pairs of ranks make one handoff."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from baton.handoff.agent import instance
from baton.handoff.agent.instance import InstanceAgent
from baton.handoff.plan import planner, topology
from baton.handoff.protocol.events import DecodeCommitted, DecodeProgress, DecodeReleased, PrefillReleased
from baton.handoff.protocol.gather import LEAD, DecodeGather, PrefillGather
from baton.handoff.protocol.messages import AttemptKey
from simulation.mutations.registry import Patch, mutation


@mutation("D is committed when all of its ranks are")
def _commit_without_one_rank() -> list[Patch]:
    original = DecodeGather._end

    def end(self: DecodeGather, pair: Any, event: Any) -> list[Any]:
        out = original(self, pair, event)
        samples = isinstance(event, DecodeCommitted) and pair[0] == self._sampling
        return out or ([replace(event, key=self._key)] if samples else [])

    return [(DecodeGather, "_end", end)]


@mutation("P's pages stay until all pairs of ranks have ended")
def _one_rank_releases() -> list[Patch]:
    def handle(self: PrefillGather, pair: Any, event: PrefillReleased) -> list[Any]:
        return [replace(event, key=self._key)]

    return [(PrefillGather, "handle", handle)]


@mutation("D's pages stay until all pairs of ranks have ended")
def _one_rank_frees_destination() -> list[Patch]:
    original = DecodeGather._end

    def end(self: DecodeGather, pair: Any, event: Any) -> list[Any]:
        if isinstance(event, DecodeReleased):
            self._ended = dict.fromkeys(self._pairs, event)
            return [DecodeReleased(self._key)]
        return original(self, pair, event)

    return [(DecodeGather, "_end", end)]


@mutation("tokens are proven when all ranks that bring a part of them have proven theirs")
def _progress_of_one_rank() -> list[Patch]:
    def progress(self: DecodeGather, pair: Any, proven: dict[str, int]) -> list[Any]:
        return [DecodeProgress(self._key, proven)]

    return [(DecodeGather, "_progress", progress)]


@mutation("seeds are those of the rank that samples")
def _seeds_of_any_rank() -> list[Patch]:
    original = DecodeGather.__init__

    def init(self: DecodeGather, key: Any, pairs: Any, sampling: int) -> None:
        original(self, key, pairs, min(source for source, _ in pairs))

    return [(DecodeGather, "__init__", init)]


@mutation("a rank is sent the heads that it owns")
def _wrong_head_share() -> list[Patch]:
    def assign(sources: Any, dest: Any) -> Any:
        shares = topology.assign(sources, dest)
        return {rank: tuple(replace(box, source_head=0) for box in boxes) for rank, boxes in shares.items()}

    return [(planner, "assign", assign)]


@mutation("stages meet by the ids of their layers, not by the order in which they have them")
def _layers_by_place() -> list[Patch]:
    def assign(sources: Any, dest: Any) -> Any:
        shares, by_rank = topology.assign(sources, dest), {source.rank: source.geometry for source in sources}

        def first(rank: int, box: Any) -> int:
            return int(min(box.dest_layer, by_rank[rank].num_layers - box.num_layers))

        return {
            rank: tuple(replace(box, source_layer=first(rank, box)) for box in boxes) for rank, boxes in shares.items()
        }

    return [(planner, "assign", assign)]


@mutation("a pair registers for its own groups, and no other")
def _every_pair_wants_all() -> list[Patch]:
    return [(instance, "_restrict", lambda found, groups: found)]


@mutation("what the engine says is said to each pair")
def _said_to_the_leading_pair() -> list[Patch]:
    def say(self: InstanceAgent, key: Any, event: Any, side: int = 0) -> None:
        leg = self._legs.get(key)
        groups = None if leg is None else leg.pairs.get(LEAD)
        self._agents[0].post(key.of_pair(LEAD), self._of_pair(event, LEAD, groups))

    return [(InstanceAgent, "_to_pairs", say)]


@mutation("a pair that opens late hears what was said before")
def _late_pairs_hear_nothing() -> list[Patch]:
    original = InstanceAgent._open_pairs

    def meet(self: InstanceAgent, leg: Any, peer: Any) -> None:
        leg.events.clear()
        original(self, leg, peer)

    return [(InstanceAgent, "_open_pairs", meet)]


_EARLY = ("burst", "slow_engine", "prefix_store", "full_pools", "duplicate")


@mutation("a claim that comes before P's leg tells P which ranks D has", _EARLY)
def _early_claims_tell_nothing() -> list[Patch]:
    original = InstanceAgent.on_peer

    def on_peer(self: InstanceAgent, key: AttemptKey, peer: Any) -> None:
        leads = key.of_pair(LEAD)
        if leads in self._legs or leads in self._ended:
            original(self, key, peer)

    return [(InstanceAgent, "on_peer", on_peer)]
