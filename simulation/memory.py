"""Modelled KV memory of one engine: cells in the place of bytes.

One cell is 8 bytes and stands for one plane of one token of one group, or of a state. Cells keep what was last written
to them, also when their page is freed, as real memory does. Who holds which page is the engine's own `KVCache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from baton.errors import ProtocolError
from baton.handoff.plan.planner import RankGeometry
from baton.handoff.protocol.digests import Cell, pieces
from baton.handoff.protocol.messages import PieceDigest
from baton.kv.geometry import BLOCK_MAJOR_NHD, LAYER_MAJOR_NHD, NULL_PAGE, Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, kv_planes, latent_planes
from simulation.settings import GroupModel
from simulation.story import Story

CELL_BYTES = 8


class GroupMemory:
    """One group's region in one process. Page 0 is the null page. `writers`: pages that a peer may write, by the label
    of the attempt that they are open to.
    """

    def __init__(self, model: GroupModel, region: int, num_pages: int, page_size: int, random: Random) -> None:
        self.spec = GroupSpec(
            name=model.name,
            owner=model.owner,
            kind=model.kind,
            planes=(latent_planes(1, 1, "float32") if model.kind in ("mla", "state") else kv_planes(1, 2, "float32")),
            page_size=page_size,
            window=model.window,
            layer_ids=(model.salt,),
            module=model.module,
        )
        order = random.choice((BLOCK_MAJOR_NHD, LAYER_MAJOR_NHD))
        geometry = Geometry.from_order(self.spec, num_pages, order, region=region)
        self.model = model
        self.page_size = page_size
        self.num_pages = num_pages
        self.geometry = RankGeometry(rank=0, geometry=geometry)
        self.nbytes = geometry.region_bytes
        self.cells = [0] * (geometry.region_bytes // CELL_BYTES)
        self.writers: dict[int, str] = {}
        planes = geometry.planes
        self._page_step = planes[0].page_stride // CELL_BYTES
        self._plane_step = (planes[-1].base - planes[0].base) // CELL_BYTES
        self._token_step = planes[0].token_stride // CELL_BYTES
        self._values = range(model.num_planes)

    def _cell(self, page: int, token: int) -> int:
        return page * self._page_step + token * self._token_step

    def pages_of(self, start: int, count: int) -> set[int]:
        """The pages in which `count` cells from `start` on lie."""
        step, plane = self._page_step, self._plane_step
        if plane <= step:
            return set(range(start // step, (start + count - 1) // step + 1))
        return {cell % plane // step for cell in range(start, start + count)}

    def put(self, table: Sequence[int], entry: int, state: int) -> None:
        """Write one entry, which stands for the tokens that `state` stands for."""
        at = self._cell(table[entry // self.page_size], entry % self.page_size)
        for plane in self._values:
            self.cells[at + plane * self._plane_step] = hash((state, self.model.salt, plane))

    def holds(self, table: Sequence[int], entry: int, state: int) -> bool:
        """Whether an entry is what `put` writes."""
        index = entry // self.page_size
        if index >= len(table) or table[index] == NULL_PAGE:
            return False
        at = self._cell(table[index], entry % self.page_size)
        return all(
            self.cells[at + plane * self._plane_step] == hash((state, self.model.salt, plane)) for plane in self._values
        )

    def wrong(self, story: Story, num_tokens: int, table: Sequence[int], start: int, stop: int) -> int | None:
        """The first entry in `[start, stop)` that is not the story's, of whose tokens `num_tokens` were computed; None
        when all are.
        """
        if self.model.kind == "state":
            # The one slot holds what all tokens so far come to.
            right = start == stop or self.holds(table, 0, story.chain[num_tokens - 1])
            return None if right else 0
        reach, chain = self.model.reach, story.chain
        for entry in range(start, stop):
            if not self.holds(table, entry, chain[entry + reach]):
                return entry
        return None

    def read(self, table: Sequence[int], start: int, stop: int) -> list[int]:
        """The cells of entries `[start, stop)`."""
        out = []
        for entry in range(start, stop):
            at = self._cell(table[entry // self.page_size], entry % self.page_size)
            out += [self.cells[at + plane * self._plane_step] for plane in self._values]
        return out

    def copy_page(self, source: int, dest: int) -> None:
        """The engine's own copy of one page's content."""
        for token in range(self.page_size):
            from_cell, to_cell = self._cell(source, token), self._cell(dest, token)
            for plane in self._values:
                offset = plane * self._plane_step
                self.cells[to_cell + offset] = self.cells[from_cell + offset]


class CellDigester:
    """A `Digester` over modelled memory: one digest per piece, of its cells in canonical order."""

    def __init__(self, memories: Sequence[GroupMemory]) -> None:
        self._memories = {memory.model.name: memory for memory in memories}

    def digests(
        self, group: str, pages: Sequence[int], tokens: Interval, cells: Sequence[Cell] | None = None
    ) -> list[PieceDigest]:
        """The digests of `tokens`, in order; `cells` are all."""
        memory = self._memories[group]
        used = pages[tokens.start // memory.page_size : -(-tokens.stop // memory.page_size)]
        if not tokens.empty and (len(pages) * memory.page_size < tokens.stop or NULL_PAGE in used):
            raise ProtocolError(f"group {group!r}: tokens {tokens} are not all in pages")
        out = []
        for piece in pieces(tokens):
            low, high = piece.start, piece.stop
            value = hash((memory.model.salt, low, high, *memory.read(pages, low, high)))
            out.append(PieceDigest(piece, value.to_bytes(8, "little", signed=True)))
        return out
