"""What transformers generates with a drafter of its own, and how an engine may differ from it: at near-ties alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.engine.models.test_transformers_equality import TIE, assert_greedy


@dataclass(frozen=True, slots=True)
class Generated:
    """`rounds`: the logits of each draft, [drafts, vocabulary], by the number of known tokens."""

    model: Any
    prompt: list[int]
    tokens: list[int]
    rounds: dict[int, Tensor]

    def drafts(self) -> dict[int, list[int]]:
        return {known: logits_DV.argmax(-1).tolist() for known, logits_DV in self.rounds.items()}

    def assert_tokens(self, got: list[int]) -> None:
        assert_greedy(self.model, self.prompt, got, len(self.tokens))

    def assert_rounds(self, got: list[int], drafts: dict[int, list[int]]) -> int:
        """Of an engine with the tokens `got`. How many rounds both have."""
        same = next((i for i, (a, b) in enumerate(zip(got, self.tokens, strict=True)) if a != b), len(got))
        # After a near-tie of the target, transformers drafts after other tokens.
        both = [known for known in drafts.keys() & self.rounds.keys() if known <= len(self.prompt) + same]
        for known in both:
            assert_round(drafts[known], self.rounds[known])
        return len(both)


def assert_round(drafts: list[int], logits_DV: Tensor) -> None:
    for draft, logits_V in zip(drafts, logits_DV, strict=False):
        best = int(logits_V.argmax())
        assert float(logits_V[best] - logits_V[draft]) <= TIE, f"other drafts: {drafts}"
        if draft != best:
            return  # the reference's next drafts follow another token


def generate(model: Any, prompt: list[int], num_tokens: int, generator: Any, patch: Any, **settings: Any) -> Generated:
    """`generator`: the class of transformers that makes the drafts. `settings`: of `generate`."""
    rounds: dict[int, Tensor] = {}
    original = generator.get_candidates

    def get(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits_BDV = original(self, input_ids, *args, **kwargs)
        if ids.shape[1] > input_ids.shape[1]:
            rounds[input_ids.shape[1]] = logits_BDV[0]
        return ids, logits_BDV

    ids = torch.tensor([prompt])
    with patch.context() as patched, torch.inference_mode():
        patched.setattr(generator, "get_candidates", get)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            **settings,
        )
    return Generated(model, prompt, out[0, len(prompt) :].tolist(), rounds)
