"""Models whose checkpoints name or join tensors in other ways than Llama's, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_against_transformers import assert_logits_match

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")
_TINY: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    ("Mixtral", {"num_local_experts": 3, "sliding_window": 19, "head_dim": 16, "tie_word_embeddings": True}),
    ("Phi3", {}),
    ("Phi3", {"hidden_size": 64, "sliding_window": 19, "partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
]


@pytest.mark.parametrize(("name", "overrides"), CASES)
def test_logits_match(name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    config = getattr(transformers, f"{name}Config")(**{**_TINY, **overrides})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for tensor_name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            is_norm = "norm" in tensor_name
            weight.copy_(
                1 + 0.1 * noise if is_norm else noise * (0.3 if "embed" in tensor_name else weight.shape[-1] ** -0.5)
            )
    model.save_pretrained(tmp_path)
    best = assert_logits_match(tmp_path).topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.05
