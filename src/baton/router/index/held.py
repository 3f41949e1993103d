"""What an engine holds, by its KV events and the prompts just sent to it."""

from __future__ import annotations

from collections.abc import Callable

from baton.router.index.blocks import BlockIndex
from baton.router.prefixes import KnownPrefixes, PromptBlocks

# A sent prompt counts as held for this time; then the engine's events decide.
PROMISED_S = 5.0


class HeldPrefixes:
    def __init__(self, index: BlockIndex, clock: Callable[[], float]) -> None:
        self.index = index
        self._promised = KnownPrefixes(1, 0, clock, PROMISED_S)

    @property
    def learns(self) -> bool:
        return self._promised.learns

    def num_tokens(self, prompt: PromptBlocks) -> int:
        return max(self.index.num_tokens(prompt), self._promised.num_tokens(prompt))

    def learn(self, prompt: PromptBlocks) -> None:
        self._promised.learn(prompt)

    def forget(self, prompt: PromptBlocks) -> None:
        self._promised.forget(prompt)
