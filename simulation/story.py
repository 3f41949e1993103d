"""Modelled language: what follows a prompt, and what the KV of each token is.

Everything is a function of the tokens before it, so that KV at a wrong position, of another prompt or of
another group has another value.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

VOCAB = 48
EOS = 0
LONGEST = 140
LONGEST_SMALL = 24
_FOLLOWS, _BEGIN = 7, 1


def extend(state: int, tokens: Iterable[int]) -> list[int]:
    """What stands for all tokens up to each of `tokens`, where `state` stands for those before them."""
    # Hashes of integers are the same in every process.
    out = []
    for token in tokens:
        state = hash((state, token))
        out.append(state)
    return out


def follow(state: int) -> int:
    """The one token that follows."""
    return hash((state, _FOLLOWS)) % VOCAB


class Story:
    """One request's prompt and all tokens that must follow it. `chain[i]` stands for tokens [0, i]."""

    def __init__(self, prompt: list[int], max_tokens: int) -> None:
        self.num_prompt, self.max_tokens = len(prompt), max_tokens
        self.tokens = list(prompt)
        self.chain = extend(_BEGIN, prompt)
        while len(self.tokens) < self.num_prompt + max_tokens:
            self.tokens.append(follow(self.chain[-1]))
            self.chain += extend(self.chain[-1], self.tokens[-1:])
            if self.tokens[-1] == EOS:
                break

    def __len__(self) -> int:
        return len(self.tokens)

    def before(self, position: int) -> int:
        """What stands for the tokens before a position."""
        return self.chain[position - 1] if position else _BEGIN


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
