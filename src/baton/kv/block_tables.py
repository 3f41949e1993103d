"""The block tables of one request, and a handoff's destination."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.kv.interval import Interval
from baton.kv.page_pool import PrefixHit
from baton.kv.prefix import ROOT, Chain


class BlockTables:
    """`pages`: page ids in token order, null where a window has freed them; `tables` holds the same as int32 arrays.
    The one page of a state group is the request's slot. `scratch`: state slots that the next step writes, the first of
    which gets the state after the last known token. `checkpoints`: slots that receive a checkpoint in this step, by
    token count. `ends`: the token count of the last checkpoint that makes room for the next. `uncached`: groups that
    lack entries which are never computed, whose pages may not enter the prefix cache. `room`: tokens that surely fit.

    Hash chains survive when the pages are released, because tokens are only appended.
    """

    __slots__ = (
        "chains",
        "checkpoints",
        "ends",
        "entered",
        "found",
        "pages",
        "room",
        "scratch",
        "slid",
        "tables",
        "uncached",
    )

    def __init__(self, root: bytes = ROOT) -> None:
        self.chains: defaultdict[str, Chain] = defaultdict(lambda: Chain(root))
        self.found: dict[str, tuple[tuple[int, int, int, int], PrefixHit]] = {}  # the last lookup: its key and result
        self._clear()

    def _clear(self) -> None:
        self.pages: dict[str, list[int]] = {}
        self.scratch: dict[str, list[int]] = {}
        self.checkpoints: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self.ends: dict[str, int] = {}
        self.tables: dict[str, npt.NDArray[np.int32]] = {}
        self.entered: dict[str, int] = {}  # pages already offered to the prefix cache
        self.slid: dict[str, int] = {}  # pages freed after the window passed
        self.uncached: set[str] = set()
        self.room = 0

    def set_pages(self, group: str, pages: list[int]) -> None:
        self.pages[group] = pages
        self.tables[group] = np.asarray(pages, dtype=np.int32)

    def slots(self, group: str) -> tuple[int, list[int]]:
        """The request's slot, and scratch slots."""
        return self.pages[group][0], self.scratch[group]

    def take(self) -> dict[str, list[int]]:
        """Empties the tables: the caller releases the pages."""
        pages = self.pages
        self._clear()
        return pages


@dataclass(frozen=True, slots=True)
class Destination:
    """Per group the prefix hit in tokens, and the wanted interval."""

    hits: dict[str, int]
    wanted: dict[str, Interval]
