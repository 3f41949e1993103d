"""The multi-token prediction (MTP) module of DeepSeek-V3 (arXiv:2412.19437, section 2.2) as a training module.

Names are those under `model.layers.{num_hidden_layers}.` of a published checkpoint, without the copies of the target's
embedding and output projection that such a checkpoint repeats there.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)

MTP = "mtp"


class LatentAttention(DeepseekV3Attention):
    """The projections of latent attention. The caller decides what attends to what, as in `heads.Attention`."""

    def __init__(self, config: DeepseekV3Config, layer: int) -> None:
        super().__init__(config, layer)
        self.head_dim = self.qk_head_dim
        self.rotary = DeepseekV3RotaryEmbedding(config)

    def project(self, x_BTE: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [B, H, T, nope + rope], their rope parts rotated, and v [B, H, T, D], in fp32."""
        sizes = [self.kv_lora_rank, self.qk_rope_head_dim]
        latent, k_rope = self.kv_a_proj_with_mqa(x_BTE)[:, None].split(sizes, -1)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTE))).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q_nope, q_rope = q.float().split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        cos, sin = self.rotary(q_rope, positions_T[None])
        q_rope, k_rope = apply_rotary_pos_emb_interleave(q_rope, k_rope.float(), cos, sin)
        k, v = self.expand_kv(self.kv_a_layernorm(latent), k_rope)
        return torch.cat([q_nope, q_rope], -1), k.float(), v.float()


class MtpModule(DeepseekV3DecoderLayer):
    """One decoder layer over `eh_proj` of [embedding of token i + 1, the target's final-norm state of position i].

    As a head (`heads.unroll`): a further draft step consumes the state after `shared_head.norm`, as vLLM recycles a
    single module; the output projection is the target's.
    """

    kind = MTP
    aux_layers: tuple[int, ...] = ()

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config, config.num_hidden_layers)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = LatentAttention(config, config.num_hidden_layers)
        self.enorm, self.hnorm = DeepseekV3RMSNorm(size, eps), DeepseekV3RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": DeepseekV3RMSNorm(size, eps)})

    @property
    def layer(self) -> "MtpModule":
        return self

    def combine(self, features: Tensor) -> Tensor:
        """Target features to the hidden state that an entry consumes: unchanged, [B, T, E]."""
        return features

    def mix(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input, residual stream) of entries, both [B, T, E]."""
        joined = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], -1))
        return self.input_layernorm(joined), joined

    def whole(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """States [B, T, E] of all entries of whole rows, each from the target's features alone."""
        positions = torch.arange(embeds.shape[1], device=embeds.device)
        rotary = self.self_attn.rotary(embeds, positions[None])
        return self.shared_head["norm"](self(self.mix(embeds, hidden)[1], position_embeddings=rotary))

    def finish(self, residual_BTE: Tensor, attended_BHTD: Tensor, mixed_BTE: Tensor) -> Tensor:
        """Everything after attention. Returns the state [B, T, E] after `shared_head.norm`."""
        residual = residual_BTE + self.self_attn.o_proj(attended_BHTD.transpose(1, 2).flatten(2))
        return self.shared_head["norm"](residual + self.mlp(self.post_attention_layernorm(residual)))

    def logits(self, hidden: Tensor, target_lm_head: Tensor) -> Tensor:
        """Logits over the target's vocabulary."""
        return F.linear(hidden, target_lm_head)
