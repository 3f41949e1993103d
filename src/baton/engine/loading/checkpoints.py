"""Loads the checkpoints of target and drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.drafters.base import Drafter
from baton.drafters.registry import load_drafter
from baton.engine.config import EngineConfig
from baton.engine.loading.progress import show_loading
from baton.models.base import CausalLM
from baton.models.layers.parallel import SINGLE_RANK, TensorRank
from baton.models.loading.config_json import read_config
from baton.models.loading.huge_pages import use_huge_pages
from baton.models.loading.loader import load_model
from baton.structured import Grammars
from baton.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Loaded:
    """`grammars`: None without a tokenizer or an end token."""

    hf_config: dict[str, object]
    model: CausalLM
    drafter: Drafter | None
    tokenizer: Tokenizer
    grammars: Grammars | None


def load_checkpoints(
    config: EngineConfig,
    progress: Callable[[str], None],
    ranks: TensorRank = SINGLE_RANK,
    tokenizer: Tokenizer | None = None,
) -> Loaded:
    """Load this rank's part of the target, the whole drafter, and the tokenizer unless given.

    Raises `CheckpointError`, and `ConfigError` for a target that cannot be split over this many ranks.
    """
    shows = ranks.rank == ranks.stage.index == 0
    hf_config = read_config(config.model)
    with show_loading(f"loading target {config.model}", progress, shows):
        model = load_model(
            config.model, config.dtype, config.device, config.batch_invariant, ranks, config.quantization
        )
    tokenizer = tokenizer or Tokenizer.load(config.model, config.skip_tokenizer_init)
    spec = config.speculative_config
    drafter: Drafter | None = None
    if spec is not None:
        path = spec.model or config.model
        with show_loading(f"loading drafter {path} ({spec.method})", progress, shows):
            drafter = load_drafter(
                spec.method,
                path,
                model,
                config.dtype,
                config.device,
                config.batch_invariant,
                spec.options,
                config.quantization,
            )
    use_huge_pages((model, drafter))
    grammars = None
    if tokenizer.eos_token_ids and not config.skip_tokenizer_init:
        grammars = Grammars(tokenizer, model.vocab_size)
    return Loaded(hf_config, model, drafter, tokenizer, grammars)
