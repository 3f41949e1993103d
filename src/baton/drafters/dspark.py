"""DSpark (DeepSeek, 2026): a DFlash trunk whose drafts depend on each other.

As in vLLM: the last known token's row predicts the first draft, so a block has as many rows as drafts. A Markov head of
low rank adds the bias `markov_w2 markov_w1[token before]` to logits.
"""

from __future__ import annotations

from torch import Tensor, nn

from baton.drafters.dflash import DFlash
from baton.errors import CheckpointError
from baton.models.base import CausalLM, Embedding
from baton.models.config import ModelConfig, RawConfig, get_int
from baton.models.layers.linear import Build, Linear


class MarkovHead(nn.Module):
    def __init__(self, vocab_size: int, rank: int, build: Build) -> None:
        super().__init__()
        self.markov_w1 = Embedding(vocab_size, rank, build)
        self.markov_w2 = Linear(rank, vocab_size, build)

    def forward(self, token_ids: Tensor) -> Tensor:
        """The bias [R, V] after tokens [R]."""
        return self.markov_w2(self.markov_w1(token_ids))  # type: ignore[no-any-return]


class DSpark(DFlash):
    num_known_rows = 0
    unused = frozenset({"t2d", "confidence_head.proj.weight", "confidence_head.proj.bias"})

    def __init__(self, config: ModelConfig, raw: RawConfig, target: CausalLM, names: set[str], build: Build) -> None:
        super().__init__(config, raw, target, names, build)
        if raw.get("markov_head_type", "vanilla") != "vanilla":
            kind = raw["markov_head_type"]
            raise CheckpointError(f"drafter: config.json: markov_head_type is {kind!r}, expected 'vanilla'")
        if raw.get("sample_from_anchor", True) is not True:
            raise CheckpointError("drafter: config.json: sample_from_anchor is false, which is not supported")
        rank = get_int(raw, "markov_rank", 0)
        if rank < 1:
            raise CheckpointError(f"drafter: config.json: markov_rank is {rank}, expected 1 or more")
        self.markov_head = MarkovHead(config.vocab_size, rank, build)

    def block_logits(self, states_RE: Tensor, before_R: Tensor) -> Tensor:
        bias: Tensor = self.markov_head(before_R)
        return self.compute_logits(states_RE) + bias.float()
