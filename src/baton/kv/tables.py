"""What one request holds of every group: its pages in token order, slots of states, and where a handoff writes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.kv.interval import Interval
from baton.kv.pool import PrefixHit
from baton.kv.prefix import ROOT, Chain


class BlockTables:
    """One request's pages by group, in token order (null where a window has left them), and `tables`, the same as
    int32 arrays. Of a group of states the one page is the slot of the request's state; the slots that its next step
    writes are `scratch`, of which the first gets the state behind the last row of known tokens; no interval covers
    them and no peer is shown them; `checkpoints` are slots, by the token counts
    whose states they get in this step.

    Hashes of its tokens are kept over the loss of the pages, since tokens are only ever added. `uncached` groups hold
    no whole prefix: nothing of them may enter the prefix cache.
    """

    __slots__ = ("chains", "checkpoints", "entered", "found", "pages", "scratch", "slid", "tables", "uncached")

    def __init__(self, root: bytes = ROOT) -> None:
        self.chains: defaultdict[str, Chain] = defaultdict(lambda: Chain(root))
        self.found: dict[str, tuple[tuple[int, int, int], PrefixHit]] = {}  # the last lookup, and what it asked
        self._clear()

    def _clear(self) -> None:
        self.pages: dict[str, list[int]] = {}
        self.scratch: dict[str, list[int]] = {}
        self.checkpoints: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self.tables: dict[str, npt.NDArray[np.int32]] = {}
        self.entered: dict[str, int] = {}  # pages that the prefix cache was offered
        self.slid: dict[str, int] = {}  # pages that a window has left
        self.uncached: set[str] = set()

    def set_pages(self, group: str, pages: list[int]) -> None:
        """Replace the block table of a group."""
        self.pages[group] = pages
        self.tables[group] = np.asarray(pages, dtype=np.int32)

    def slots(self, group: str) -> tuple[int, list[int]]:
        """The slots of a group of states: the request's state, and those where a step writes what may follow it."""
        return self.pages[group][0], self.scratch[group]

    def take(self) -> dict[str, list[int]]:
        """Forget all pages; returns them, for the caller to release."""
        pages = self.pages
        self._clear()
        return pages


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a handoff writes: per group the prefix hit in tokens, and the interval wanted."""

    hits: dict[str, int]
    wanted: dict[str, Interval]
