"""What a config says of experts and of latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.errors import CheckpointError

# Ten times those of the largest models; each expert is an object, made before a checkpoint's tensors are seen.
MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The experts of a decoder; layer l has them where `layers[l]`, else one MLP.

    A row goes to the `top_k` experts with the best scores, of `top_groups` among `num_groups` equal groups where that
    is fewer. `group_score`: a group is as good as its best expert, or as its two best together. `has_choice_bias`:
    scores are biased for the choice alone. The weights of the chosen are divided by their sum where `renormalise`
    says so, then multiplied by `scale`. `shared_size`: width of the MLP that every row passes besides, 0: none.

    Raises `CheckpointError` for numbers that leave a row no choice, and for more than `MAX_EXPERTS`.
    """

    layers: tuple[bool, ...]
    num_experts: int
    top_k: int
    intermediate_size: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    has_choice_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "two_best"] = "best"
    shared_size: int = 0

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
class LatentSpec:
    """Sizes of multi-head latent attention: of what is kept (`latent_dim`, `rope_dim`), of a head's query and key less
    their rotated part (`nope_dim`), of a head's value. `query_rank` None: queries are projected at once."""

    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None
    is_interleaved: bool
