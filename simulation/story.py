"""Modelled language: what follows a prompt, and what the KV of each token is.

Everything is a function of the tokens before it, so that KV at a wrong position, of another prompt or of
another group has another value.
"""

from __future__ import annotations

from random import Random

from simulation.settings import GroupModel

VOCAB = 48
EOS = 0
LONGEST = 140
LONGEST_SMALL = 24
_FOLLOWS = 7


class Story:
    """One request's prompt and all tokens that must follow it, with the KV cells of every position."""

    def __init__(self, prompt: list[int], max_tokens: int) -> None:
        self.num_prompt = len(prompt)
        self.tokens = list(prompt)
        # chain[i] stands for tokens [0, i]. Hashes of integers are the same in every process.
        self.chain: list[int] = []
        state = 1
        for token in prompt:
            state = hash((state, token))
            self.chain.append(state)
        while len(self.tokens) < self.num_prompt + max_tokens:
            token = hash((state, _FOLLOWS)) % VOCAB
            state = hash((state, token))
            self.tokens.append(token)
            self.chain.append(state)
            if token == EOS:
                break
        self._cells: dict[str, list[tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def cells(self, group: GroupModel) -> list[tuple[int, ...]]:
        """Per position the cells (one per half) that must be in a group's memory."""
        found = self._cells.get(group.name)
        if found is None:
            states = self.chain[group.module :]
            found = [tuple(hash((state, group.salt, half)) for half in range(group.halves)) for state in states]
            self._cells[group.name] = found
        return found

    def guesses(self, start: int, count: int, random: Random) -> list[int]:
        """A drafter's guesses for positions `start` and on: right until one is wrong."""
        out = []
        for position in range(start, start + count):
            right = position < len(self.tokens) and random.random() < 0.7
            out.append(self.tokens[position] if right else random.randrange(VOCAB))
        return out


def prompts(random: Random, count: int) -> list[list[int]]:
    """Prompts of 1 to 24 tokens, rarely up to `LONGEST`, many of which begin alike."""
    stems = [[random.randrange(1, VOCAB) for _ in range(LONGEST)] for _ in range(2)]
    out = []
    for _ in range(count):
        length = random.choice((1, 2, random.randint(3, 12), random.randint(3, 12), random.randint(8, 24)))
        if random.random() < 0.03:
            # Digests are cut every 64 tokens.
            length = random.randint(60, LONGEST)
        stem = random.choice(stems)
        shared = random.randint(0, length)
        out.append(stem[:shared] + [random.randrange(1, VOCAB) for _ in range(length - shared)])
    return out
