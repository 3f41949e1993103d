"""Gemma 4's assistant (Google, 2026): a few Gemma 4 layers without keys and values, as in transformers
(docs/drafters.md).

Each layer attends to the target's last layer of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.drafters.base import DraftBatch, TargetRead
from baton.drafters.chain import IntArray
from baton.errors import CheckpointError
from baton.models.architectures.gemma4 import parse_gemma4, rounded
from baton.models.base import CausalLM, rotaries
from baton.models.config import RawConfig, get_bool, get_int
from baton.models.families.gemma4 import LOOKBACK, Gemma4Config, Gemma4Layer
from baton.models.layer_cache import LayerCache, LayerSpec
from baton.models.layers.layernorm import make_norm
from baton.models.layers.linear import Build, Linear
from baton.models.layers.rotary import rotate
from baton.models.loading.config_json import read_config
from baton.models.loading.filling import fill_module
from baton.models.loading.stored import stored_tensors

_KIND = "gemma4_assistant"
_HEAD = "lm_head.weight"


class QueryAttention(nn.Module):
    """[T, E] -> [T, E], over keys and values of the target's layer `source`. Each tensor rank attends with its own key
    heads, on the stage of that layer, and gathers the other ranks' heads.
    """

    def __init__(self, config: Gemma4Config, layer_id: int, source: int, target: CausalLM, build: Build) -> None:
        super().__init__()
        spec, self._ranks = config.spec(layer_id), target.build.ranks
        heads = self._ranks.share(config.num_heads, "the assistant's attention heads")
        window = None if spec.window is None else spec.window + LOOKBACK
        self.read = TargetRead(source, heads.length, spec.head_dim, window)
        self._stage = self._ranks.stage.of_layer(source, target.config.num_layers)
        share = heads.times(spec.head_dim)
        self.q_proj = Linear(config.hidden_size, share.length, build, config.qkv_bias, share)
        self.q_norm = make_norm(config, spec.head_dim, build)
        self.o_proj = Linear(share.total, config.hidden_size, build, config.o_bias)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        read, stage = self.read, self._ranks.stage
        q = rotate(self.q_norm(self.q_proj(x).view(len(x), read.num_heads, read.head_dim)), read.num_heads, *cos_sin)
        if self._stage == stage.index:
            own = cache.attend_kept(read.layer, q, 1.0, read.window)
        else:
            stage.send(q, self._stage)
            own = torch.empty_like(q)
            stage.receive(own, self._stage)
        return self.o_proj(torch.cat(tuple(self._ranks.gather(own.contiguous())), dim=1).flatten(1))  # type: ignore[no-any-return]


class Clusters(nn.Module):
    """Allows only the tokens of the `top_k` clusters with the best scores; `token_ordering` int64 [V] lists the tokens
    cluster by cluster."""

    def __init__(self, raw: RawConfig, config: Gemma4Config, build: Build) -> None:
        super().__init__()
        num, self._top_k = get_int(raw, "num_centroids", 2048), get_int(raw, "centroid_intermediate_top_k", 32)
        if config.vocab_size % num or self._top_k > num:
            what = f"{num} clusters, of which {self._top_k} are chosen,"
            raise CheckpointError(f"drafter: config.json: {what} do not fit {config.vocab_size} tokens")
        self.centroids = Linear(config.hidden_size, num, build)
        self.register_buffer("token_ordering", torch.empty(config.vocab_size, dtype=torch.int64, device=build.device))

    def check_order(self) -> None:
        """Raises `CheckpointError`."""
        order = self.get_buffer("token_ordering")
        if not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
            raise CheckpointError("drafter: tensor masked_embedding.token_ordering does not list each token once")

    def masked(self, logits_TV: Tensor, states_TE: Tensor) -> Tensor:
        """The logits, with values below the least allowed one for all other tokens."""
        best = self.centroids(states_TE).topk(self._top_k, dim=-1).indices
        by_cluster = self.get_buffer("token_ordering").view(self.centroids.out_features, -1)
        tokens = by_cluster[best].flatten(1)
        allowed = logits_TV.gather(1, tokens)
        least = allowed.min(dim=1, keepdim=True).values - 1.0
        return least.expand_as(logits_TV).scatter(1, tokens, allowed)


class Assistant(nn.Module):
    """A `TargetReader` without own layers in the KV cache."""

    kv_layers: tuple[LayerSpec, ...] = ()
    kv_modules: tuple[int | None, ...] = ()
    aux_layers: tuple[int, ...] = ()
    needs_contexts = False

    def __init__(self, config: Gemma4Config, raw: RawConfig, target: CausalLM, build: Build) -> None:
        super().__init__()
        self._device, size = build.device, config.hidden_size
        # A function, since a parameter would have to be loaded.
        self._embed = partial(F.embedding, weight=target.model.embed_tokens.weight)
        self._scale = rounded(target.hidden_size**0.5, target.build)
        self.pre_projection = Linear(2 * target.hidden_size, size, build)
        self.layers = nn.ModuleList(
            Gemma4Layer(config, layer, build, QueryAttention(config, layer, source, target, build))
            for layer, source in enumerate(_layers_of(config, target))
        )
        self.target_reads = tuple(cast(QueryAttention, layer.self_attn).read for layer in self.layers)
        self.norm = make_norm(config, size, build)
        self.post_projection = Linear(size, target.hidden_size, build)
        self.lm_head = Linear(size, config.vocab_size, build)
        self.masked_embedding = Clusters(raw, config, build) if get_bool(raw, "use_ordered_embeddings") else None
        length = max(config.max_position, target.max_position) + 1
        self._rotaries, self._rotary_of = rotaries(replace(config, max_position=length), build)

    @classmethod
    def load(cls, path: str, target: CausalLM, build: Build) -> Assistant:
        """Raises `CheckpointError` for another model or one for another target."""
        raw = read_config(path)
        config = _config(raw, target)
        drafter = cls(config, raw, target, build)
        # The assistant's own embedding is its head if none is stored; tokens have the target's.
        embedding = None if _HEAD in stored_tensors(path) else _HEAD

        def rename(name: str) -> str | None:
            if name == "model.embed_tokens.weight":
                return embedding
            return None if name.endswith("rotary_emb.inv_freq") else name.removeprefix("model.")

        fill_module(drafter, path, rename)
        if drafter.masked_embedding is not None:
            drafter.masked_embedding.check_order()
        return drafter.eval()

    def combine(self, hidden_TE: Tensor, aux: list[Tensor]) -> Tensor:
        return hidden_TE

    def extend(self, batch: DraftBatch) -> None:
        """Nothing: an assistant has no KV."""

    def draft(self, batch: DraftBatch, extended: None) -> list[list[int]]:
        assert batch.features_TF is not None
        assert batch.target_pages is not None
        drafts: list[list[int]] = [[] for _ in batch.num_drafts]
        going = np.flatnonzero(batch.num_drafts)
        last = batch.query_start[1:][going].astype(np.int64) - 1
        rows, ids = batch.positions[last], batch.next_ids[last]
        states_RE = batch.features_TF[self._tensor(last)]
        for step in range(int(batch.num_drafts.max())):
            # The token after the last row has the next position.
            cache = batch.target_pages.bind(going, rows, np.arange(len(going) + 1, dtype=np.int32))
            logits_RV, states_RE = self(self._tensor(ids), states_RE, self._tensor(rows + 1), cache)
            ids = batch.choose(logits_RV, going, step, None)
            for request, token in zip(going.tolist(), ids.tolist(), strict=True):
                drafts[request].append(token)
            more = np.flatnonzero(batch.num_drafts[going] > step + 1)
            if not len(more):
                break
            going, rows, ids, states_RE = going[more], rows[more], ids[more], states_RE[self._tensor(more)]
        return drafts

    def forward(
        self, ids_T: Tensor, states_TE: Tensor, positions_T: Tensor, cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        """Logits [T, V] in float32, and the states [T, target's E] for the next draft."""
        embeds = self._embed(ids_T) * self._scale
        x = self.pre_projection(torch.cat((embeds, states_TE), dim=-1))
        cos_sin = [rotary.at(positions_T) for rotary in self._rotaries]
        for layer, rotary in zip(self.layers, self._rotary_of, strict=True):
            x = layer(x, cos_sin[rotary], cache)
        x = self.norm(x)
        logits = self.lm_head(x)
        if self.masked_embedding is not None:
            logits = self.masked_embedding.masked(logits, x)
        return logits.float(), self.post_projection(x)

    def _tensor(self, values: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


def _config(raw: RawConfig, target: CausalLM) -> Gemma4Config:
    """The config of the assistant's layers. Raises `CheckpointError`."""
    inner = raw.get("text_config")
    if raw.get("model_type") != _KIND or not isinstance(inner, Mapping):
        raise CheckpointError(f"drafter: config.json: model_type is {raw.get('model_type')!r}, expected {_KIND!r}")
    if not isinstance(target.config, Gemma4Config):
        raise CheckpointError("drafter: an assistant is for a target of type gemma4_text")
    for name in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
        if inner.get(name):
            raise CheckpointError(f"drafter: config.json: {name} is {inner[name]!r}, which is not supported")
    config = parse_gemma4({**inner, "hidden_size_per_layer_input": 0}, 0)
    backbone = get_int(raw, "backbone_hidden_size", 1536)
    for name, found, wanted in (
        ("backbone_hidden_size", backbone, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if found != wanted:
            raise CheckpointError(f"drafter: config.json: {name} is {found}, and the target's is {wanted}")
    return config


def _layers_of(config: Gemma4Config, target: CausalLM) -> tuple[int, ...]:
    """For each assistant layer, the target layer that it reads: the last of its kind with own keys. Raises
    `CheckpointError` if the heads differ or its window is wider.
    """
    known, sources = cast(Gemma4Config, target.config), []
    for layer, window in enumerate(config.windows):
        alike = [i for i in known.sources if (known.windows[i] is None) == (window is None)]
        own = config.spec(layer)
        its = known.spec(max(alike)) if alike else None
        if its is None or (its.num_kv_heads, its.head_dim) != (own.num_kv_heads, own.head_dim):
            kind = "full" if window is None else "windowed"
            what = f"{own.num_kv_heads} heads of {own.head_dim}"
            raise CheckpointError(f"drafter: config.json: {kind} layers have {what}, and the target's have others")
        if window is not None and its.window is not None and window > its.window:
            raise CheckpointError(f"drafter: config.json: sliding_window is {window}, and the target's is {its.window}")
        sources.append(max(alike))
    return tuple(sources)
