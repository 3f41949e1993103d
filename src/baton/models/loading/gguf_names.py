"""Tensor names in GGUF files and in Hugging Face's checkpoints. Source: gguf's `tensor_mapping`."""

from __future__ import annotations

import re

# The file in a checkpoint directory.
GGUF_FILE = "model.gguf"
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_OUTER = {EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
_LAYER = {
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_v": "self_attn.v_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.up_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
}
_OF_LAYER = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")


def model_name(stored: str) -> str | None:
    """The Hugging Face name, with `{}` for an expert's number if the tensor has all of a layer. None for unknown
    tensors.
    """
    match = _OF_LAYER.fullmatch(stored)
    if match is None:
        return _OUTER.get(stored)
    part = _LAYER.get(match[2])
    return None if part is None else f"model.layers.{match[1]}.{part}.{match[3]}"
