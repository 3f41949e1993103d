"""Splits vLLM's cache groups by kind and owner.

vLLM can join layers of several kinds and owners, and Baton's `Rules` depend on both: such a group is split into several
that share a block table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.errors import ConfigError
from baton.kv.interval import Interval, Kind, Rules
from baton.kv.spec import Owner

# Prefix of a draft model's layer names.
DRAFT_MODEL = "draft_model."
# Prefix of the MTP modules of Qwen3-Next and Qwen3.5, which vLLM numbers from 0.
MTP = "mtp."
_INTEGER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class CacheTable:
    """Layers of one kind in vLLM's cache group number `table`, which share block tables. `window` and `block_size` are
    in tokens; the block size of states is 1."""

    table: int
    kind: Kind
    window: int | None
    block_size: int
    layers: tuple[str, ...]

    def first_needed(self, num_tokens: int) -> int:
        """The first token that a query after `num_tokens` tokens sees."""
        return Rules(self.kind, window=self.window).first_needed(num_tokens)

    def first_block(self, num_tokens: int) -> int:
        return self.first_needed(num_tokens) // self.block_size


class BlockPool(Protocol):
    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...


class PartialBlocks:
    """First blocks of received windows, by request: the entries before the window did not come.

    When vLLM continues the request, it enters these blocks into its prefix cache as complete. So they are evicted in
    that step, before another prefix lookup. `tile`: tokens of a window that come together.
    """

    def __init__(self, cache_tables: Sequence[CacheTable], pool: BlockPool, tile: int) -> None:
        self._windows = [cache for cache in cache_tables if cache.window is not None]
        self._pool, self._tile = pool, tile
        self._coming: dict[str, set[int]] = {}
        self._here: dict[str, set[int]] = {}

    @property
    def waiting(self) -> bool:
        return bool(self._here)

    def allocated(self, request_id: str, num_tokens: int, hit: int, tables: Sequence[Sequence[int]]) -> None:
        """Record the blocks that a request of `num_tokens` tokens receives in part. `hit`: tokens found in the prefix
        cache."""
        partial = set()
        for cache in self._windows:
            first = cache.first_needed(num_tokens) // self._tile * self._tile
            if first > hit and first % cache.block_size:
                partial.add(tables[cache.table][first // cache.block_size])
        if partial:
            self._coming[request_id] = partial

    def received(self, request_id: str, failed: bool) -> None:
        blocks = self._coming.pop(request_id, None)
        if blocks is not None and not failed:
            self._here[request_id] = blocks

    def evict(self, request_id: str) -> None:
        """Call when vLLM has scheduled the request, or ends it."""
        self._coming.pop(request_id, None)
        if (blocks := self._here.pop(request_id, None)) is not None:
            self._pool.evict_blocks(blocks)


class BlockCounts(Protocol):
    num_gpu_blocks: int  # with the null block

    def get_num_free_blocks(self) -> int: ...


class EarlyBlocks:
    """Decode legs with blocks before P's admission (docs/reference/vllm-design.md): they leave room for the longest
    request, against deadlock, and half of the pool. `most`: the longest's blocks, by table.
    """

    def __init__(self, cache_tables: Sequence[CacheTable], pool: BlockCounts, most: Sequence[int]) -> None:
        self._sizes = {cache.table: cache.block_size for cache in cache_tables if cache.kind != "state"}
        self._pool, self._most = pool, most
        self._held: dict[str, int] = {}

    def fits(self, num_tokens: int) -> bool:
        need, usable = self._need(num_tokens), self._pool.num_gpu_blocks - 1
        left = usable - sum(self._held.values()) - need
        return left >= sum(self._most) and 2 * (self._pool.get_num_free_blocks() - need) >= usable

    def _need(self, num_tokens: int) -> int:
        sizes = (self._sizes.get(table, 1) for table in range(len(self._most)))
        # 2: vLLM keeps room for output.
        return sum(min(most, -(-num_tokens // size) + 2) for most, size in zip(self._most, sizes, strict=True))

    def allocated(self, request_id: str, num_tokens: int) -> None:
        self._held[request_id] = self._need(num_tokens)

    def ended(self, request_id: str) -> None:
        """Its blocks no longer count: the request has ended, or vLLM has admitted it."""
        self._held.pop(request_id, None)


def without_passed_blocks(
    tables: Sequence[list[int]], cache_tables: Sequence[CacheTable], num_computed: int
) -> tuple[list[int], ...]:
    """With null blocks where windows have passed: vLLM gives those blocks to other requests."""
    out = list(tables)
    for cache in cache_tables:
        if cache.window is not None and any(out[cache.table][: (first := cache.first_block(num_computed))]):
            out[cache.table] = [0] * first + out[cache.table][first:]
    return tuple(out)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one owner that share block table number `table`. `layer_ids` are in the order of `layers`."""

    name: str
    owner: Owner
    kind: Kind
    window: int | None
    table: int
    block_size: int
    layers: tuple[str, ...]
    layer_ids: tuple[int, ...]
    module: int | None = 0

    @property
    def rules(self) -> Rules:
        return Rules(self.kind, self.module, self.window)

    def wanted(self, num_tokens: int, hit: int, whole: bool = False) -> Interval:
        """The entries that D asks for, after a prefix hit of `hit` tokens. `whole`: all of a window's first block."""
        wanted = self.rules.wanted(num_tokens, min(hit, num_tokens))
        if whole and self.window is not None:
            return Interval(wanted.start // self.block_size * self.block_size, wanted.stop)
        return wanted

    def final(self, num_tokens: int, num_computed: int, tile: int) -> int:
        """Of `num_tokens`, tokens [0, this) are final when target and drafter have computed `num_computed`.

        Before the end only whole tiles count: a partial one would be copied while it is written. At the end the drafter
        has run with the next token, which counts as the seed.
        """
        ended = num_computed >= num_tokens
        final = self.rules.final(num_tokens, min(num_computed, num_tokens), seeded=ended)
        return final if ended else final // tile * tile


def layer_index(layer: str) -> int:
    """7 of `model.layers.7.self_attn.attn`. Raises `ConfigError` if none."""
    numbers = _INTEGER.findall(layer)
    if not numbers:
        raise ConfigError("model", f"layer {layer!r} has no number")
    return int(numbers[0])


def is_draft(layer: str, num_target_layers: int) -> bool:
    """vLLM numbers heads' layers after the target's, and prefixes those of a draft model and of Qwen's MTP modules."""
    return layer.startswith((DRAFT_MODEL, MTP)) or layer_index(layer) >= num_target_layers


def split_tables(
    tables: Sequence[CacheTable], num_target_layers: int, draft_module: int | None = 1
) -> list[LayerGroup]:
    """The groups of an engine, by block table, target before drafter. Engines with the same model have equal names.
    `draft_module`: in `Rules`. Raises `ConfigError` for a layer without a number."""
    groups = []
    for table in tables:
        owners: dict[Owner, list[str]] = {"target": [], "draft": []}
        for layer in table.layers:
            owners["draft" if is_draft(layer, num_target_layers) else "target"].append(layer)
        for owner, layers in owners.items():
            if not layers:
                continue
            layers.sort(key=layer_index)
            name = f"{owner}.{table.kind}.{table.table}"
            ids = tuple(layer_index(layer) for layer in layers)
            groups.append(
                LayerGroup(
                    name,
                    owner,
                    table.kind,
                    table.window,
                    table.table,
                    table.block_size,
                    tuple(layers),
                    ids,
                    0 if owner == "target" else draft_module,
                )
            )
    return groups
