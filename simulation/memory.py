"""Modelled KV memory of one engine: cells in the place of bytes.

One cell is 8 bytes and stands for one plane of one head of one token of one group, or of a state. Cells keep what was
last written to them, also when their page is freed, as real memory does. Who holds which page is the engine's own
`KVCache`.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import ProtocolError
from baton.handoff.protocol.digests import Cell, cells_of, pieces
from baton.handoff.protocol.messages import PieceDigest
from baton.kv.geometry import NULL_PAGE, Axis, Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, kv_planes, latent_planes
from simulation.settings import GroupModel
from simulation.story import Story

CELL_BYTES = 8


class RankMemory:
    """One rank's share of a group, in one region: all of a latent or a state, some heads of K and V. Page 0 is the null
    page. A cell is one plane of one head of one token.
    """

    def __init__(
        self, model: GroupModel, region: int, num_pages: int, page_size: int, order: tuple[Axis, ...], heads: range
    ) -> None:
        whole = model.num_planes == 1
        self.spec = GroupSpec(
            name=model.name,
            owner=model.owner,
            kind=model.kind,
            planes=latent_planes(1, 1, "float32") if whole else kv_planes(len(heads), 2, "float32"),
            page_size=page_size,
            window=model.window,
            layer_ids=(model.salt,),
            module=model.module,
        )
        first = 0 if whole else heads.start
        self.geometry = Geometry.from_order(self.spec, num_pages, order, region=region, first_head=first)
        self.nbytes = self.geometry.region_bytes
        self.cells = [0] * (self.nbytes // CELL_BYTES)
        planes = self.geometry.planes
        self._page_step = planes[0].page_stride // CELL_BYTES
        self._plane_step = (planes[-1].base - planes[0].base) // CELL_BYTES
        self._token_step = planes[0].token_stride // CELL_BYTES
        self._page_size = page_size
        # By plane and head of the model: where its cell is behind a token's first.
        self._parts = {
            (index, head): (plane.base + (head - first) * plane.head_stride) // CELL_BYTES
            for index, plane in enumerate(planes)
            for head in range(plane.first_head, plane.last_head)
        }
        self._values = [(offset, hash((model.salt, *part))) for part, offset in self._parts.items()]

    def _cell(self, page: int, token: int) -> int:
        return page * self._page_step + token * self._token_step

    def pages_of(self, start: int, count: int) -> set[int]:
        """The pages in which `count` cells from `start` on lie."""
        step, plane = self._page_step, self._plane_step
        if plane <= step:
            return set(range(start // step, (start + count - 1) // step + 1))
        return {cell % plane // step for cell in range(start, start + count)}

    def put(self, page: int, token: int, state: int) -> None:
        """As `GroupMemory.put`."""
        at = self._cell(page, token)
        for offset, salt in self._values:
            self.cells[at + offset] = hash((state, salt))

    def holds(self, page: int, token: int, state: int) -> bool:
        """As `GroupMemory.holds`."""
        at = self._cell(page, token)
        return all(self.cells[at + offset] == hash((state, salt)) for offset, salt in self._values)

    def read(self, table: Sequence[int], tokens: Interval, plane: int, heads: range) -> list[int]:
        """The cells of some heads of a plane."""
        offsets = [self._parts[plane, head] for head in heads]
        places = [divmod(entry, self._page_size) for entry in range(tokens.start, tokens.stop)]
        return [self.cells[self._cell(table[page], token) + at] for page, token in places for at in offsets]

    def copy_page(self, source: int, dest: int) -> None:
        """The engine's own copy of one page's content."""
        for token in range(self._page_size):
            from_cell, to_cell = self._cell(source, token), self._cell(dest, token)
            for offset, _ in self._values:
                self.cells[to_cell + offset] = self.cells[from_cell + offset]


class GroupMemory:
    """One group in one engine, on all its ranks, which have the same pages. `writers`: pages that a peer may write, by
    the label of the attempt that they are open to.
    """

    def __init__(self, model: GroupModel, num_pages: int, page_size: int, ranks: Sequence[RankMemory]) -> None:
        self.model, self.num_pages, self.page_size, self.ranks = model, num_pages, page_size, ranks
        self.writers: dict[int, str] = {}

    def put(self, table: Sequence[int], entry: int, state: int) -> None:
        """Write one entry, which stands for the tokens that `state` stands for."""
        for rank in self.ranks:
            rank.put(table[entry // self.page_size], entry % self.page_size, state)

    def holds(self, table: Sequence[int], entry: int, state: int) -> bool:
        """Whether an entry is what `put` writes."""
        index = entry // self.page_size
        if index >= len(table) or table[index] == NULL_PAGE:
            return False
        return all(rank.holds(table[index], entry % self.page_size, state) for rank in self.ranks)

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

    def copy_page(self, source: int, dest: int) -> None:
        """The engine's own copy of one page's content."""
        for rank in self.ranks:
            rank.copy_page(source, dest)


class CellDigester:
    """A `Digester` over one rank's memories: a digest per piece and cell, as in memory of bytes."""

    def __init__(self, memories: Sequence[RankMemory]) -> None:
        self._memories = {memory.spec.name: memory for memory in memories}

    def digests(
        self, group: str, pages: Sequence[int], tokens: Interval, cells: Sequence[Cell] | None = None
    ) -> list[PieceDigest]:
        """The digests of `tokens`, in order."""
        memory = self._memories[group]
        size = memory.spec.page_size
        used = pages[tokens.start // size : -(-tokens.stop // size)]
        if not tokens.empty and (len(pages) * size < tokens.stop or NULL_PAGE in used):
            raise ProtocolError(f"group {group!r}: tokens {tokens} are not all in pages")
        share, out = cells_of(memory.geometry) if cells is None else cells, []
        for piece in pieces(tokens):
            hashes = bytearray()
            for layer, plane, first, last in share:
                values = memory.read(pages, piece, plane, range(first, last))
                found = hash((layer, plane, first, last, piece.start, piece.stop, *values))
                hashes += found.to_bytes(8, "little", signed=True)
            out.append(PieceDigest(piece, bytes(hashes)))
        return out
