"""Layer groups of a vLLM engine: vLLM's cache groups, split by owner.

vLLM puts layers into one group with one block table where it can: the drafter's beside the target's, MLA beside full
attention. Baton moves tokens of target and drafter by different rules, and each kind's bytes in another way: such a
group becomes several that share a block table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.kv.geometry import Owner
from baton.kv.interval import Interval, Kind, Rules

# The prefix of the names of a draft model's layers.
DRAFT_MODEL = "draft_model."
_INTEGER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class CacheTable:
    """Layers of one kind in vLLM's cache group number `table`, which share block tables with all layers of that group.
    `block_size` in tokens; 1 for a state."""

    table: int
    kind: Kind
    window: int | None
    block_size: int
    layers: tuple[str, ...]


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
        """What the group keeps, sends and may forget."""
        return Rules(self.kind, self.module, self.window)

    def wanted(self, num_tokens: int, hit: int) -> Interval:
        """The tokens that an engine needs which has the first `hit` of `num_tokens` and computes the next one."""
        return self.rules.wanted(num_tokens, min(hit, num_tokens))

    def final(self, num_tokens: int, num_computed: int, tile: int) -> int:
        """The end of the final tokens of `num_tokens` when `num_computed` went through target and drafter.

        Whole tiles until the end: a tile that is half computed would be copied while it is written. The drafter of
        a whole prompt has run with the token after it.
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
    """Whether a layer is the drafter's. vLLM numbers those of EAGLE and MTP heads after the target's, and puts a
    prefix before those of a draft model."""
    return layer.startswith(DRAFT_MODEL) or layer_index(layer) >= num_target_layers


def module_of(layer: str, owner: Owner) -> int | None:
    """On which tokens a layer's entries depend, as in `Rules`: EAGLE and MTP heads are computed from the next token
    too, a draft model is not."""
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
