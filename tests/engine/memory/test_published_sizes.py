"""What a request of published models keeps, by hand: the rows of the table in docs/operations.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.memory.kv_memory import model_groups
from baton.models.layers.linear import Build
from baton.models.registry import model_class

MIB = 1 << 20
LENGTH = 4096
# Experts and vocabularies, of which nothing is kept, are left small.
QWEN35 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 8,
    "hidden_size": 4096,
    "intermediate_size": 8,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
KIMI = {
    "model_type": "kimi_linear",
    "vocab_size": 8,
    "hidden_size": 2304,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_experts": 1,
    "num_experts_per_token": 1,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [n for n in range(1, 28) if n not in (4, 8, 12, 16, 20, 24, 27)],
    },
}
V32 = {
    "model_type": "deepseek_v32",
    "vocab_size": 8,
    "hidden_size": 64,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 61,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
V4 = {
    "model_type": "deepseek_v4",
    "vocab_size": 8,
    "hidden_size": 64,
    "moe_intermediate_size": 8,
    "n_routed_experts": 1,
    "num_experts_per_tok": 1,
}
# Four windowed layers of 512, then a full one; the last 20 share.
GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 8,
    "vocab_size_per_layer_input": 8,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_kv_shared_layers": 20,
}


def kept(raw: dict[str, Any], num_tokens: int) -> int:
    """The bytes that a request of so many tokens keeps in bfloat16: what a handoff of its prompt carries."""
    cls = model_class(raw["model_type"])
    model = cls(cls.parse_config(raw), Build(torch.bfloat16, torch.device("meta")))
    return sum(
        sum(plane.token_bytes for plane in group.planes) * len(group.rules.wanted(num_tokens, 0)) * group.num_layers
        for group in model_groups(EngineConfig("unused"), model, None)
    )


@pytest.mark.parametrize(
    ("raw", "per_token", "fixed"),
    [
        # 8 layers with K and V of 4 heads; 24 convolutions of 8,192 channels and matrices of 32 heads in float32.
        (QWEN35, 8 * 2 * 4 * 256 * 2, 24 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)),
        # 7 layers of latents; 20 convolutions of 3 x 4,096 channels and matrices of 32 heads in float32.
        (KIMI, 7 * (512 + 64) * 2, 20 * (3 * 4096 * 3 * 2 + 32 * 128 * 128 * 4)),
        # 61 layers of latents with an index key.
        (V32, 61 * (512 + 64 + 128) * 2, 0),
        # 3 full layers with one head of 512; 12 windowed ones with one of 256, and an entry more for the assistant.
        (GEMMA4, 3 * 2 * 512 * 2, 512 * 12 * 2 * 256 * 2),
        # 20 layers with an entry and its index key of 4 tokens, 23 with one of 128; what windows of 128 keep, and what
        # the next entry is made from: values and gates, with overlap twice.
        (
            V4,
            20 * (512 + 128) * 2 // 4 + 23 * 512 * 2 // 128,
            43 * 127 * 512 * 2 + 20 * 7 * 2 * 2 * (512 + 128) * 2 + 23 * 127 * 2 * 512 * 2,
        ),
    ],
    ids=["Qwen3.5", "Kimi Linear", "DeepSeek-V3.2", "Gemma 4", "DeepSeek-V4"],
)
def test_a_request_keeps_what_its_layers_need(raw: dict[str, Any], per_token: int, fixed: int) -> None:
    assert kept(raw, LENGTH) == LENGTH * per_token + fixed
    assert kept(raw, 4 * LENGTH) == 4 * LENGTH * per_token + fixed
