"""The two EAGLE heads as training modules, with parameter names as vLLM loads them, and the unrolled training pass of
all heads.

Entry i of a head consumes the target's feature of position i and the token of position i + 1, and predicts the token of
position i + 2. A head shares the target's token embedding; EAGLE-1 also shares its output projection.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedConfig

from .gated_mtp import GatedMtpModule
from .mtp import MtpModule

AUX_LAYERS = (1, 2, 3)  # of the demo's four layers
EAGLE, EAGLE3 = "eagle", "eagle3"


def head_config(target: PreTrainedConfig, *, layers: int, heads: int, intermediate_size: int) -> LlamaConfig:
    """The config of a Llama-type head for this target, with 2 KV heads; all heads have 32 numbers."""
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=target.pad_token_id,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
    )


def stored_fields(config: LlamaConfig) -> dict[str, object]:
    """What the config.json of every head has."""
    return {
        "attention_bias": False,
        "bos_token_id": config.bos_token_id,
        "dtype": "bfloat16",
        "eos_token_id": config.eos_token_id,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": float(config.rope_parameters["rope_theta"]),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
    }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    """The projections of grouped-query attention. The caller decides what attends to what."""

    def __init__(self, config: LlamaConfig, input_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.theta = float(config.rope_parameters["rope_theta"])
        self.q_proj = nn.Linear(input_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def _rotate(self, x_BHTD: Tensor, positions_T: Tensor) -> Tensor:
        half = self.head_dim // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float32, device=x_BHTD.device) / half)
        angles = positions_T.float()[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        left, right = x_BHTD.float().split(half, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def project(self, x_BTE: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q and k, and v, each [B, H, T, D] in fp32; KV heads are repeated to H."""
        batch, length, _ = x_BTE.shape

        def split(x: Tensor, heads: int) -> Tensor:
            return x.view(batch, length, heads, self.head_dim).transpose(1, 2)

        q = self._rotate(split(self.q_proj(x_BTE), self.heads), positions_T)
        k = self._rotate(split(self.k_proj(x_BTE), self.kv_heads), positions_T)
        v = split(self.v_proj(x_BTE), self.kv_heads).float()
        groups = self.heads // self.kv_heads
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """A head's decoder layer. EAGLE-3 normalizes and joins embedding and hidden state; EAGLE-1 has no norm."""

    def __init__(self, config: LlamaConfig, kind: str) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        if kind == EAGLE3:
            self.input_layernorm = RMSNorm(size, eps)
            self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 2 * size if kind == EAGLE3 else size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)

    def finish(self, residual_BTE: Tensor, attended_BHTD: Tensor, mixed_BTE: Tensor) -> Tensor:
        """Everything after attention, whose input was `mixed_BTE`. Returns the residual stream [B, T, E]."""
        residual = residual_BTE + self.self_attn.o_proj(attended_BHTD.transpose(1, 2).flatten(2))
        return residual + self.mlp(self.post_attention_layernorm(residual))


class EagleHead(nn.Module):
    """EAGLE-1: `fc` joins [embedding, feature]; the feature is the target's final-norm hidden state."""

    kind = EAGLE
    aux_layers: tuple[int, ...] = ()

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DraftLayer(config, EAGLE)])

    @property
    def layer(self) -> DraftLayer:
        return self.layers[0]

    def combine(self, features: Tensor) -> Tensor:
        """Target features to the hidden state that an entry consumes: unchanged, [B, T, E]."""
        return features

    def mix(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input, residual stream) of entries, both [B, T, E]."""
        joined = self.fc(torch.cat([embeds, hidden], -1))
        return joined, joined

    def logits(self, hidden: Tensor, target_lm_head: Tensor) -> Tensor:
        """Logits over the target's vocabulary."""
        return F.linear(hidden, target_lm_head)


class Eagle3Head(nn.Module):
    """EAGLE-3: `fc` joins the residual streams that enter `aux_layers`, once; own norm, own output over a reduced
    vocabulary.
    """

    kind = EAGLE3

    def __init__(self, config: LlamaConfig, draft_ids: Tensor, aux_layers: tuple[int, ...] = AUX_LAYERS) -> None:
        super().__init__()
        size = config.hidden_size
        self.aux_layers = aux_layers
        self.fc = nn.Linear(len(aux_layers) * size, size, bias=False)
        self.midlayer = DraftLayer(config, EAGLE3)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(draft_ids), bias=False)
        selected = torch.zeros(config.vocab_size, dtype=torch.bool)
        selected[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer("t2d", selected)

    @property
    def layer(self) -> DraftLayer:
        return self.midlayer

    def combine(self, features: Tensor) -> Tensor:
        """Target features [B, T, AE] to the hidden state that an entry consumes, [B, T, E]."""
        return self.fc(features)

    def mix(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(attention input [B, T, 2E], residual stream [B, T, E]) of entries."""
        return torch.cat([self.layer.input_layernorm(embeds), self.layer.hidden_norm(hidden)], -1), hidden

    def logits(self, hidden: Tensor, target_lm_head: Tensor) -> Tensor:
        """Logits over the draft vocabulary; draft id d is target id d + d2t[d]."""
        return self.lm_head(self.norm(hidden))


Head = EagleHead | Eagle3Head | MtpModule | GatedMtpModule


def draft_ids(head: Head, vocab_size: int) -> Tensor:
    """Target ids of the head's logits, int64 [draft vocabulary]."""
    if isinstance(head, Eagle3Head):
        return torch.arange(len(head.d2t), device=head.d2t.device) + head.d2t
    return torch.arange(vocab_size, device=next(head.parameters()).device)


@torch.no_grad()
def start_from_target(head: Head, target: nn.Module) -> None:
    """Initialise from the target's last layer, final norm and output rows.

    The joint projections begin as sums: EAGLE-3's `fc` passes the last auxiliary state, and its attention reads the
    embedding weakly; EAGLE-1's `fc` adds embedding and feature. A target layer of another type than the head's gives
    only its norms.
    """
    size = target.config.hidden_size
    source, layer = target.model.layers[-1], head.layer
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    if target.config.model_type == "llama":
        layer.mlp.load_state_dict(source.mlp.state_dict())
        layer.self_attn.o_proj.weight.copy_(source.self_attn.o_proj.weight)
        for name in ("q_proj", "k_proj", "v_proj"):
            ours, theirs = getattr(layer.self_attn, name).weight, getattr(source.self_attn, name).weight
            ours[:, -size:].copy_(theirs)
            if ours.shape[1] > size:
                ours[:, :size].mul_(0.5)
    eye = torch.eye(size, device=target.model.norm.weight.device)
    if isinstance(head, Eagle3Head):
        layer.hidden_norm.weight.copy_(source.input_layernorm.weight)
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(target.lm_head.weight[draft_ids(head, target.config.vocab_size)])
        head.fc.weight.mul_(0.2)
        head.fc.weight[:, -size:] += eye
    else:
        head.fc.weight.mul_(0.2)
        head.fc.weight[:, :size] += eye
        head.fc.weight[:, size:] += 0.5 * eye


@dataclass(slots=True)
class TargetView:
    """The target's outputs that a head may use, for token rows [B, T]."""

    embeds: Tensor  # [B, T, E]
    features: Tensor  # [B, T, E], or [B, T, AE] of A auxiliary layers
    logits: Tensor  # [B, T, V]


@torch.no_grad()
def look(target: nn.Module, ids_BT: Tensor, aux_layers: tuple[int, ...]) -> TargetView:
    """One target forward without gradients. `hidden_states[l]` of `transformers` is the input of layer l.

    The features are the inputs of `aux_layers` side by side, or without any the final-norm state.
    """
    out = target(input_ids=ids_BT, output_hidden_states=True, use_cache=False)
    states = out.hidden_states
    features = torch.cat([states[layer] for layer in aux_layers], -1) if aux_layers else states[-1]
    return TargetView(target.get_input_embeddings()(ids_BT), features.float(), out.logits.float())


def _shift(x: Tensor, by: int, dim: int) -> Tensor:
    return x if by == 0 else torch.roll(x, by, dim)


def unroll(head: Head, next_embeds: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """Training-time test: the residual streams of `steps` chained draft steps at all positions at once.

    At step s (from 0) the entry of position p consumes the output of step s - 1 at p - 1. It attends, as in decoding,
    to the true-feature entries up to p - s, then to its own chain: the entry of step r at p - (s - r), r = 1..s. Rows
    p < s are meaningless.

    Args:
        next_embeds: [B, T, E], embedding of the token after each position.
        features: [B, T, F], target features of each position.

    Returns:
        One [B, T, E] per step; row p of each predicts the token of position p + 2.
    """
    length = next_embeds.shape[1]
    positions = torch.arange(length, device=next_embeds.device)
    attention = head.layer.self_attn
    distance = positions[:, None] - positions
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    hidden = head.combine(features)
    for step in range(steps):
        if step:
            hidden = _shift(outputs[-1], 1, 1)
        mixed, residual = head.mix(next_embeds, hidden)
        q, k, v = attention.project(mixed, positions)
        keys.append(k)
        values.append(v)
        q = q * attention.head_dim**-0.5
        scores = (q @ keys[0].transpose(-1, -2)).masked_fill(distance < step, float("-inf"))
        chain_keys = [_shift(keys[r], step - r, 2) for r in range(1, step + 1)]
        chain_values = [_shift(values[r], step - r, 2) for r in range(1, step + 1)]
        chain = [(q * key).sum(-1, keepdim=True) for key in chain_keys]
        weights = torch.cat([scores.float(), *[c.float() for c in chain]], -1).softmax(-1)
        attended = (weights[..., :length] @ values[0]).float()
        for r, value in enumerate(chain_values):
            attended = attended + weights[..., length + r, None] * value
        outputs.append(head.layer.finish(residual, attended, mixed))
    return outputs
