"""A DFlash head (Z Lab, 2026) as a training module, with the parameter names of published drafters.

Its context is `fc` of the target's residual streams, of which each layer takes keys and values. A block is the last
known token and a mask token for each draft: its rows attend to the context before the block and to one another, and row
r predicts the token at its own place. Embedding and output projection are the target's.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel

from .heads import MLP, RMSNorm, head_config, look, stored_fields
from .vocabulary import PAD_ID, write_json, write_tensors

DFLASH = "dflash"
BLOCK = 8  # the last known token and up to seven drafts
MASK_ID = PAD_ID  # in no text
AUX_LAYERS = (1, 3)
ANCHORS = 12  # blocks of a row in one training step
STEP_DECAY = 0.8  # a later draft counts only if the earlier ones were accepted
HARD_WEIGHT = 0.5  # share of the target's argmax in the loss; the rest is its distribution


def block_config(target: LlamaConfig) -> LlamaConfig:
    """The config of a head for this target: two layers, 4 query and 2 KV heads of 32."""
    return head_config(target, layers=2, heads=4, intermediate_size=64)


class BlockAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.head_dim, float(config.rope_parameters["rope_theta"])
        self.groups = config.num_attention_heads // config.num_key_value_heads
        size, kv_size = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj, self.v_proj = nn.Linear(size, kv_size, bias=False), nn.Linear(size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def _rotate(self, x_BTHD: Tensor, positions_BT: Tensor) -> Tensor:
        half = self.head_dim // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float32, device=x_BTHD.device) / half)
        angles = positions_BT.float()[..., None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        left, right = x_BTHD.split(half, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).transpose(1, 2)

    def queries(self, x_BTE: Tensor, positions_BT: Tensor) -> Tensor:
        """Normed and rotated, [B, H, T, D] in fp32."""
        q = self.q_norm(self.q_proj(x_BTE).unflatten(-1, (-1, self.head_dim)))
        return self._rotate(q, positions_BT) * self.head_dim**-0.5

    def keys_values(self, x_BTE: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H, T, D] in fp32; KV heads are repeated to H."""
        k = self.k_norm(self.k_proj(x_BTE).unflatten(-1, (-1, self.head_dim)))
        v = self.v_proj(x_BTE).unflatten(-1, (-1, self.head_dim)).float().transpose(1, 2)
        return self._rotate(k, positions_BT).repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)


class BlockLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: Tensor, starts_BA: Tensor, lengths_BA: Tensor) -> Tensor:
        """`x` [B, A, R, E]: A blocks of R rows, of which `lengths_BA` exist, the first at position `starts_BA`.
        `context`: [B, T, E], of which a block sees the positions before it.
        """
        (batch, blocks, rows, _), attention = x.shape, self.self_attn
        normed = self.input_layernorm(x).flatten(1, 2)
        places = torch.arange(rows, device=x.device)
        positions = (starts_BA[..., None] + places).flatten(1)
        known = torch.arange(context.shape[1], device=x.device).expand(batch, -1)
        q = attention.queries(normed, positions).unflatten(2, (blocks, rows))
        k, v = (t.unflatten(2, (blocks, rows)) for t in attention.keys_values(normed, positions))
        context_k, context_v = attention.keys_values(context, known)
        before = q.flatten(2, 3) @ context_k.transpose(-1, -2)
        before = before.unflatten(2, (blocks, rows))
        unseen = known[:, None] >= starts_BA[..., None]
        before = before.masked_fill(unseen[:, None, :, None], float("-inf"))
        within = q @ k.transpose(-1, -2)
        within = within.masked_fill((places >= lengths_BA[..., None])[:, None, :, None], float("-inf"))
        weights = torch.cat([before, within], -1).float().softmax(-1)
        old, own = weights.split([context.shape[1], rows], -1)
        attended = (old.flatten(2, 3) @ context_v).unflatten(2, (blocks, rows)) + own @ v
        x = x + attention.o_proj(attended.permute(0, 2, 3, 1, 4).flatten(3))
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockHead(nn.Module):
    kind = DFLASH

    def __init__(self, config: LlamaConfig, aux_layers: tuple[int, ...] = AUX_LAYERS) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.aux_layers = config, aux_layers
        self.fc = nn.Linear(len(aux_layers) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, eps)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self, embed: nn.Module, features: Tensor, anchors_BA: Tensor, starts_BA: Tensor, lengths_BA: Tensor
    ) -> Tensor:
        """States [B, A, R, E] of blocks that begin with the token ids `anchors_BA`, R the longest of `lengths_BA`."""
        rows = int(lengths_BA.max())
        ids = torch.full((*anchors_BA.shape, rows), MASK_ID, device=anchors_BA.device)
        ids[..., 0] = anchors_BA
        x, context = embed(ids), self.hidden_norm(self.fc(features))
        for layer in self.layers:
            x = layer(x, context, starts_BA, lengths_BA)
        return self.norm(x)


def block_loss(head: BlockHead, target: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """Loss of blocks of random places and lengths against the target's next-token distributions: a scalar, nats."""
    device, (batch, length) = ids_BT.device, ids_BT.shape
    view = look(target, ids_BT, head.aux_layers)
    starts = torch.randint(1, length - BLOCK + 1, (batch, ANCHORS), device=device)
    lengths = torch.randint(2, BLOCK + 1, (batch, ANCHORS), device=device)
    lengths[:, ::2] = BLOCK
    states = head(target.get_input_embeddings(), view.features, ids_BT.gather(1, starts), starts, lengths)
    rows = torch.arange(1, BLOCK, device=device)
    # Row r predicts the token at its place, and so does the target one position before.
    before = (starts[..., None] + rows - 1).flatten(1)
    wanted = view.logits.gather(1, before[..., None].expand(-1, -1, view.logits.shape[-1]))
    logp = F.linear(states[:, :, 1:], target.lm_head.weight).float().log_softmax(-1).flatten(1, 2)
    exact = F.nll_loss(logp.flatten(0, 1), wanted.argmax(-1).flatten(), reduction="none").view(before.shape)
    distilled = -(wanted.softmax(-1) * logp).sum(-1)
    losses = (HARD_WEIGHT * exact + (1 - HARD_WEIGHT) * distilled).view(batch, ANCHORS, -1)
    weights = (rows < lengths[..., None]) * STEP_DECAY ** (rows - 1)
    return (losses * weights).sum() / weights.sum()


@torch.inference_mode()
def block_drafts(
    head: BlockHead, target: PreTrainedModel, ids: Sequence[int], features: Tensor, count: int
) -> list[int]:
    """Greedy drafts for the tokens after `ids`.

    `features`: [1, len(ids) - 1, F], of all `ids` but the last.
    """
    anchor, start = torch.tensor([[ids[-1]]]), torch.tensor([[len(ids) - 1]])
    states = head(target.get_input_embeddings(), features, anchor, start, torch.tensor([[count + 1]]))
    return F.linear(states[0, 0, 1:], target.lm_head.weight).argmax(-1).tolist()


@torch.inference_mode()
def block_agreement(head: BlockHead, target: PreTrainedModel, windows: Tensor, count: int) -> tuple[float, ...]:
    """Per draft, how often it equals the target's argmax on given text, int64 [n, T], from every fourth position."""
    equal = torch.zeros(count)
    seen, steps = 0, torch.arange(count)
    for rows in windows.split(8):
        view = look(target, rows, head.aux_layers)
        starts = torch.arange(1, rows.shape[1] - count, 4).expand(len(rows), -1)
        lengths = torch.full_like(starts, count + 1)
        states = head(target.get_input_embeddings(), view.features, rows.gather(1, starts), starts, lengths)
        drafts = F.linear(states[:, :, 1:], target.lm_head.weight).argmax(-1)
        wanted = view.logits.argmax(-1)[torch.arange(len(rows))[:, None, None], starts[..., None] + steps]
        equal += (drafts == wanted).sum((0, 1))
        seen += starts.numel()
    return tuple((equal / seen).tolist())


def save_block_head(head: BlockHead, directory: Path) -> None:
    """Write config.json and model.safetensors, in bf16."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.to("cpu", torch.bfloat16).contiguous() for name, t in head.state_dict().items()}
    write_tensors(directory / "model.safetensors", tensors)
    written = stored_fields(head.config) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [layer - 1 for layer in head.aux_layers]},
        "model_type": "qwen3",
        "num_hidden_layers": head.config.num_hidden_layers,
    }
    write_json(directory / "config.json", dict(sorted(written.items())))


def load_block_head(directory: Path, target: LlamaConfig) -> BlockHead:
    own = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    head = BlockHead(block_config(target), tuple(layer + 1 for layer in own["dflash_config"]["target_layer_ids"]))
    head.load_state_dict(load_file(directory / "model.safetensors"))
    return head.eval()
