"""How far each of P's groups is final, copied and digested in one attempt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.errors import ProtocolError
from baton.handoff.protocol import events as ev
from baton.handoff.protocol import messages as msg
from baton.handoff.protocol.copies import CopyLedger
from baton.handoff.protocol.digests import tokens_to_digest
from baton.handoff.protocol.messages import AttemptKey
from baton.kv.interval import ALL_LAYERS, Interval
from baton.wire import Integrity, Mode


@dataclass(slots=True)
class _Partial:
    """Tokens up to `stop`, from the partial before it, are written below `layers`, and copied, or being copied, below
    `copied`.
    """

    stop: int
    layers: int
    copied: int = 0


class FinalRanges:
    """Copies (push) and digests each token once, as soon as it is final. An interval is digested and reported to D
    once all its layers are final.
    """

    def __init__(self, key: AttemptKey, mode: Mode, integrity: Integrity, copies: CopyLedger) -> None:
        self.final: dict[str, int] = {}
        self.computed = False  # the whole prompt is final in some group
        self.pages: dict[str, list[int]] = {}
        self.digests: msg.Digests = {}
        self._key = key
        self._mode = mode
        self._integrity = integrity
        self._copies = copies
        self._prompt_len = 0
        # The end of what is copied (push) and digested, or in progress; None until D has registered.
        self._reached: dict[str, int] | None = None
        self._partial: dict[str, list[_Partial]] = {}  # ascending
        # Groups with copies of withdrawn layers, which must not overwrite later ones.
        self._stale: set[str] = set()
        self._computing = 0
        self._unreported: dict[str, list[ev.StartCopy]] = {}  # ended before their digests

    @property
    def at_rest(self) -> bool:
        return not self._copies.outstanding and not self._computing

    def declare(self, event: ev.Declared) -> None:
        self._prompt_len = event.prompt_len
        self.computed = self.computed or event.prompt_len in event.final.values()
        for group, pages in event.pages.items():
            if self._moves(group):
                self.pages[group] = pages
        self.extend(event.final)

    def written(self, event: ev.LayersWritten) -> None:
        if self._mode == "pull":
            return  # D reads only when everything is final
        self._prompt_len = event.prompt_len
        for group, stop in event.final.items():
            stop = min(stop, self._prompt_len)
            if not self._moves(group) or stop <= self.final.get(group, 0):
                continue
            self.pages[group] = event.pages[group]
            known = self._partial.get(group, [])
            if known and stop < known[-1].stop and all(partial.stop != stop for partial in known):
                self._drop_layers(group)
                known = []
            if not known or stop > known[-1].stop:
                known.append(_Partial(stop, 0))
            for partial in known:
                if partial.stop <= stop:
                    partial.layers = max(partial.layers, event.layers)
            self._partial[group] = known

    def withdraw(self) -> None:
        for group in list(self._partial):
            self._drop_layers(group)

    def _drop_layers(self, group: str) -> None:
        if any(partial.copied for partial in self._partial.pop(group, [])):
            self._stale.add(group)

    def _moves(self, group: str) -> bool:
        return self._reached is None or group in self._reached

    def extend(self, final: Mapping[str, int]) -> None:
        for group, end in final.items():
            if self._moves(group):
                self.final[group] = reached = max(self.final.get(group, 0), min(end, self._prompt_len))
                known = self._partial.get(group, [])
                if known and (known[-1].stop > reached or not any(partial.copied for partial in known)):
                    self._drop_layers(group)

    def begin(self, register: msg.Register) -> None:
        """Groups that D's REGISTER does not name are sent by other pairs of ranks."""
        self.final = {group: self.final.get(group, 0) for group in register.wanted}
        self.pages = {group: pages for group, pages in self.pages.items() if group in register.wanted}
        self._reached = {group: tokens.start for group, tokens in register.wanted.items()}

    def beyond(self, register: msg.Register) -> list[str]:
        return [group for group, tokens in register.wanted.items() if tokens.stop > self.final[group]]

    def follow(self, register: msg.Register) -> list[ev.Action]:
        """Copy (push) and digest newly final tokens."""
        actions: list[ev.Action] = []
        reached = self._reached or {}
        for group in sorted(register.wanted):
            if group in self._stale:
                if self._copies.touches(group, register.wanted[group]):
                    continue
                self._stale.discard(group)
            wanted = register.wanted[group].after(reached[group])
            tokens = _cut_at(wanted, self.final[group])
            if tokens.empty:
                actions += self._follow_layers(group, wanted, register)
                continue
            reached[group] = tokens.stop
            source, partials = self.pages.get(group, []), self._partial.pop(group, [])
            if self._mode == "push":
                for part, copied in _parts(tokens, partials):
                    layers = Interval(copied, ALL_LAYERS.stop)
                    actions.append(self._copies.start(group, part, source, register.pages[group], layers))
            if parts := tokens_to_digest(self._integrity, self._key, tokens):
                self._computing += 1
                actions.append(ev.ComputeDigests(group, parts, source))
        return actions

    def _follow_layers(self, group: str, wanted: Interval, register: msg.Register) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for partial in self._partial.get(group, []):
            tokens = _cut_at(wanted, partial.stop)
            wanted = wanted.after(partial.stop)
            if not tokens.empty and partial.layers > partial.copied:
                layers, partial.copied = Interval(partial.copied, partial.layers), partial.layers
                actions.append(self._copies.start(group, tokens, self.pages[group], register.pages[group], layers))
        return actions

    def repair(self, register: msg.Register, repair: msg.Repair) -> list[ev.Action]:
        """Copy again. Raises `ProtocolError`, before any copy starts, for tokens that were not wanted."""
        for group, bad in repair.bad.items():
            wanted = register.wanted.get(group, Interval(0, 0))
            at = wanted.start
            for tokens in bad:
                if not at <= tokens.start < tokens.stop <= wanted.stop:
                    raise ProtocolError(f"REPAIR of group {group!r} beyond what was wanted, or out of order")
                at = tokens.stop
        return [
            self._copies.start(group, tokens, self.pages[group], register.pages[group])
            for group, bad in sorted(repair.bad.items())
            for tokens in bad
        ]

    def digested(self, event: ev.DigestsComputed) -> list[ev.StartCopy]:
        self.digests.setdefault(event.group, []).extend(event.pieces)
        return self._unreported.pop(event.group, [])

    def digest_ended(self) -> None:
        """Call this even if the digests are not used."""
        self._computing -= 1

    def progress(self, copy: ev.StartCopy) -> list[ev.Action]:
        """Report an ended copy to D once its digests are ready."""
        # The last copy of an interval reports all its layers.
        if copy.tokens.stop > (self._reached or {}).get(copy.group, 0) or self._copies.touches(copy.group, copy.tokens):
            return []
        pieces = [piece for piece in self.digests.get(copy.group, []) if copy.tokens.covers(piece.tokens)]
        if not pieces:
            self._unreported.setdefault(copy.group, []).append(copy)
            return []
        return [ev.Send(msg.Progress(self._key, {copy.group: pieces}))]

    def forget(self) -> None:
        self.pages, self.digests, self._unreported, self._partial = {}, {}, {}, {}


def _cut_at(tokens: Interval, stop: int) -> Interval:
    return Interval(tokens.start, max(tokens.start, min(tokens.stop, stop)))


def _parts(tokens: Interval, partials: Sequence[_Partial]) -> Iterator[tuple[Interval, int]]:
    """`tokens` by the layer below which they are copied."""
    pending, below = Interval(tokens.start, tokens.start), 0
    for stop, copied in [*((partial.stop, partial.copied) for partial in partials), (tokens.stop, 0)]:
        part = _cut_at(tokens.after(pending.stop), stop)
        if part.empty:
            continue
        if pending.empty or copied == below:
            pending, below = Interval(pending.start, part.stop), copied
        else:
            yield pending, below
            pending, below = part, copied
    yield pending, below
