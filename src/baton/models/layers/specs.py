"""The parts of a model's config for experts and for latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.errors import CheckpointError

# Each expert is an object, made before any tensor is read.
MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The experts of a decoder. Layer l has them if `layers[l]`, else one MLP.

    A row goes to the `top_k` experts with the best scores, of the `top_groups` best of `num_groups` equal groups. A
    group's score is that of its best expert, or the sum of its two best (`group_score`). `has_choice_bias`: scores are
    biased for the choice, not for the weights. With `renormalise` the chosen experts' weights are divided by their sum;
    then `scale` multiplies them. `shared_size`: width of the shared expert, an MLP that every row passes, 0 without;
    `has_shared_gate`: its output times the sigmoid of one more projection.

    Raises `CheckpointError`.
    """

    layers: tuple[bool, ...]
    num_experts: int
    top_k: int
    intermediate_size: int
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    has_choice_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "two_best"] = "best"
    shared_size: int = 0
    has_shared_gate: bool = False

    def __post_init__(self) -> None:
        if self.num_experts > MAX_EXPERTS:
            raise CheckpointError(f"config.json: {self.num_experts} experts are more than {MAX_EXPERTS}")
        group_size, rest = divmod(self.num_experts, self.num_groups)
        if rest or self.top_groups > self.num_groups:
            raise CheckpointError(
                f"config.json: n_group {self.num_groups} and topk_group {self.top_groups} do not fit "
                f"{self.num_experts} experts"
            )
        if self.top_groups < self.num_groups and self.group_score == "two_best" and group_size < 2:
            raise CheckpointError(f"config.json: n_group {self.num_groups} makes groups of one expert")
        if self.top_k > (choice := self.top_groups * group_size):
            raise CheckpointError(f"config.json: num_experts_per_tok is {self.top_k}, with {choice} to choose from")


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """The indexer of sparse attention (DeepSeek-V3.2, 2025): a row attends to the `top_k` keys with the best scores of
    `num_heads` heads of `head_dim`. `is_shared[l]`: layer l uses the choice of the last layer before it that has an
    indexer (GLM-5, arXiv:2603.12201)."""

    num_heads: int
    head_dim: int
    top_k: int
    is_interleaved: bool
    is_shared: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Sizes of multi-head latent attention: cached per token (`latent_dim`, `rope_dim`), the unrotated part of a head's
    query and key (`nope_dim`), a head's value. `query_rank` None: queries have no low-rank projection. `index` None:
    attention is not sparse."""

    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None
    is_interleaved: bool
    index: IndexSpec | None = None
