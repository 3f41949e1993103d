"""Digests of KV: D checks with them that its pages hold what P's held (docs/protocol.md, "Retry and repair").

A digest covers one plane of one layer of one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from baton.errors import ConfigError, ProtocolError
from baton.handoff.plan.topology import RankGeometry, assign
from baton.handoff.protocol.events import BadPiece
from baton.handoff.protocol.messages import (
    DIGEST_BYTES,
    MAX_HASHES,
    PIECE_TOKENS,
    AttemptKey,
    Digests,
    PieceDigest,
    Seeds,
)
from baton.kv.geometry import NULL_PAGE, Geometry, Plane
from baton.kv.interval import Interval
from baton.wire import Integrity

# Tokens hashed at a time: more would not fit into a core's cache.
SLICE_TOKENS = 8 * PIECE_TOKENS
SAMPLED_SHARE = 8  # "sampled" digests one in this many blocks of PIECE_TOKENS tokens

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_encoder = msgspec.msgpack.Encoder()
_seeds = msgspec.msgpack.Decoder(Seeds)


# Layer id, plane index, first head and last head + 1; ids and heads of the whole model.
Cell = tuple[int, int, int, int]


class Digester(Protocol):
    """Hashes the KV in a rank's pages. Called on the agent's worker thread."""

    def digests(
        self, group: str, pages: Sequence[int], tokens: Interval, cells: Sequence[Cell] | None = None
    ) -> list[PieceDigest]:
        """Digests of the pieces of `tokens`, in order, over `cells` (None: all of this rank). `pages`: the block table.

        Raises `ProtocolError` for a group or page that does not exist.
        """
        ...


# Reads (layer index, page ids, heads) of a plane: bytes in canonical order.
TokenReader = Callable[[int, NDArray[np.int64], slice], memoryview]


class MemoryDigester:
    """`geometries` lie within the registered `regions`. `planes` makes the reader of a plane; by default of host memory
    mapped by this process.

    Raises `ConfigError` for a tiled geometry, whose tokens are not separate in memory.
    """

    def __init__(
        self,
        geometries: Mapping[str, RankGeometry],
        regions: Sequence[Any],
        planes: Callable[[Geometry, Plane, Any], TokenReader] | None = None,
    ) -> None:
        self._pools: dict[str, tuple[Geometry, list[TokenReader]]] = {}
        for group, rank in geometries.items():
            geometry = rank.geometry
            if geometry.tile > 1:
                raise ConfigError("integrity", f"group {group!r} is stored in tiles of {geometry.tile} tokens")
            region = regions[geometry.region]
            make = planes or host_plane
            self._pools[group] = geometry, [make(geometry, plane, region) for plane in geometry.planes]

    def digests(
        self, group: str, pages: Sequence[int], tokens: Interval, cells: Sequence[Cell] | None = None
    ) -> list[PieceDigest]:
        if group not in self._pools:
            raise ProtocolError(f"group {group!r} does not exist here")
        share = cells_of(self._pools[group][0]) if cells is None else cells
        return [piece for part in _cut(tokens, SLICE_TOKENS) for piece in self._slice(group, pages, part, share)]

    def _slice(self, group: str, pages: Sequence[int], tokens: Interval, cells: Sequence[Cell]) -> list[PieceDigest]:
        geometry, pools = self._pools[group]
        size = geometry.page_size
        first, last = tokens.start // size, (tokens.stop - 1) // size
        used = np.asarray(pages[first : last + 1], dtype=np.int64)
        if used.size != last + 1 - first or used.min() <= NULL_PAGE or used.max() >= geometry.num_pages:
            raise ProtocolError(f"group {group!r}: tokens {tokens} are not all in pages")
        cut = list(cut_into_pieces(tokens))
        hashes = [bytearray() for _ in cut]
        layers = {layer_id: layer for layer, layer_id in enumerate(geometry.layer_ids)}
        for layer_id, index, *heads in cells:
            plane, pool = geometry.planes[index], pools[index]
            start, stop = (head - plane.first_head for head in heads)
            flat = pool(layers[layer_id], used, slice(start, stop))
            token_bytes = (stop - start) * plane.head_dim * plane.itemsize
            for found, piece in zip(hashes, cut, strict=True):
                low, high = ((token - first * size) * token_bytes for token in (piece.start, piece.stop))
                salt = _salt(group, plane.name, layer_id, heads[0], piece.start, piece.stop)
                found += xxhash.xxh3_64_digest(flat[low:high], seed=salt)
        return [PieceDigest(piece, bytes(found)) for found, piece in zip(hashes, cut, strict=True)]


def host_plane(geometry: Geometry, plane: Plane, region: NDArray[np.uint8]) -> TokenReader:
    view = _view(geometry, plane, region)

    def gather(layer: int, pages: NDArray[np.int64], heads: slice) -> memoryview:
        return np.ascontiguousarray(view[layer][pages, :, heads]).reshape(-1).view(np.uint8).data

    return gather


def _view(geometry: Geometry, plane: Plane, region: NDArray[np.uint8]) -> NDArray[np.unsignedinteger]:
    """Unsigned integers `[layers, pages, page_size, heads, head_dim]`, without a copy."""
    view: NDArray[np.unsignedinteger] = np.ndarray(
        (geometry.num_layers, geometry.num_pages, geometry.page_size, plane.num_heads, plane.head_dim),
        dtype=_UNSIGNED[plane.itemsize],
        buffer=region.data,
        offset=plane.base,
        strides=(plane.layer_stride, plane.page_stride, plane.token_stride, plane.head_stride, plane.element_stride),
    )
    return view


@lru_cache(maxsize=1 << 16)
def _salt(group: str, plane: str, layer_id: int, head: int, start: int, stop: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{group}\0{plane}\0{layer_id}\0{head}\0{start}\0{stop}".encode())


def cells_of(geometry: Geometry) -> tuple[Cell, ...]:
    planes = list(enumerate(geometry.planes))
    return tuple(
        (layer, i, plane.first_head, plane.last_head) for layer in sorted(geometry.layer_ids) for i, plane in planes
    )


@lru_cache(maxsize=1 << 13)
def share(sources: tuple[RankGeometry, ...], dest: RankGeometry, source: int) -> tuple[Cell, ...]:
    """The cells of a group that rank `source` sends to `dest`, in the order of the digests.

    Raises `ProtocolError` if a piece would have more digests than a message may carry, and the errors of `assign`.
    """
    to = dest.geometry
    cells: list[Cell] = []
    for box in assign(sources, dest).get(source, ()):
        layers = to.layer_ids[box.dest_layer : box.dest_layer + box.num_layers]
        for index in range(box.plane, box.plane + box.num_planes):
            first = to.planes[index].first_head + box.dest_head
            cells += [(layer, index, first, first + box.num_heads) for layer in layers]
    if len(cells) > MAX_HASHES:
        raise ProtocolError(f"group {to.group!r}: {len(cells)} digests for each piece are more than {MAX_HASHES}")
    return tuple(sorted(cells))


def cut_into_pieces(tokens: Interval) -> Iterator[Interval]:
    return _cut(tokens, PIECE_TOKENS)


def _cut(tokens: Interval, size: int) -> Iterator[Interval]:
    start = tokens.start
    while start < tokens.stop:
        end = min(tokens.stop, (start // size + 1) * size)
        yield Interval(start, end)
        start = end


def tokens_to_digest(integrity: Integrity, key: AttemptKey, tokens: Interval) -> tuple[Interval, ...]:
    """Both engines choose the same tokens, by the transfer's random id."""
    if integrity == "off" or tokens.empty:
        return ()
    if integrity == "full":
        return (tokens,)
    chosen = int.from_bytes(key.transfer_id[:8], "big") % SAMPLED_SHARE
    return tuple(piece for piece in cut_into_pieces(tokens) if (piece.start // PIECE_TOKENS) % SAMPLED_SHARE == chosen)


def seeds_digest(key: AttemptKey, seeds: Seeds) -> bytes:
    """`DIGEST_BYTES`, salted by the attempt."""
    # Encoded and decoded first, like the receiver's.
    received = _seeds.decode(_encoder.encode(seeds))
    return bytes(xxhash.xxh3_64_digest(_encoder.encode((key, received))))


def check_shape(digests: Digests, wanted: Mapping[str, Interval]) -> None:
    """Raises `ProtocolError` unless all pieces are valid, in order, and wanted."""
    for group, found in digests.items():
        within = wanted.get(group, Interval(0, 0))
        at = within.start
        for piece in found:
            start, stop = piece.tokens.start, piece.tokens.stop
            whole = start < stop and (stop - 1) // PIECE_TOKENS == start // PIECE_TOKENS
            if not whole or start < at or stop > within.stop:
                raise ProtocolError(f"group {group!r}: no piece of {within}: {piece.tokens}")
            at = stop


def groups_without_digests(
    digests: Digests, wanted: Mapping[str, Interval], integrity: Integrity, key: AttemptKey
) -> list[str]:
    """Groups with due tokens that have no digest. `digests` must have passed `check_shape`."""
    short = []
    for group, tokens in sorted(wanted.items()):
        ends = {piece.tokens.start: piece.tokens.stop for piece in digests.get(group, [])}
        for part in tokens_to_digest(integrity, key, tokens):
            at = part.start
            while at < part.stop and at in ends:
                at = ends[at]
            if at < part.stop:
                short.append(group)
                break
    return short


def find_mismatches(
    digester: Digester,
    geometries: Mapping[str, RankGeometry],
    digests: Digests,
    pages: Mapping[str, list[int]],
    shares: Mapping[str, Sequence[Cell]] | None = None,
) -> list[BadPiece]:
    """The pieces that differ from this engine's pages. `shares`: the cells that the peer's rank sends, per group; None:
    all.

    Raises `ProtocolError` for a group or page that does not exist.
    """
    bad = []
    for group, expected in sorted(digests.items()):
        geometry = geometries[group].geometry
        cells = cells_of(geometry) if shares is None else shares[group]
        for run in _runs(expected):
            own = digester.digests(group, pages[group], Interval(run[0].tokens.start, run[-1].tokens.stop), cells)
            for want, got in zip(run, own, strict=True):
                if want != got:
                    wrong = [cell for index, cell in enumerate(cells) if _hash(want, index) != _hash(got, index)]
                    names = dict.fromkeys((layer, geometry.planes[plane].name) for layer, plane, *_ in wrong)
                    bad.append(BadPiece(group, want.tokens, tuple(names)))
    return bad


def _hash(piece: PieceDigest, index: int) -> bytes:
    return piece.hashes[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def _runs(expected: Sequence[PieceDigest]) -> Iterator[list[PieceDigest]]:
    """Adjacent pieces that one call of `Digester.digests` cuts the same way."""
    run: list[PieceDigest] = []
    for piece in expected:
        if run and (run[-1].tokens.stop != piece.tokens.start or piece.tokens.start % PIECE_TOKENS):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
