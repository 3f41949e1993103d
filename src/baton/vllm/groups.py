"""Layer groups of a vLLM engine: vLLM's cache groups, split by owner.

vLLM puts layers of one shape into one group with one block table, the drafter's too. Baton moves tokens of target and
drafter by different rules, so that such a group becomes two that share a block table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.handoff.interval import wanted
from baton.kv.geometry import Kind, Owner

_INTEGER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class CacheTable:
    """One of vLLM's cache groups: layers that share block tables. `block_size` in tokens; 1 for a state."""

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

    def wanted(self, num_tokens: int, hit: int) -> tuple[int, int]:
        """The tokens that an engine needs which has the first `hit` of `num_tokens` and computes the next one."""
        interval = wanted(self.kind, self.window, num_tokens, min(hit, num_tokens), owner=self.owner)
        return interval.start, interval.stop

    def final(self, num_tokens: int, num_computed: int, tile: int) -> int:
        """The end of the final tokens of `num_tokens` when `num_computed` went through target and drafter.

        Whole tiles until the end: a tile that is half computed would be copied while it is written.
        """
        if self.kind == "state":
            return int(num_computed >= num_tokens)
        return num_tokens if num_computed >= num_tokens else num_computed // tile * tile


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
    return layer.startswith("draft_model.") or layer_index(layer) >= num_target_layers


def split_tables(tables: Sequence[CacheTable], num_target_layers: int) -> list[LayerGroup]:
    """The groups of an engine, in order of block table, target before drafter. Names are equal on engines that serve
    the same model.

    Raises `ConfigError` for state layers beside a drafter: the drafter's last entry would depend on a token that the
    state must not have seen.
    """
    groups = []
    for index, table in enumerate(tables):
        owners: dict[Owner, list[str]] = {"target": [], "draft": []}
        for layer in table.layers:
            owners["draft" if is_draft(layer, num_target_layers) else "target"].append(layer)
        for owner, layers in owners.items():
            if not layers:
                continue
            layers.sort(key=layer_index)
            name = f"{owner}.{table.kind}.{index}"
            ids = tuple(layer_index(layer) for layer in layers)
            groups.append(
                LayerGroup(name, owner, table.kind, table.window, index, table.block_size, tuple(layers), ids)
            )
    if {"state"} <= {group.kind for group in groups} and any(group.owner == "draft" for group in groups):
        raise ConfigError("speculative_config", "a drafter beside state layers (Mamba) cannot be handed off")
    return groups
