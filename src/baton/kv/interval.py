"""Which tokens of a group are final on the prefill side, and which the decode side wants.

All addressing of a handoff is by half-open token intervals; a page list is derived from an interval with the
group's own page size, never the other way round. Lookahead and speculative slots are in no interval, so they
cannot be sent.

For a prompt of n tokens whose first sampled token is t = x_n:

- A target entry i depends on x_0..x_i. It is final once it is computed.
- An entry i of drafter module j (1 for EAGLE, EAGLE-3 and one-layer MTP) depends on x_{i+j} too. It is final
  at once while x_{i+j} is a prompt token, becomes final with the seed t for i = n - j, and rests on
  unverified drafts beyond.
- A state group has one slot, the interval [0, 1): it is final when all n tokens went through it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.errors import ProtocolError
from baton.kv.geometry import Kind, Owner

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

    def intersect(self, other: Interval) -> Interval:
        """What lies in both; an empty interval at `start` of the later one when nothing does."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

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


def _check(owner: Owner, kind: Kind, n: int, module: int) -> None:
    if n < 1:
        raise ProtocolError(f"a prompt has at least one token, got n={n}")
    if module < 1 or (owner == "target" and module != 1):
        raise ProtocolError(f"module {module} does not exist for owner {owner!r}")
    if owner == "draft" and kind == "state":
        raise ProtocolError("a drafter with a state group cannot be handed off")


def wanted(
    kind: Kind,
    window: int | None,
    n: int,
    hit: int,
    *,
    owner: Owner = "target",
    module: int = 1,
) -> Interval:
    """The tokens of a group that the decode side must receive for a prompt of `n` tokens.

    `hit` is its own prefix hit in this group, in tokens. A drafter's last entry comes with the seed and
    always moves, however long the hit. A window of w tokens (the query at position i sees keys j > i - w)
    needs what the next query sees, w - 1 tokens. `module` is the 1-based MTP module of a drafter group.

    Raises `ProtocolError` for a hit outside [0, n] or a window that does not go with the kind.
    """
    _check(owner, kind, n, module)
    if not 0 <= hit <= n:
        raise ProtocolError(f"a prefix hit of {hit} tokens is outside [0, {n}]")
    if (kind == "sliding_window") != (window is not None) or (window is not None and window < 1):
        raise ProtocolError(f"window {window!r} does not go with kind {kind!r}")
    if kind == "state":
        # A state cannot be extended from a shorter prefix's state by copying: it is all or nothing.
        return Interval(1, 1) if hit == n else Interval(0, 1)
    if owner == "target":
        start, stop = hit, n
    else:
        stop = max(n - module + 1, 0)
        start = min(hit, max(stop - 1, 0))
    if window is not None:
        # Clamped to stop: with window 1 the next query sees no earlier key. A drafter's last entry moves even
        # so.
        last = stop if owner == "target" else max(stop - 1, 0)
        start = max(start, min(stop - window + 1, last))
    return Interval(start, stop)


def final_interval(
    kind: Kind,
    n: int,
    computed: int,
    *,
    owner: Owner = "target",
    module: int = 1,
    seeded: bool = False,
) -> Interval:
    """The tokens of a group that no later step of the prefill side will change.

    `computed` counts the tokens whose forward of this group's owner has ended, in [0, n]. `seeded` says that
    the first token t is sampled and the drafter has run with it, which needs computed == n.

    Raises `ProtocolError` for counts that contradict each other.
    """
    _check(owner, kind, n, module)
    if not 0 <= computed <= n or (seeded and computed != n):
        raise ProtocolError(f"{computed} of {n} tokens computed (seeded: {seeded}) is no state of a prefill")
    if kind == "state":
        return Interval(0, 1 if computed == n else 0)
    if owner == "target":
        return Interval(0, computed)
    return Interval(0, min(computed, max(n - module + int(seeded), 0)))


def pages_of(interval: Interval, page_size: int) -> Interval:
    """The indices into a block table of the pages that hold `interval`; empty for an empty interval."""
    if interval.empty:
        return Interval(interval.start // page_size, interval.start // page_size)
    return Interval(interval.start // page_size, -(-interval.stop // page_size))
