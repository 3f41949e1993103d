"""Modelled KV memory of one engine: cells, pages with an owner and an epoch, and a prefix cache.

One cell is 8 bytes and stands for one half (K or V) of one token of one group. Cells keep what was last
written to them, also when their page is freed, as real memory does.
"""

from __future__ import annotations

from collections import OrderedDict
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


class Page:
    """One page: `holders` are the legs that count on its content, `writer` the attempt that a peer may write
    it for, `epoch` how often it was handed out.
    """

    __slots__ = ("cache_key", "epoch", "holders", "writer")

    def __init__(self) -> None:
        self.holders: set[str] = set()
        self.writer: str | None = None
        self.epoch = 0
        self.cache_key: int | None = None


class _Pages(dict[int, Page]):
    """Pages come into being when they are looked at."""

    def __missing__(self, page: int) -> Page:
        found = self[page] = Page()
        return found


class GroupMemory:
    """One group's region in one process. Page 0 is the null page."""

    def __init__(self, model: GroupModel, region: int, num_pages: int, page_size: int, random: Random) -> None:
        spec = GroupSpec(
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
        geometry = Geometry.from_order(spec, num_pages, order, region=region)
        self.model = model
        self.page_size = page_size
        self.geometry = RankGeometry(rank=0, geometry=geometry)
        self.nbytes = geometry.region_bytes
        self.cells = [0] * (geometry.region_bytes // CELL_BYTES)
        self.num_pages = num_pages
        self.pages: dict[int, Page] = _Pages()
        planes = geometry.planes
        self._page_step = planes[0].page_stride // CELL_BYTES
        self._half_step = (planes[-1].base - planes[0].base) // CELL_BYTES
        self._token_step = planes[0].token_stride // CELL_BYTES
        self._free = list(range(1, num_pages))
        random.shuffle(self._free)
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._cache: dict[int, int] = {}

    # ------------------------------------------------------------ content

    def _cell(self, page: int, token: int) -> int:
        return page * self._page_step + token * self._token_step

    def pages_of(self, start: int, count: int) -> set[int]:
        """The pages in which `count` cells from `start` on lie."""
        step, half = self._page_step, self._half_step
        if half <= step:
            return set(range(start // step, (start + count - 1) // step + 1))
        return {cell % half // step for cell in range(start, start + count)}

    def write(self, story: Story, table: Sequence[int], start: int, stop: int) -> None:
        """What a forward pass over tokens `[start, stop)` leaves behind."""
        truth, size, half_step = story.cells(self.model), self.page_size, self._half_step
        for position in range(start, min(stop, len(truth))):
            at = self._cell(table[position // size], position % size)
            for half, value in enumerate(truth[position]):
                self.cells[at + half * half_step] = value

    def scribble(self, table: Sequence[int], start: int, stop: int, value: int) -> None:
        """Lookahead slots: entries that rest on unverified drafts, wherever the table has room for them."""
        for position in range(start, min(stop, len(table) * self.page_size)):
            at = self._cell(table[position // self.page_size], position % self.page_size)
            for half in range(self.model.halves):
                self.cells[at + half * self._half_step] = value

    def wrong(self, story: Story, table: Sequence[int], start: int, stop: int) -> int | None:
        """The first position in `[start, stop)` whose cells are not the story's; None when all are."""
        truth, size, half_step, cells = story.cells(self.model), self.page_size, self._half_step, self.cells
        for position in range(start, stop):
            page = table[position // size]
            at = self._cell(page, position % size)
            for half, value in enumerate(truth[position]):
                if page == NULL_PAGE or cells[at + half * half_step] != value:
                    return position
        return None

    def read(self, table: Sequence[int], start: int, stop: int) -> list[int]:
        """The cells of tokens `[start, stop)`."""
        out = []
        for position in range(start, stop):
            at = self._cell(table[position // self.page_size], position % self.page_size)
            out += [self.cells[at + half * self._half_step] for half in range(self.model.halves)]
        return out

    def copy_page(self, source: int, dest: int) -> None:
        """The engine's own copy of one page's content."""
        for token in range(self.page_size):
            for half in range(self.model.halves):
                offset = half * self._half_step
                self.cells[self._cell(dest, token) + offset] = self.cells[self._cell(source, token) + offset]

    # ------------------------------------------------------------ pages

    @property
    def num_available(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_held(self) -> int:
        """Pages that some leg holds."""
        return self.num_pages - 1 - self.num_available

    def allocate(self, count: int, holder: str) -> list[int]:
        """Hand out pages, the one freed last first: whoever writes it late is found out. `num_available` bounds
        `count`.
        """
        while len(self._free) < count:
            page, _ = self._evictable.popitem(last=False)
            key = self.pages[page].cache_key
            assert key is not None
            del self._cache[key]
            self.pages[page].cache_key = None
            self._free.append(page)
        out = [self._free.pop() for _ in range(count)]
        for page in out:
            self.pages[page].holders.add(holder)
            self.pages[page].epoch += 1
        return out

    def share(self, pages: Sequence[int], holder: str) -> None:
        """Hold pages that the cache found."""
        for page in pages:
            self._evictable.pop(page, None)
            self.pages[page].holders.add(holder)

    def release(self, pages: Sequence[int], holder: str) -> None:
        """Let go of pages; those that nobody holds any more are free, or cached."""
        for page in reversed(pages):
            if page == NULL_PAGE:
                continue
            entry = self.pages[page]
            entry.holders.remove(holder)
            if entry.holders:
                continue
            entry.writer = None
            if entry.cache_key is not None:
                self._evictable[page] = None
            else:
                self._free.append(page)

    # ------------------------------------------------------------ the prefix cache

    def _key(self, story: Story, index: int) -> int:
        # The chain stands for all tokens that the page's entries depend on.
        return story.chain[(index + 1) * self.page_size - 1 + self.model.module]

    def cache(self, story: Story, table: Sequence[int], final: int) -> None:
        """Enter full pages of `[0, final)`."""
        for index in range(final // self.page_size):
            page = table[index]
            if page == NULL_PAGE or self.pages[page].cache_key is not None:
                continue
            key = self._key(story, index)
            if key not in self._cache:
                self._cache[key] = page
                self.pages[page].cache_key = key

    def lookup(self, story: Story, known: int) -> list[int]:
        """The cached pages of a prompt's first `known` tokens, from the first on."""
        out: list[int] = []
        while (len(out) + 1) * self.page_size + self.model.module <= known:
            page = self._cache.get(self._key(story, len(out)))
            if page is None:
                break
            out.append(page)
        return out


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
