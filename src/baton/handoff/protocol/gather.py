"""Combines the attempts of one request's rank pairs into one outcome, on each side (docs/protocol.md, "Many ranks")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.errors import IncompatiblePeerError, ProtocolError
from baton.handoff.plan.topology import Instance, RankGeometry, senders
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import AttemptKey, Pair, Seeds


@dataclass(frozen=True, slots=True)
class EndPair:
    """Abort the attempt of one pair, because another has failed."""

    pair: Pair
    reason: str
    message: str


def pairs(
    sources: Mapping[str, Sequence[RankGeometry]], dests: Mapping[str, Sequence[RankGeometry]], sampling: int
) -> dict[Pair, frozenset[str]]:
    """The pairs that move bytes, with the groups of each.

    `sampling`: the source rank that has the seeds. If it sends no bytes, it gets a pair with the first destination
    rank.
    """
    groups_of: dict[Pair, set[str]] = {}
    for group, ranks in sorted(dests.items()):
        for dest in ranks:
            for source in senders(sources[group], dest):
                groups_of.setdefault((source, dest.rank), set()).add(group)
    if all(source != sampling for source, _ in groups_of):
        groups_of[sampling, min((dest.rank for ranks in dests.values() for dest in ranks), default=0)] = set()
    return {pair: frozenset(groups) for pair, groups in sorted(groups_of.items())}


LEAD: Pair = (0, 0)  # always present; its key is that of the whole attempt


def leading_pairs(source: Instance, dest: Instance) -> set[Pair]:
    """Pairs that are opened even if they move no bytes: through them a process learns the other side's ranks, or gets
    the seeds.
    """
    sources, dests = (range(side.num_ranks) if side.apart else range(1) for side in (source, dest))
    seeds = {(source.sampling, rank) for rank in dests} if dest.apart else set()
    return {*((rank, 0) for rank in sources), *((0, rank) for rank in dests), *seeds}


def pairs_of(source: Instance, dest: Instance) -> dict[Pair, frozenset[str]]:
    """The pairs that bring `dest` all of its groups, and those of `leading_pairs`.

    Raises `IncompatiblePeerError`, with the source's values first.
    """
    try:
        if alone := sorted(source.groups.keys() ^ dest.groups.keys()):
            raise ProtocolError(f"one side alone has groups {alone}")
        led: dict[Pair, frozenset[str]] = dict.fromkeys(sorted(leading_pairs(source, dest)), frozenset())
        return led | pairs(source.groups, dest.groups, source.sampling)
    except IncompatiblePeerError:
        raise
    except ProtocolError as error:
        raise IncompatiblePeerError({"ranks": (str(error), "each head and layer from one rank")}) from error


def pairs_with(here: Instance, peer: Instance, *, sends: bool) -> dict[Pair, frozenset[str]]:
    """As `pairs_of`, but an error has this engine's values first. `sends`: this engine is the source."""
    if sends:
        return pairs_of(here, peer)
    try:
        return pairs_of(peer, here)
    except IncompatiblePeerError as error:
        raise IncompatiblePeerError({name: (own, peers) for name, (peers, own) in error.fields.items()}) from error


class PrefillGather:
    def __init__(self, key: AttemptKey, pairs: Mapping[Pair, frozenset[str]]) -> None:
        self._key = key
        self._pairs = sorted(pairs)
        self._outcomes: dict[Pair, str] = {}

    def handle(self, pair: Pair, event: ev.PrefillReleased) -> list[ev.PrefillReleased | EndPair]:
        """Returns the request's `PrefillReleased` when all pairs have ended."""
        if pair not in self._pairs or pair in self._outcomes:
            return []
        self._outcomes[pair] = event.outcome
        failed = next(((p, why) for p, why in self._outcomes.items() if why not in ("committed", "finished")), None)
        left = [other for other in self._pairs if other not in self._outcomes]
        if left:
            return [] if failed is None else [EndPair(other, failed[1], _failure(failed[0])) for other in left]
        if failed is not None:
            return [ev.PrefillReleased(self._key, failed[1])]
        # Pairs that disagree served different requests.
        outcomes = set(self._outcomes.values())
        return [ev.PrefillReleased(self._key, outcomes.pop() if len(outcomes) == 1 else "incomplete_commit")]


class DecodeGather:
    """D's side. `sampling`: the rank of P whose seeds count.

    Raises `ProtocolError`.
    """

    def __init__(self, key: AttemptKey, pairs: Mapping[Pair, frozenset[str]], sampling: int) -> None:
        if all(source != sampling for source, _ in pairs):
            raise ProtocolError(f"no pair of ranks brings the seeds of rank {sampling}")
        self._key = key
        self._pairs = dict(pairs)
        self._sampling = sampling
        self._admitted: set[Pair] = set()
        self._brought: frozenset[str] | None = None
        self._proven: dict[Pair, dict[str, int]] = {}
        self._reported: dict[str, int] = {}
        self._ended: dict[Pair, ev.HandoffEvent] = {}
        self._failed = False

    def handle(self, pair: Pair, event: ev.HandoffEvent) -> list[ev.HandoffEvent | EndPair]:
        if pair not in self._pairs or pair in self._ended:
            return []
        match event:
            case ev.DecodeAdmitted():
                return self._admit(pair, event.groups)
            case ev.DecodeProgress(_, proven):
                return self._progress(pair, proven)
            case ev.DecodeFailed():
                return self._fail(pair, event)
            case ev.DecodeCommitted() | ev.DecodeFinished() | ev.DecodeReleased():
                return self._end(pair, event)
            case _:
                return []

    def _admit(self, pair: Pair, groups: frozenset[str] | None) -> list[ev.HandoffEvent | EndPair]:
        if pair in self._admitted:
            return []
        self._admitted.add(pair)
        if groups is not None:
            self._brought = groups | (self._brought or frozenset())
        if len(self._admitted) < len(self._pairs) or self._failed:
            return []
        return [ev.DecodeAdmitted(self._key, self._brought)]

    def _progress(self, pair: Pair, proven: dict[str, int]) -> list[ev.HandoffEvent | EndPair]:
        """A token is proven when all pairs that move its bytes have proven theirs."""
        self._proven[pair] = proven
        reported: dict[str, int] = {}
        for group in proven:
            carriers = [other for other, groups in self._pairs.items() if group in groups]
            ends = [self._proven.get(other, {}).get(group) for other in carriers]
            known = [end for end in ends if end is not None]
            if len(known) == len(ends):
                reported[group] = min(known)
        reported = {**self._reported, **reported}
        if reported == self._reported:
            return []
        self._reported = reported
        return [ev.DecodeProgress(self._key, reported)]

    def _fail(self, pair: Pair, event: ev.DecodeFailed) -> list[ev.HandoffEvent | EndPair]:
        if self._failed:
            return []
        self._failed = True
        text = event.message if len(self._pairs) == 1 else f"rank {pair[0]} to rank {pair[1]}: {event.message}"
        return [replace(event, key=self._key, message=text), *self._end_others(pair, event.reason)]

    def _end(self, pair: Pair, event: ev.HandoffEvent) -> list[ev.HandoffEvent | EndPair]:
        self._ended[pair] = event
        if len(self._ended) == len(self._pairs):
            return [*self._outcome()]
        if isinstance(event, ev.DecodeReleased) and not self._failed:
            return [*self._end_others(pair, "aborted")]
        return []

    def _outcome(self) -> list[ev.HandoffEvent]:
        """When all pairs have ended."""
        ends = self._ended.values()
        committed = [end for end in ends if isinstance(end, ev.DecodeCommitted)]
        finished = [end for end in ends if isinstance(end, ev.DecodeFinished)]
        if self._failed or len(committed) + len(finished) < len(ends):
            return [ev.DecodeReleased(self._key)]
        if committed and finished:
            text = "some ranks say that the request is finished, others that it is not"
            failed = ev.DecodeFailed(self._key, "incomplete_commit", text, recoverable=True)
            return [failed, ev.DecodeReleased(self._key)]
        if finished:
            return [ev.DecodeFinished(self._key, self._seeds())]
        num_bytes, num_runs = sum(end.num_bytes for end in committed), sum(end.num_runs for end in committed)
        times = [time for end in committed for time in end.copied or ()]
        copied = (min(times), max(times)) if times else None
        return [ev.DecodeCommitted(self._key, self._seeds(), num_bytes, num_runs, copied)]

    def _seeds(self) -> Seeds:
        return next(
            end.seeds
            for (source, _), end in sorted(self._ended.items())
            if source == self._sampling and isinstance(end, ev.DecodeCommitted | ev.DecodeFinished)
        )

    def _end_others(self, pair: Pair, reason: str) -> list[EndPair]:
        return [
            EndPair(other, reason, _failure(pair))
            for other in self._pairs
            if other != pair and other not in self._ended
        ]


def _failure(pair: Pair) -> str:
    return f"rank {pair[0]} to rank {pair[1]} has ended"
