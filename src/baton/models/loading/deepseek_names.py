"""Maps DeepSeek-V4's tensor names, as its checkpoints have them or transformers writes them, to the model's."""

from __future__ import annotations

import re

# Replaced in this order, at any place of a name.
_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^embed(_tokens)?\.", "model.embed_tokens."),
        (r"^head\.", "lm_head."),
        (r"^norm\.", "model.norm."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"^hc_head_", "model.hc_head_"),
        (r"\.hc_head_fn$", ".hc_head.fn.weight"),
        (r"\.hc_head_(base|scale)$", r".hc_head.\1"),
        (r"^layers\.", "model.layers."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.hc_(attn|ffn)_fn$", r".\1_hc.fn.weight"),
        (r"\.hc_(attn|ffn)_(base|scale)$", r".\1_hc.\2"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.wq_a\.", ".q_a_proj."),
        (r"\.wq_b\.", ".q_b_proj."),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.ape$", ".position_bias"),
        (r"\.compressor\.norm\.", ".compressor.kv_norm."),
        (r"\.wo_a\.", ".o_a_proj."),
        (r"\.wo_b\.", ".o_b_proj."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
    )
)
# A tensor that only its checkpoints have.
MARK = "attn.wq_a.weight"


def usual_name(name: str) -> str:
    name = name.removeprefix("model.")
    for pattern, usual in _RENAMED:
        name = pattern.sub(usual, name)
    return name
