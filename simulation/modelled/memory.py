"""Modelled KV memory of one engine: cells in place of bytes.

One cell is 8 bytes and stands for one plane of one head of one token of one group, or of a state. Cells keep the last
written value, also after their page is freed, as real memory does. The engine's own `KVCache` decides who holds which
page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from baton.errors import ProtocolError
from baton.handoff.protocol.digests import Cell, cells_of, cut_into_pieces
from baton.handoff.protocol.messages import PieceDigest
from baton.kv.geometry import NULL_PAGE, Axis, Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec, Planes, PlaneSpec, kv_planes, latent_planes
from simulation.settings import GroupModel
from simulation.story import Story

CELL_BYTES = 8
# More than there are salts, so that layer ids of the groups alternate, as in a model.
_NUM_SALTS = 16


class RankMemory:
    """One rank's share of a group, in one region: some layers, and all of a latent or some heads of any other kind.
    Page 0 is the null page. A cell is one plane of one head of one token in one layer.
    """

    def __init__(
        self,
        model: GroupModel,
        region: int,
        num_pages: int,
        page_size: int,
        order: tuple[Axis, ...],
        heads: range,
        layers: range,
    ) -> None:
        planes: Planes = kv_planes(len(heads), 2, "float32")
        if model.kind == "mla":
            planes, heads = latent_planes(1, 1, "float32"), range(1)
        elif model.kind == "state":
            planes = (PlaneSpec("state", "float32", len(heads), 2),)
        self.spec = GroupSpec(
            name=model.name,
            owner=model.owner,
            kind=model.kind,
            planes=planes,
            page_size=page_size,
            window=model.window,
            layer_ids=tuple(layer * _NUM_SALTS + model.salt for layer in layers),
            module=model.module,
        )
        self.geometry = Geometry.from_order(self.spec, num_pages, order, region=region, first_head=heads.start)
        self.nbytes = self.geometry.region_bytes
        self.cells = [0] * (self.nbytes // CELL_BYTES)
        one = self.geometry.planes[0]
        self._page_step, self._token_step = one.page_stride // CELL_BYTES, one.token_stride // CELL_BYTES
        # Cells after which the pages of the next plane or layer begin.
        by_layer = one.layer_stride > one.page_stride
        self._period = self._page_step * num_pages if by_layer else len(self.cells)
        self._page_size = page_size
        # By layer, plane and head of the model: the offset of its cell from the token's first cell.
        self._parts = {
            (layer, index, head): (
                plane.base + place * plane.layer_stride + (head - plane.first_head) * plane.head_stride
            )
            // CELL_BYTES
            for place, layer in enumerate(self.spec.layer_ids)
            for index, plane in enumerate(self.geometry.planes)
            for head in range(plane.first_head, plane.last_head)
        }
        self._values = [(offset, hash(part)) for part, offset in self._parts.items()]
        self._of_layer = {
            layer: [(offset, hash(part)) for part, offset in self._parts.items() if part[0] == layer]
            for layer in self.spec.layer_ids
        }

    def _cell(self, page: int, token: int) -> int:
        return page * self._page_step + token * self._token_step

    def pages_of(self, start: int, count: int) -> set[int]:
        """The pages that contain the `count` cells from `start` on."""
        return {cell % self._period // self._page_step for cell in range(start, start + count)}

    def put(self, page: int, token: int, state: int, layer: int | None = None) -> None:
        """As `GroupMemory.put`, or only in `layer`."""
        at = self._cell(page, token)
        for offset, salt in self._values if layer is None else self._of_layer[layer]:
            self.cells[at + offset] = hash((state, salt))

    def holds(self, page: int, token: int, state: int, below: int | None = None) -> bool:
        """As `GroupMemory.holds`."""
        at = self._cell(page, token)
        values = self._values
        if below is not None:
            values = [value for layer, own in self._of_layer.items() if layer < below for value in own]
        return all(self.cells[at + offset] == hash((state, salt)) for offset, salt in values)

    def read(self, table: Sequence[int], tokens: Interval, layer: int, plane: int, heads: range) -> list[int]:
        """The cells of some heads of a plane in a layer."""
        offsets = [self._parts[layer, plane, head] for head in heads]
        places = [divmod(entry, self._page_size) for entry in range(tokens.start, tokens.stop)]
        return [self.cells[self._cell(table[page], token) + at] for page, token in places for at in offsets]

    def copy_page(self, source: int, dest: int) -> None:
        for token in range(self._page_size):
            from_cell, to_cell = self._cell(source, token), self._cell(dest, token)
            for offset, _ in self._values:
                self.cells[to_cell + offset] = self.cells[from_cell + offset]


class GroupMemory:
    """One group in one engine, over all ranks that hold a part of it (by rank number), which use the same pages.
    `writers` maps each page that a peer may write to the label of the attempt that it is open to.
    """

    def __init__(self, model: GroupModel, num_pages: int, page_size: int, ranks: Mapping[int, RankMemory]) -> None:
        self.model, self.num_pages, self.page_size, self.ranks = model, num_pages, page_size, ranks
        self.writers: dict[int, str] = {}

    @property
    def spec(self) -> GroupSpec:
        """The group over all ranks; the planes are those of one rank."""
        parts = [rank.spec for rank in self.ranks.values()]
        return structs.replace(parts[0], layer_ids=tuple(sorted({i for part in parts for i in part.layer_ids})))

    def put(self, table: Sequence[int], entry: int, state: int) -> None:
        """Write one entry; `state` stands for the tokens up to it."""
        for rank in self.ranks.values():
            rank.put(table[entry // self.page_size], entry % self.page_size, state)

    def holds(self, table: Sequence[int], entry: int, state: int, below: int | None = None) -> bool:
        """Whether an entry has the value that `put` writes, in all layers or in those below `below`."""
        index = entry // self.page_size
        if index >= len(table) or table[index] == NULL_PAGE:
            return False
        return all(rank.holds(table[index], entry % self.page_size, state, below) for rank in self.ranks.values())

    def wrong(
        self, story: Story, num_tokens: int, table: Sequence[int], start: int, stop: int, below: int | None = None
    ) -> int | None:
        """The first entry in `[start, stop)` that is not the story's, if `num_tokens` tokens were computed, or None.
        `below`: check only the layers below that one.
        """
        if self.model.kind == "state":
            # The single slot holds the state after all tokens so far.
            right = start == stop or self.holds(table, 0, story.chain[num_tokens - 1])
            return None if right else 0
        reach, chain = self.model.reach, story.chain
        for entry in range(start, stop):
            if not self.holds(table, entry, chain[entry + reach], below):
                return entry
        return None

    def copy_page(self, source: int, dest: int) -> None:
        for rank in self.ranks.values():
            rank.copy_page(source, dest)


class CellDigester:
    """A `Digester` over one rank's memories: a digest per piece and cell, as over real memory."""

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
        for piece in cut_into_pieces(tokens):
            hashes = bytearray()
            for layer, plane, first, last in share:
                values = memory.read(pages, piece, layer, plane, range(first, last))
                found = hash((layer, plane, first, last, piece.start, piece.stop, *values))
                hashes += found.to_bytes(8, "little", signed=True)
            out.append(PieceDigest(piece, bytes(hashes)))
        return out
