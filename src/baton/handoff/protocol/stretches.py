"""P's groups in one attempt: what of them is final, and what of that is copied and digested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.errors import ProtocolError
from baton.handoff.protocol import events as ev
from baton.handoff.protocol import messages as msg
from baton.handoff.protocol.copies import CopyLedger
from baton.handoff.protocol.digests import due
from baton.handoff.protocol.messages import AttemptKey
from baton.kv.interval import ALL_LAYERS, Interval
from baton.wire import Integrity, Mode


@dataclass(slots=True)
class _Partial:
    """Tokens below `stop` that are final in the layers below `layers` alone; those below `copied` are copied, or being
    so."""

    stop: int
    layers: int
    copied: int = 0


class Stretches:
    """Follows each group as it becomes final: copies (push) and digests each token once. Of a stretch that becomes
    final layer by layer each layer is copied once; it is digested, and D told of it, when all its layers are final.

    `final` is, per group, the end of what no later step changes; `pages` the block tables so far; `digests` what is
    digested of it, in token order.
    """

    def __init__(self, key: AttemptKey, mode: Mode, integrity: Integrity, copies: CopyLedger) -> None:
        self.final: dict[str, int] = {}
        self.computed = False  # the engine has said so of the whole prompt
        self.pages: dict[str, list[int]] = {}
        self.digests: msg.Digests = {}
        self._key = key
        self._mode = mode
        self._integrity = integrity
        self._copies = copies
        self._prompt_len = 0
        # Per group, tokens below are copied (push) and digested, or being so; None before D has registered.
        self._reached: dict[str, int] | None = None
        self._partial: dict[str, _Partial] = {}
        # Groups with copies of layers that were withdrawn: what they bring late must not lie over what is copied again.
        self._stale: set[str] = set()
        self._computing = 0
        self._untold: dict[str, list[ev.StartCopy]] = {}  # copies that are done before their digests are taken

    @property
    def at_rest(self) -> bool:
        """True when no copy and no digest is under way."""
        return not self._copies.outstanding and not self._computing

    def declare(self, event: ev.Declared) -> None:
        """Take in block tables, and how far the engine says that each group is final."""
        self._prompt_len = event.prompt_len
        self.computed = self.computed or event.prompt_len in event.final.values()
        for group, pages in event.pages.items():
            if self._moves(group):
                self.pages[group] = list(pages)
        self.extend(event.final)

    def written(self, event: ev.LayersWritten) -> None:
        """Take in which layers of the forward under way the engine says are written."""
        if self._mode == "pull":
            return  # D reads when all is final
        self._prompt_len = event.prompt_len
        for group, stop in event.final.items():
            stop = min(stop, self._prompt_len)
            if not self._moves(group) or stop <= self.final.get(group, 0):
                continue
            self.pages[group] = list(event.pages[group])
            known = self._partial.get(group)
            if known is None or known.stop != stop:
                self._drop(group)
                known = self._partial[group] = _Partial(stop, 0)
            known.layers = max(known.layers, event.layers)

    def withdraw(self) -> None:
        """Layers that were written may be written again."""
        for group in list(self._partial):
            self._drop(group)

    def _drop(self, group: str) -> None:
        if (dropped := self._partial.pop(group, None)) is not None and dropped.copied:
            self._stale.add(group)

    def _moves(self, group: str) -> bool:
        return self._reached is None or group in self._reached

    def extend(self, final: Mapping[str, int]) -> None:
        """More is final; never beyond the prompt."""
        for group, end in final.items():
            if self._moves(group):
                self.final[group] = reached = max(self.final.get(group, 0), min(end, self._prompt_len))
                known = self._partial.get(group)
                if known is not None and (known.stop != reached or not known.copied):
                    self._drop(group)

    def begin(self, register: msg.Register) -> None:
        """D says from where on it wants each group; what it does not name, another pair of ranks brings."""
        self.final = {group: self.final.get(group, 0) for group in register.wanted}
        self.pages = {group: pages for group, pages in self.pages.items() if group in register.wanted}
        self._reached = {group: tokens.start for group, tokens in register.wanted.items()}

    def beyond(self, register: msg.Register) -> list[str]:
        """The groups in which D wants more than is final."""
        return [group for group, tokens in register.wanted.items() if tokens.stop > self.final[group]]

    def follow(self, register: msg.Register) -> list[ev.Action]:
        """Copy (push) and digest what has become final."""
        actions: list[ev.Action] = []
        reached = self._reached or {}
        for group in sorted(register.wanted):
            if group in self._stale:
                if self._copies.touches(group, register.wanted[group]):
                    continue
                self._stale.discard(group)
            wanted = register.wanted[group].after(reached[group])
            tokens = _until(wanted, self.final[group])
            if tokens.empty:
                actions += self._follow_layers(group, wanted, register)
                continue
            reached[group] = tokens.stop
            source, partial = self.pages.get(group, []), self._partial.pop(group, None)
            if self._mode == "push":
                layers = ALL_LAYERS if partial is None else Interval(partial.copied, ALL_LAYERS.stop)
                actions.append(self._copies.start(group, tokens, source, register.pages[group], layers))
            if parts := due(self._integrity, self._key, tokens):
                self._computing += 1
                actions.append(ev.ComputeDigests(group, parts, source))
        return actions

    def _follow_layers(self, group: str, wanted: Interval, register: msg.Register) -> list[ev.Action]:
        """Copy the layers of a stretch that have become final since the last call."""
        partial = self._partial.get(group)
        if partial is None or partial.layers <= partial.copied:
            return []
        tokens = _until(wanted, partial.stop)
        if tokens.empty:
            return []
        layers, partial.copied = Interval(partial.copied, partial.layers), partial.layers
        return [self._copies.start(group, tokens, self.pages[group], register.pages[group], layers)]

    def again(self, register: msg.Register, repair: msg.Repair) -> list[ev.Action]:
        """Copy again what did not match its digests.

        Raises `ProtocolError`, before anything is copied, for what was not wanted.
        """
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
        """Keep digests. Returns the copies that ended before them, of which D can be told now."""
        self.digests.setdefault(event.group, []).extend(event.pieces)
        return self._untold.pop(event.group, [])

    def digest_ended(self) -> None:
        """One `ComputeDigests` is answered, whether or not its digests are used."""
        self._computing -= 1

    def progress(self, copy: ev.StartCopy) -> list[ev.Action]:
        """Tell D what a copy that has ended brought it, now or when its digests are taken."""
        # The last copy of a stretch tells of all its layers.
        if copy.tokens.stop > (self._reached or {}).get(copy.group, 0) or self._copies.touches(copy.group, copy.tokens):
            return []
        pieces = [piece for piece in self.digests.get(copy.group, []) if copy.tokens.covers(piece.tokens)]
        if not pieces:
            self._untold.setdefault(copy.group, []).append(copy)
            return []
        return [ev.Send(msg.Progress(self._key, {copy.group: pieces}))]

    def forget(self) -> None:
        """Let go of tables and digests."""
        self.pages, self.digests, self._untold, self._partial = {}, {}, {}, {}


def _until(tokens: Interval, stop: int) -> Interval:
    return Interval(tokens.start, max(tokens.start, min(tokens.stop, stop)))
