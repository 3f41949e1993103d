"""Streaming by layer: during a forward pass, the agent is told of each prompt's target layers that are written already,
and copies them while later layers are computed.

vLLM calls the connector behind each attention layer, with the layer's name. Of layers that it does not call for, and of
those behind a layer that it has not called for yet, nothing is told: they are final with the step. So are states, and
the entries of drafters, which run behind the target, several times over. Runs on vLLM's worker thread.

A message costs the agent and the interpreter about as much as a copy of `MIN_BYTES`, so layers are gathered until so
much is new. Behind the last one the agent is told of all that is left: a forward computes for a while behind its last
attention, and when it ends nothing is left to copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from baton.handoff.node.instance import Agent
from baton.handoff.protocol.events import LayersWithdrawn, LayersWritten
from baton.handoff.protocol.messages import AttemptKey
from baton.vllm.geometry import CacheLayout

MIN_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    layer_id: int
    group: str
    token_bytes: int


@dataclass(slots=True)
class StreamedPrompt:
    """A prompt of `num_tokens` tokens in the forward: `pages` by group; tokens `[0, final)` of a group are final behind
    the forward, `[0, before)` were so ahead of it. `untold` bytes in `groups` are written, and `told` says whether the
    agent has heard of any."""

    key: AttemptKey
    num_tokens: int
    pages: Mapping[str, list[int]]
    final: Mapping[str, int]
    before: Mapping[str, int]
    untold: int = 0
    groups: set[str] = field(default_factory=set)
    told: bool = False

    def new_tokens(self, group: str) -> int:
        """Tokens of a group that this forward makes final."""
        return max(self.final[group] - self.before.get(group, 0), 0)


class VllmLayerStream:
    """What of the forward under way was told. `begin` and `end` stand around each, `written` in its midst."""

    def __init__(self, layout: CacheLayout, agent: Agent) -> None:
        self._agent = agent
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
            prompt.untold += sum(prompt.new_tokens(layer.group) * layer.token_bytes for layer in new)
            prompt.groups.update(layer.group for layer in new if prompt.new_tokens(layer.group))
            if prompt.groups and (last or prompt.untold >= MIN_BYTES):
                self._tell(prompt, stop)

    def _tell(self, prompt: StreamedPrompt, stop: int) -> None:
        final = {group: prompt.final[group] for group in sorted(prompt.groups)}
        tables = {group: list(prompt.pages[group]) for group in final}
        self._agent.stream_layers(prompt.key, LayersWritten(prompt.num_tokens, tables, final, stop))
        prompt.told, prompt.untold, prompt.groups = True, 0, set()

    def end(self) -> None:
        """The step is over, and is declared final as a whole."""
        self._prompts = []

    def withdraw(self) -> None:
        """What was told of the forward under way may be written again."""
        for prompt in self._prompts:
            if prompt.told:
                self._agent.stream_layers(prompt.key, LayersWithdrawn())
        self._prompts = []
