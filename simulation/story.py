"""Modelled language: the tokens that follow a prompt, and the KV value of each token.

Both are functions of the model and of all tokens before, so KV of a wrong position, prompt, group or model has another
value. Sampled tokens also depend on the request's seed, and grammar-like ones on the number of output tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from baton.sampling_params import SamplingParams

VOCAB = 48
EOS = 0
LONGEST = 140
LONGEST_SMALL = 24
_FOLLOWS = 7


@dataclass(frozen=True, slots=True)
class Model:
    """What decides a request's tokens, and where they end. `begin` stands for the weights."""

    begin: int = 1
    eos: tuple[int, ...] = (EOS,)

    @property
    def facts(self) -> dict[str, str]:
        """The facts that an engine reports."""
        return {"model.weights": str(self.begin), "output.eos_token_ids": repr(list(self.eos))}


MODEL = Model()


def extend(state: int, tokens: Iterable[int]) -> list[int]:
    """For each of `tokens` the state that stands for all tokens up to it; `state` stands for the tokens before them."""
    # Hashes of integers are the same in every process.
    out = []
    for token in tokens:
        state = hash((state, token))
        out.append(state)
    return out


class Story:
    """One request's prompt and all tokens that must follow it. `chain[i]` stands for tokens [0, i]."""

    def __init__(self, prompt: list[int], params: SamplingParams, model: Model = MODEL) -> None:
        self.num_prompt, self.params, self._model = len(prompt), params, model
        self.tokens = list(prompt)
        self.chain = extend(model.begin, prompt)
        while len(self.tokens) < self.num_prompt + params.max_tokens:
            self.tokens.append(self.follow(self.chain[-1], len(self.tokens)))
            self.chain += extend(self.chain[-1], self.tokens[-1:])
            if self.tokens[-1] in model.eos:
                break

    def __len__(self) -> int:
        return len(self.tokens)

    def before(self, position: int) -> int:
        """The state that stands for the tokens before a position."""
        return self.chain[position - 1] if position else self._model.begin

    def follow(self, state: int, position: int) -> int:
        """The one correct token at `position`, after the tokens that `state` stands for."""
        params = self.params
        choice = hash((state, _FOLLOWS, params.seed)) if params.temperature > 0.0 else hash((state, _FOLLOWS))
        if params.allowed_token_ids is None:
            return choice % VOCAB
        # A grammar: the allowed tokens depend on the number of output tokens.
        return params.allowed_token_ids[(choice + position - self.num_prompt) % len(params.allowed_token_ids)]


def prompts(random: Random, count: int) -> list[list[int]]:
    """Prompts of 1 to 24 tokens, rarely up to `LONGEST`, many with a common beginning."""
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
