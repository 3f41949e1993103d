"""Streaming by layer: the agent copies written layers while the forward computes later ones.

docs/reference/vllm-design.md says which layers, and in which units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.handoff.agent.layers import WrittenLayers
from baton.kv.spec import Owner
from baton.vllm.memory.geometry import CacheLayout

MIN_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    layer_id: int
    group: str
    token_bytes: int


@dataclass(frozen=True, slots=True)
class StreamedPrompt:
    """A prompt in the forward pass. Tokens `[0, before)` of a group were final before it."""

    layers: WrittenLayers
    before: Mapping[str, int]

    def new_tokens(self, group: str) -> int:
        return max(self.layers.final[group] - self.before.get(group, 0), 0)


class VllmLayerStream:
    """Call `begin` before a forward, `written` per layer, `end` after it."""

    def __init__(self, layout: CacheLayout) -> None:
        found: dict[Owner, list[_Layer]] = {"target": [], "draft": []}
        for group in layout.groups:
            if group.kind != "state":
                token_bytes = sum(plane.token_bytes for plane in layout.geometries[group.name].geometry.planes)
                named = zip(group.layers, group.layer_ids, strict=True)
                found[group.owner] += [_Layer(name, layer_id, group.name, token_bytes) for name, layer_id in named]
        self._target, self._draft = (sorted(layers, key=lambda layer: layer.layer_id) for layers in found.values())
        self._layers = self._target  # of this forward, in its order
        self._names: set[str] = set()
        self._prompts: list[StreamedPrompt] = []
        self._written: set[str] = set()
        self._reached = 0  # this many of `_layers` are written

    def begin(self, prompts: Iterable[StreamedPrompt], drafts_once: bool = False) -> None:
        """A previous forward without `end` has failed, and is withdrawn."""
        self.withdraw()
        self._layers = self._target + self._draft if drafts_once else self._target
        self._names = {layer.name for layer in self._layers}
        self._written, self._reached = set(), 0
        self._prompts = list(prompts)

    def written(self, name: str) -> None:
        if not self._prompts or name not in self._names:
            return
        if name in self._written:
            # A layer written twice was not final when it was reported.
            self.withdraw()
            return
        self._written.add(name)
        start = self._reached
        while self._reached < len(self._layers) and self._layers[self._reached].name in self._written:
            self._reached += 1
        new, last = self._layers[start : self._reached], self._reached in (len(self._target), len(self._layers))
        if not new:
            return
        stop = new[-1].layer_id + 1 if last else self._layers[self._reached].layer_id
        for prompt in self._prompts:
            for layer in new:
                if tokens := prompt.new_tokens(layer.group):
                    prompt.layers.add(layer.group, tokens * layer.token_bytes)
            least = MIN_BYTES // 2 if last else MIN_BYTES
            if prompt.layers.groups and prompt.layers.unreported >= least:
                prompt.layers.report(stop)

    def end(self) -> None:
        """The step is over; the caller declares its tokens final."""
        self._prompts = []

    def withdraw(self) -> None:
        """The current forward's layers may be written again."""
        for prompt in self._prompts:
            prompt.layers.withdraw()
        self._prompts = []
