"""Token intervals, and the rules of each group kind: which entries are final, wanted, and still needed.

`module` determines which tokens entry i of a group depends on:

- 0, the target: x_0..x_i. An entry is final once it is computed.
- j >= 1, a drafter (MTP module j; EAGLE and EAGLE-3: 1): also x_{i+1}..x_{i+j}. Entry n - j of a prompt of n tokens is
  final once the first output token x_n is known.
- None, a drafter whose entries depend on no later token: as the target.

A state group has one slot, the interval [0, 1), which is final when the state has seen all tokens.

A compressed group keeps an entry for each `rate` tokens, in their bytes, written with the last one, so the group's
final, wanted and hit tokens end at multiples of `rate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.errors import ProtocolError

Kind = Literal["full", "sliding_window", "mla", "state", "compressed"]

MAX_TOKENS = 1 << 24
# Limits for values from a peer, which msgspec checks when it decodes, not when we construct.
Position = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_End = Annotated[int, Meta(le=MAX_TOKENS)]


class Interval(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A range [start, stop) of token positions (or of page indices).

    Raises `ProtocolError`.
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
        return self.start == self.stop

    def covers(self, other: Interval) -> bool:
        return other.empty or (self.start <= other.start and other.stop <= self.stop)

    def after(self, position: int) -> Interval:
        start = min(max(self.start, position), self.stop)
        return Interval(start, self.stop)

    def round_out(self, multiple: int) -> Interval:
        """The smallest interval that contains self and is bounded by multiples of `multiple`."""
        if self.empty:
            return self
        return Interval(self.start // multiple * multiple, -(-self.stop // multiple) * multiple)


ALL_LAYERS = Interval(0, MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class Rules:
    """`window`: the query at position i attends to keys j > i - window. `rate`: tokens per entry.

    Raises `ProtocolError`, also for states of a drafter that depends on later tokens.
    """

    kind: Kind
    module: int | None = 0
    window: int | None = None
    rate: int = 1

    def __post_init__(self) -> None:
        if self.rate < 1 or (self.rate > 1) != (self.kind == "compressed"):
            raise ProtocolError("a rate of more than one token goes with kind compressed only")
        windowed = self.kind == "sliding_window"
        if windowed != (self.window is not None) or (self.window is not None and self.window < 1):
            raise ProtocolError("a window of at least 1 goes with kind sliding_window only")
        if self.module is not None and self.module < 0:
            raise ProtocolError(f"there is no module {self.module}")
        if self.reach and self.kind == "state":
            # Its last inputs would be unverified drafts, which a state cannot drop.
            raise ProtocolError("states of a drafter that depends on later tokens cannot be handed off")

    @property
    def reach(self) -> int:
        """How many *later* tokens an entry depends on."""
        return self.module or 0

    def wanted(self, n: int, hit: int) -> Interval:
        """The entries that D must receive for `n` tokens when it holds the first `hit` entries (docs/lifecycle.md,
        "Bytes of a handoff").

        Raises `ProtocolError`.
        """
        _check(n)
        if not 0 <= hit <= n:
            raise ProtocolError(f"a prefix hit of {hit} tokens is outside [0, {n}]")
        if self.kind == "state":
            return Interval(1, 1) if hit == n else Interval(0, 1)
        alone, seeded = self.final(n, n), self.final(n, n, seeded=True)
        return Interval(max(min(hit, alone), min(self.first_needed(seeded), alone)), seeded)

    def final(self, n: int, computed: int, *, seeded: bool = False) -> int:
        """How many leading entries no later step changes, when `n` tokens are known.

        `computed`: the number of computed entries. `seeded`: the next token x_n is known and was used, which requires
        computed == n.

        Raises `ProtocolError`.
        """
        if not 0 <= computed <= n or (seeded and computed != n):
            raise ProtocolError(f"{computed} of {n} tokens computed (seeded: {seeded}) is no state of a request")
        if self.kind == "state":
            return int(computed == n)
        return self.complete(known_entries(self.reach, n + seeded, computed))

    def complete(self, num_tokens: int) -> int:
        """`num_tokens`, rounded down to complete entries."""
        return num_tokens - num_tokens % self.rate

    def num_pages(self, num_tokens: int, page_size: int) -> int:
        """Pages, or a state group's slots."""
        return min(num_tokens, 1) if self.kind == "state" else -(-num_tokens // page_size)

    def num_scratch(self, num_drafts: int) -> int:
        """Scratch slots of a state group, without the request's own. Other kinds write drafts into lookahead slots.

        A verification keeps the state after each of its rows; for drafters see docs/drafters.md ("Draft models with
        states").
        """
        if self.kind != "state":
            return 0
        return num_drafts + 1 if self.module == 0 else max(1, min(num_drafts, 3))

    def first_needed(self, computed: int) -> int:
        """The first entry that a later query may read, once entries [0, computed) are computed."""
        return 0 if self.window is None else max(0, computed - self.window + 1)

    def hit(self, found: int, n: int) -> int:
        """The usable part of a prefix hit of `found` tokens when `n` tokens are known. A state can only start where it
        was saved."""
        if self.kind == "state":
            return n if found == n else 0
        return self.complete(min(found, max(n - self.reach, 0)))


def known_entries(reach: int, n: int, computed: int) -> int:
    """How many of `computed` entries depend on the first `n` tokens only."""
    return min(computed, max(n - reach, 0))


def _check(n: int) -> None:
    if n < 1:
        raise ProtocolError(f"a prompt has at least one token, got n={n}")
