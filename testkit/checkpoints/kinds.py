"""A model with every kind of cache, which only this file knows: latents, a window, a state with two planes.

`Naive` computes it without pages, slots or steps: the whole sequence again for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.drafters.base import DraftBatch
from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, decoder_fields
from baton.models.layer_cache import (
    AttnRows,
    KVLayerSpec,
    LatentLayerSpec,
    LatentRows,
    LayerCache,
    LayerSpec,
    Recurrence,
    ScanRows,
    StateLayerSpec,
    StatePlane,
    States,
)
from baton.models.layers.decoder_layer import MLP, DecoderLayer
from baton.models.layers.layernorm import RMSNorm
from baton.models.layers.linear import Build, Linear
from baton.models.layers.rotary import rotate
from baton.models.loading.loader import load_model
from baton.models.registry import MODELS
from testkit.checkpoints.common import make_checkpoint

MODEL_TYPE = "every_kind"
REGISTERED = (MODELS, MODEL_TYPE, f"{__name__}:EveryKind")
WINDOW = 9
LATENT = 24
CHANNELS, TAPS, STATE_HEADS = 24, 3, 4


class EveryKind(CausalLM):
    """Alternating layers of latents, of a window and of a state."""

    @classmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        fields = decoder_fields(raw, max_position_default=512)
        return ModelConfig(**{**fields, "windows": (WINDOW,) * fields["num_layers"]})

    def kv_layer(self, config: ModelConfig, layer_id: int) -> LayerSpec:
        if layer_id % 3 == 0:
            return LatentLayerSpec(LATENT, config.head_dim)
        if layer_id % 3 == 1:
            return KVLayerSpec(config.num_kv_heads, config.head_dim, WINDOW)
        conv = StatePlane("conv", CHANNELS, TAPS - 1, "channels", "bfloat16")
        return StateLayerSpec((conv, StatePlane("ssm", STATE_HEADS, CHANNELS // STATE_HEADS, dtype="float32")))

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        return (LatentLayer, DecoderLayer, StateLayer)[layer_id % 3](config, layer_id, build)


class LatentLayer(nn.Module):
    """Absorbed latent attention and an MLP."""

    def __init__(self, config: ModelConfig, layer_id: int, build: Build) -> None:
        super().__init__()
        self._layer_id, self._heads, self._rope = layer_id, config.num_heads, config.head_dim
        size = config.hidden_size
        self.norm = RMSNorm(size, config.rms_eps, build)
        self.q_proj = Linear(size, self._heads * (LATENT + self._rope), build)
        self.kv_proj = Linear(size, LATENT + self._rope, build)
        self.o_proj = Linear(self._heads * LATENT, size, build)
        self.mlp_norm = RMSNorm(size, config.rms_eps, build)
        self.mlp = MLP(size, config.intermediate_size, False, build)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        normed, split = self.norm(x), [LATENT, self._rope]
        q, q_rope = torch.split(self.q_proj(normed).view(len(x), self._heads, -1), split, dim=-1)
        latent, rope = torch.split(self.kv_proj(normed), split, dim=-1)
        q = torch.cat((q, rotate(q_rope.contiguous(), self._heads, *cos_sin)), dim=-1)
        rope = rotate(rope[:, None].contiguous(), 1, *cos_sin)[:, 0]
        out = cache.attend_latent(self._layer_id, LatentRows(q, latent, rope, sum(split) ** -0.5))
        x = x + self.o_proj(out.reshape(len(x), -1))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class StateLayer(nn.Module):
    """A short convolution and a decaying sum."""

    def __init__(self, config: ModelConfig, layer_id: int, build: Build) -> None:
        super().__init__()
        self._layer_id = layer_id
        self.norm = RMSNorm(config.hidden_size, config.rms_eps, build)
        self.in_proj = Linear(config.hidden_size, CHANNELS + STATE_HEADS, build)
        self.conv = build.empty(CHANNELS, TAPS)
        self.out_proj = Linear(CHANNELS, config.hidden_size, build)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        inputs, decay = torch.split(self.in_proj(self.norm(x)), [CHANNELS, STATE_HEADS], dim=-1)

        def recurrence(states: States, rows: ScanRows) -> tuple[Tensor, States]:
            out, kept = torch.empty(len(x), CHANNELS), []
            for r, (conv, ssm) in enumerate(zip(*states, strict=True)):
                for t in range(rows.query_start[r], rows.query_start[r + 1]):
                    taps = torch.cat((conv, inputs[t][:, None].to(conv.dtype)), dim=1)
                    mixed = F.silu((taps.float() * self.conv).sum(dim=1))
                    ssm = torch.sigmoid(decay[t].float())[:, None] * ssm + mixed.view(STATE_HEADS, -1)
                    conv, out[t] = taps[:, 1:], ssm.flatten()
                    if t in rows.kept:
                        kept.append((conv, ssm))
            return out, tuple(torch.stack(parts) for parts in zip(*kept, strict=True))

        return x + self.out_proj(cache.scan(self._layer_id, recurrence).to(x.dtype))  # type: ignore[no-any-return]


class WholeSequence:
    """The cache of a forward over all tokens of one sequence: nothing is kept."""

    def __init__(self, model: CausalLM) -> None:
        self._specs = model.kv_layers

    def __call__(self, layer_id: int, rows: AttnRows) -> Tensor:
        spec = self._specs[layer_id]
        assert isinstance(spec, KVLayerSpec)
        assert rows.sinks_H is None
        assert rows.k_TGD is not None
        assert rows.v_TGD is not None
        group = rows.q_THD.shape[1] // rows.k_TGD.shape[1]
        k, v = (each.repeat_interleave(group, dim=1) for each in (rows.k_TGD, rows.v_TGD))
        return _softmax(torch.einsum("thd,shd->hts", rows.q_THD, k) * rows.scale, v, spec.window)

    def attend_latent(self, layer_id: int, rows: LatentRows) -> Tensor:
        keys = torch.cat((rows.latent_TC, rows.rope_TR), dim=-1)
        values = rows.latent_TC[:, None].expand(-1, rows.q_THD.shape[1], -1)
        return _softmax(torch.einsum("thd,sd->hts", rows.q_THD, keys) * rows.scale, values, None)

    def scan(self, layer_id: int, recurrence: Recurrence) -> Tensor:
        spec = self._specs[layer_id]
        assert isinstance(spec, StateLayerSpec)
        states = tuple(
            torch.zeros(1, p.num_heads, p.head_dim, dtype=getattr(torch, p.dtype or "float32")) for p in spec.planes
        )
        last = np.array([self.num_rows - 1])
        return recurrence(states, ScanRows(np.array([0, self.num_rows], dtype=np.int32), last))[0]

    num_rows = 0


def _softmax(scores_HTS: Tensor, values_SHD: Tensor, window: int | None) -> Tensor:
    size = scores_HTS.shape[-1]
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    if window is not None:
        visible &= ~torch.ones(size, size, dtype=torch.bool).tril(-window)
    weights = scores_HTS.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights, values_SHD)


def checkpoint(path: Path) -> Path:
    """A random checkpoint with two layers of each kind. The model must be registered."""
    return make_checkpoint(path, MODEL_TYPE, num_hidden_layers=6, max_position_embeddings=512)


class Naive:
    """Greedy tokens of the model without an engine."""

    def __init__(self, path: Path) -> None:
        self._model = load_model(path, "float32")
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: Sequence[int], num: int) -> list[int]:
        """The `num` most likely tokens after a prompt."""
        known = self._known.setdefault(tuple(prompt), [])
        cache = WholeSequence(self._model)
        while len(known) < num:
            ids = torch.tensor([*prompt, *known])
            cache.num_rows = len(ids)
            with torch.inference_mode():
                hidden, _ = self._model(ids, torch.arange(len(ids)), cache)
                known.append(int(self._model.compute_logits(hidden[-1:]).argmax()))
        return known[:num]


class Guesses:
    """A drafter without layers that knows the text, and gets a third of it wrong."""

    kv_layers: Sequence[LayerSpec] = ()
    kv_modules: Sequence[int | None] = ()
    aux_layers: tuple[int, ...] = ()
    needs_contexts = True
    texts: list[list[int]] = []  # noqa: RUF012 - what a test puts here

    @classmethod
    def load(cls, path: str, target: CausalLM, build: Build) -> Guesses:
        return cls()

    def combine(self, hidden_TE: Tensor, aux: list[Tensor]) -> None:
        return None

    def extend(self, batch: DraftBatch) -> None:
        return None

    def draft(self, batch: DraftBatch, extended: None) -> list[list[int]]:
        drafts = []
        for context, num in zip(batch.contexts, batch.num_drafts.tolist(), strict=True):
            text: list[Any] = next((t for t in self.texts if t[: len(context)] == context.tolist()), [])
            places = range(len(context), min(len(context) + num, len(text)))
            drafts.append([text[i] if (i * i + i // 4) % 3 else (text[i] + 1) % 250 for i in places])
        return drafts
