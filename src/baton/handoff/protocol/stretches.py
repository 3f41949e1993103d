"""P's groups in one attempt: what of them is final, and what of that is copied and digested."""

from __future__ import annotations

from collections.abc import Mapping

from baton.errors import ProtocolError
from baton.handoff.protocol import events as ev
from baton.handoff.protocol import messages as msg
from baton.handoff.protocol.copies import CopyLedger
from baton.handoff.protocol.digests import due
from baton.handoff.protocol.messages import AttemptKey
from baton.kv.interval import Interval
from baton.wire import Integrity, Mode


class Stretches:
    """Follows each group as it becomes final: copies (push) and digests each token once.

    `final` is, per group, the end of what no later step changes; `pages` the block tables so far; `digests` what is
    digested of it, in token order.
    """

    def __init__(self, key: AttemptKey, mode: Mode, integrity: Integrity, copies: CopyLedger) -> None:
        self.final: dict[str, int] = {}
        self.pages: dict[str, list[int]] = {}
        self.digests: ev.Digests = {}
        self._key = key
        self._mode = mode
        self._integrity = integrity
        self._copies = copies
        self._prompt_len = 0
        # Per group, tokens below are copied (push) and digested, or being so; None before D has registered.
        self._reached: dict[str, int] | None = None
        self._computing = 0
        self._untold: dict[str, list[ev.StartCopy]] = {}  # copies that are done before their digests are taken

    @property
    def at_rest(self) -> bool:
        """True when no copy and no digest is under way."""
        return not self._copies.outstanding and not self._computing

    def declare(self, event: ev.Declared) -> None:
        """The engine says how far it is."""
        self._prompt_len = event.prompt_len
        for group, pages in event.pages.items():
            if self._moves(group):
                self.pages[group] = list(pages)
        self.extend(event.final)

    def _moves(self, group: str) -> bool:
        return self._reached is None or group in self._reached

    def extend(self, final: Mapping[str, int]) -> None:
        """More is final; never beyond the prompt."""
        for group, end in final.items():
            if self._moves(group):
                self.final[group] = max(self.final.get(group, 0), min(end, self._prompt_len))

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
            tokens = Interval(0, min(register.wanted[group].stop, self.final[group])).after(reached[group])
            if tokens.empty:
                continue
            reached[group] = tokens.stop
            source = self.pages.get(group, [])
            if self._mode == "push":
                actions.append(self._copies.start(group, tokens, source, register.pages[group]))
            if parts := due(self._integrity, self._key, tokens):
                self._computing += 1
                actions.append(ev.ComputeDigests(group, parts, source))
        return actions

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
        """Keep digests; the copies that ended before them, and can be told with them now."""
        self.digests.setdefault(event.group, []).extend(event.pieces)
        return self._untold.pop(event.group, [])

    def digest_ended(self) -> None:
        """One `ComputeDigests` is answered, whatever is made of it."""
        self._computing -= 1

    def progress(self, copy: ev.StartCopy) -> list[ev.Action]:
        """Tell D what a copy that has ended brought it, now or when its digests are taken."""
        pieces = [piece for piece in self.digests.get(copy.group, []) if copy.tokens.covers(piece.tokens)]
        if not pieces:
            self._untold.setdefault(copy.group, []).append(copy)
            return []
        return [ev.Send(msg.Progress(self._key, {copy.group: pieces}))]

    def forget(self) -> None:
        """Let go of tables and digests."""
        self.pages, self.digests, self._untold = {}, {}, {}
