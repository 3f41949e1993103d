"""Layer groups of a vLLM engine: vLLM's cache groups, split by kind and owner.

vLLM puts layers into one group with one block table where it can: the drafter's beside the target's, MLA beside full
attention. Baton has rules by kind and owner (`baton.kv.interval.Rules`), so it splits such a group into several that
share a block table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.kv.interval import Interval, Kind, Rules
from baton.kv.spec import Owner

# The prefix of the names of a draft model's layers.
DRAFT_MODEL = "draft_model."
_INTEGER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class CacheTable:
    """Layers of one kind in vLLM's cache group number `table`, which share block tables with all layers of that group.
    `window` and `block_size` in tokens; a state's block size is 1."""

    table: int
    kind: Kind
    window: int | None
    block_size: int
    layers: tuple[str, ...]

    def first_block(self, num_tokens: int) -> int:
        """The index in the block table of the first block that a query behind `num_tokens` tokens sees."""
        return Rules(self.kind, window=self.window).first_needed(num_tokens) // self.block_size


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one owner that share block table number `table`. `layer_ids` follow `layers`."""

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
        """The rules by which the group's tokens are wanted, final and forgotten."""
        return Rules(self.kind, self.module, self.window)

    def wanted(self, num_tokens: int, hit: int) -> Interval:
        """The tokens that a decode engine wants of `num_tokens`, if its first `hit` (or all) are in place."""
        return self.rules.wanted(num_tokens, min(hit, num_tokens))

    def final(self, num_tokens: int, num_computed: int, tile: int) -> int:
        """Tokens [0, this) are final, of `num_tokens`, when target and drafter have computed `num_computed`.

        Before the end only whole tiles count: a tile that is half computed would be copied while it is written. At the
        end the drafter has run with the token behind the last one, which counts as the seed.
        """
        ended = num_computed >= num_tokens
        final = self.rules.final(num_tokens, min(num_computed, num_tokens), seeded=ended)
        return final if ended else final // tile * tile


def layer_index(layer: str) -> int:
    """The number in a layer's name: `model.layers.7.self_attn.attn` is layer 7.

    Raises `ConfigError` for a name without a number.
    """
    found = _INTEGER.findall(layer)
    if not found:
        raise ConfigError("model", f"layer {layer!r} has no number")
    return int(found[0])


def is_draft(layer: str, num_target_layers: int) -> bool:
    """True for a layer of the drafter. vLLM numbers the layers of EAGLE and MTP heads after the target's, and puts a
    prefix before the names of a draft model's."""
    return layer.startswith(DRAFT_MODEL) or layer_index(layer) >= num_target_layers


def module_of(layer: str, owner: Owner) -> int | None:
    """The `module` of a layer in `Rules`. EAGLE and MTP heads compute an entry from the token behind it too, a draft
    model does not."""
    if owner == "target":
        return 0
    return None if layer.startswith(DRAFT_MODEL) else 1


def split_tables(tables: Sequence[CacheTable], num_target_layers: int) -> list[LayerGroup]:
    """The groups of an engine, in order of block table, target before drafter. Names are equal on engines that serve
    the same model. Raises `ConfigError` for a layer without a number."""
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
                    module_of(layers[0], owner),
                )
            )
    return groups
