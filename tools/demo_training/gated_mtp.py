"""The multi-token prediction module of Qwen3.5 as a training module, with the names of published checkpoints under
`mtp.`.

Its layer is one of the target's full-attention layers, whose output a gate of the same input multiplies.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from .mtp import MTP


class GatedAttention(Qwen3_5Attention):
    """The projections of gated attention. The caller decides what attends to what, as in `heads.Attention`."""

    def __init__(self, config: Qwen3_5TextConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.rotary = Qwen3_5TextRotaryEmbedding(config)

    def project(self, x_BTE: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q and k, and v, each [B, H, T, D] in fp32; KV heads are repeated to H."""
        q = self.q_norm(self._queries_and_gates(x_BTE)[0].float()).transpose(1, 2)
        k = self.k_norm(self.k_proj(x_BTE).unflatten(-1, (-1, self.head_dim)).float()).transpose(1, 2)
        v = self.v_proj(x_BTE).unflatten(-1, (-1, self.head_dim)).float().transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *self.cos_sin(q, positions_T))
        groups = self.num_key_value_groups
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def cos_sin(self, x: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """[1, T, rotated], in the dtype of `x`. A text's positions are the same in the three sections of images."""
        return self.rotary(x, positions_T.expand(3, 1, -1))

    def gate(self, x_BTE: Tensor) -> Tensor:
        """What multiplies the output of attention, [B, T, H D]."""
        return self._queries_and_gates(x_BTE)[1].flatten(2).sigmoid()

    def _queries_and_gates(self, x_BTE: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_proj(x_BTE).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)


class GatedMtpModule(nn.Module):
    """One decoder layer over `fc` of [embedding of token i + 1, the target's final-norm state of position i].

    As a head (`heads.unroll`): a further draft step consumes the state after `norm`, as vLLM recycles the module; the
    output projection is the target's.
    """

    kind = MTP
    aux_layers: tuple[int, ...] = ()

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        attending = config.layer_types.index("full_attention")
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps), Qwen3_5RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, attending)])
        self.layers[0].self_attn = GatedAttention(config, attending)
        self.norm = Qwen3_5RMSNorm(size, eps)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=config.initializer_range)

    @property
    def layer(self) -> "GatedMtpModule":
        return self

    @property
    def self_attn(self) -> GatedAttention:
        return self.layers[0].self_attn

    def combine(self, features: Tensor) -> Tensor:
        """Target features to the hidden state that an entry consumes: unchanged, [B, T, E]."""
        return features

    def mix(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input, residual stream) of entries, both [B, T, E]."""
        joined = self.fc(torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)], -1))
        return self.layers[0].input_layernorm(joined), joined

    def whole(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """States [B, T, E] of all entries of whole rows, each from the target's features alone."""
        positions = torch.arange(embeds.shape[1], device=embeds.device)
        cos_sin = self.self_attn.cos_sin(embeds, positions)
        return self.norm(self.layers[0](self.mix(embeds, hidden)[1], position_embeddings=cos_sin))

    def finish(self, residual_BTE: Tensor, attended_BHTD: Tensor, mixed_BTE: Tensor) -> Tensor:
        """Everything after attention. Returns the state [B, T, E] after `norm`."""
        layer = self.layers[0]
        gated = attended_BHTD.transpose(1, 2).flatten(2) * self.self_attn.gate(mixed_BTE)
        residual = residual_BTE + self.self_attn.o_proj(gated)
        return self.norm(residual + layer.mlp(layer.post_attention_layernorm(residual)))

    def logits(self, hidden: Tensor, target_lm_head: Tensor) -> Tensor:
        """Logits over the target's vocabulary."""
        return F.linear(hidden, target_lm_head)
