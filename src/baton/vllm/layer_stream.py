"""Streaming by layer: during a forward pass, the agent is told of each prompt's target layers that are written already,
and copies them while later layers are computed.

vLLM calls the connector behind each attention layer, with the layer's name. Of layers that it does not call for, and of
those behind a layer that it has not called for yet, nothing is told: they are final with the step. So are states, and
the entries of drafters, which run behind the target, several times over. Runs on vLLM's worker thread.

Layers are gathered until `MIN_BYTES` are new. Behind the last one the agent is told of all that is left: a forward
computes for a while behind its last attention, and when it ends nothing is left to copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.handoff.node.layers import WrittenLayers
from baton.vllm.geometry import CacheLayout

MIN_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    layer_id: int
    group: str
    token_bytes: int


@dataclass(frozen=True, slots=True)
class StreamedPrompt:
    """A prompt in the forward. Tokens `[0, before)` of a group were final ahead of it."""

    layers: WrittenLayers
    before: Mapping[str, int]

    def new_tokens(self, group: str) -> int:
        """Tokens of a group that this forward makes final."""
        return max(self.layers.final[group] - self.before.get(group, 0), 0)


class VllmLayerStream:
    """What of the forward under way was told. `begin` and `end` stand around each, `written` in its midst."""

    def __init__(self, layout: CacheLayout) -> None:
        layers = []
        for group in layout.groups:
            if group.owner == "target" and group.kind != "state":
                token_bytes = sum(plane.token_bytes for plane in layout.geometries[group.name].geometry.planes)
                named = zip(group.layers, group.layer_ids, strict=True)
                layers += [_Layer(name, layer_id, group.name, token_bytes) for name, layer_id in named]
        self._layers = sorted(layers, key=lambda layer: layer.layer_id)
        self._names = {layer.name for layer in layers}
        self._prompts: list[StreamedPrompt] = []
        self._written: set[str] = set()
        self._reached = 0  # so many of `_layers` are written, and all that come before them

    def begin(self, prompts: Iterable[StreamedPrompt]) -> None:
        """A forward over these prompts is about to run. One that was not ended has failed, and its rows will be written
        again or never."""
        self.withdraw()
        self._written, self._reached = set(), 0
        self._prompts = list(prompts)

    def written(self, name: str) -> None:
        """The forward has written a layer."""
        if not self._prompts or name not in self._names:
            return
        if name in self._written:
            # Then the first time was not the last, and what was told may not have been final.
            self.withdraw()
            return
        self._written.add(name)
        start = self._reached
        while self._reached < len(self._layers) and self._layers[self._reached].name in self._written:
            self._reached += 1
        new, last = self._layers[start : self._reached], self._reached == len(self._layers)
        if not new:
            return
        stop = new[-1].layer_id + 1 if last else self._layers[self._reached].layer_id
        for prompt in self._prompts:
            for layer in new:
                if tokens := prompt.new_tokens(layer.group):
                    prompt.layers.add(layer.group, tokens * layer.token_bytes)
            if prompt.layers.groups and (last or prompt.layers.untold >= MIN_BYTES):
                prompt.layers.tell(stop)

    def end(self) -> None:
        """The step is over, and is declared final as a whole."""
        self._prompts = []

    def withdraw(self) -> None:
        """What was told of the forward under way may be written again."""
        for prompt in self._prompts:
            prompt.layers.withdraw()
        self._prompts = []
