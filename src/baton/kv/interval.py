"""Intervals of tokens, and the one table of what each kind of group keeps, sends and may forget.

All addressing of a handoff is by half-open token intervals; a page list is derived from an interval with the group's
own page size, never the other way round. Lookahead and speculative slots are in no interval, so they cannot be sent.

The table's rows are kinds, and in each of them the `module` says on which tokens entry i of a group depends:

- 0, the target: x_0..x_i. The entry is final once it is computed.
- j >= 1, a drafter (1 for EAGLE, EAGLE-3 and one-layer MTP; module j of MTP): x_{i+j} too. Of a prompt of n tokens
  entries up to n - j are final once computed, entry n - j with the seed x_n, and what lies beyond rests on unverified
  drafts.
- None, a drafter that sees tokens alone (a draft model): as the target.

A state group has one slot, the interval [0, 1), whatever the number of tokens: it is final when all went through it.
States are the target's, or of a drafter that sees tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.errors import ProtocolError

Kind = Literal["full", "sliding_window", "mla", "state"]

MAX_TOKENS = 1 << 24
# Bounds what a peer says: only decoding checks it.
Position = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_End = Annotated[int, Meta(le=MAX_TOKENS)]


class Interval(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Half-open range [start, stop) of token positions (or of page indices). Empty when start == stop.

    Raises `ProtocolError` for a negative start or a stop before the start.
    """

    start: _End
    stop: _End

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ProtocolError(f"not an interval: [{self.start}, {self.stop})")

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def empty(self) -> bool:
        """True when nothing is in it."""
        return self.start == self.stop

    def covers(self, other: Interval) -> bool:
        """True when every position of `other` is in self; an empty `other` always is."""
        return other.empty or (self.start <= other.start and other.stop <= self.stop)

    def after(self, position: int) -> Interval:
        """The part at or after `position`."""
        start = min(max(self.start, position), self.stop)
        return Interval(start, self.stop)

    def round_out(self, multiple: int) -> Interval:
        """The least interval around self whose ends are multiples of `multiple`."""
        if self.empty:
            return self
        return Interval(self.start // multiple * multiple, -(-self.stop // multiple) * multiple)


ALL_LAYERS = Interval(0, MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class Rules:
    """The table's entry for one group. `window` in tokens: the query at position i sees keys j > i - window.

    Raises `ProtocolError` for a window that does not go with the kind, and for states of a drafter that looks ahead.
    """

    kind: Kind
    module: int | None = 0
    window: int | None = None

    def __post_init__(self) -> None:
        windowed = self.kind == "sliding_window"
        if windowed != (self.window is not None) or (self.window is not None and self.window < 1):
            raise ProtocolError("a window of at least 1 goes with kind sliding_window only")
        if self.module is not None and self.module < 0:
            raise ProtocolError(f"there is no module {self.module}")
        if self.reach and self.kind == "state":
            # The last tokens of a prompt would be guesses, and a state cannot forget them.
            raise ProtocolError("states of a drafter that needs the tokens behind its own cannot be handed off")

    @property
    def reach(self) -> int:
        """How many tokens behind its own an entry depends on."""
        return self.module or 0

    def wanted(self, n: int, hit: int) -> Interval:
        """What the decode side must receive for a prompt of `n` tokens of which it holds the first `hit` entries.

        Entries that only the seed makes final always move, however long the hit. A window needs what the next query
        sees. A state cannot be extended from a shorter prefix's state by copying: it is all or nothing.

        Raises `ProtocolError` for a hit outside [0, n].
        """
        _check(n)
        if not 0 <= hit <= n:
            raise ProtocolError(f"a prefix hit of {hit} tokens is outside [0, {n}]")
        if self.kind == "state":
            return Interval(1, 1) if hit == n else Interval(0, 1)
        alone, seeded = self.final(n, n), self.final(n, n, seeded=True)
        return Interval(max(min(hit, alone), min(self.first_needed(seeded), alone)), seeded)

    def final(self, n: int, computed: int, *, seeded: bool = False) -> int:
        """Entries [0, this) that no later step will change, while `n` tokens are known.

        `computed` counts the entries whose forward has ended, in [0, n]. `seeded` says that the next token x_n is known
        too, and was used, which needs computed == n.

        Raises `ProtocolError` for counts that contradict each other.
        """
        if not 0 <= computed <= n or (seeded and computed != n):
            raise ProtocolError(f"{computed} of {n} tokens computed (seeded: {seeded}) is no state of a request")
        if self.kind == "state":
            return int(computed == n)
        return known_entries(self.reach, n + seeded, computed)

    def num_pages(self, num_tokens: int, page_size: int) -> int:
        """Pages that a request of `num_tokens` tokens needs; of a state group, slots."""
        return min(num_tokens, 1) if self.kind == "state" else -(-num_tokens // page_size)

    def num_scratch(self, num_drafts: int) -> int:
        """Slots of a state group besides a request's own. No interval covers them. Other kinds write drafts behind the
        tokens.

        A verification keeps the state behind each of its rows, and which of them goes on is known after it. A drafter
        goes on from the last known token, whatever it drafted behind it: it needs a slot for the state there, and two
        in turn for those behind drafts, of which the last has none.
        """
        if self.kind != "state":
            return 0
        return num_drafts + 1 if self.module == 0 else max(1, min(num_drafts, 3))

    def first_needed(self, computed: int) -> int:
        """Entries before this are never read again once [0, computed) are computed: no later query sees them."""
        return 0 if self.window is None else max(0, computed - self.window + 1)

    def hit(self, found: int, n: int) -> int:
        """How much of a prefix hit of `found` tokens an engine can start from that knows `n` tokens.

        Attention can start at every token up to the last entry that no unknown token decides; a state at its own only.
        """
        if self.kind == "state":
            return n if found == n else 0
        return min(found, max(n - self.reach, 0))


def known_entries(reach: int, n: int, computed: int) -> int:
    """How many of `computed` entries, each of which depends on `reach` tokens behind its own, `n` tokens decide."""
    return min(computed, max(n - reach, 0))


def _check(n: int) -> None:
    if n < 1:
        raise ProtocolError(f"a prompt has at least one token, got n={n}")
