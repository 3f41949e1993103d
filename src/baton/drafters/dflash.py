"""DFlash (Z Lab, 2026): a block of drafts from one forward, as in vLLM and transformers.

The context's keys and values are projections of the target's hidden states. A block is the last known token and a mask
token per draft; row j predicts the token at its own position. Entries of blocks lie in lookahead slots.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from baton.drafters.base import DraftBatch
from baton.drafters.chain import IntArray
from baton.drafters.head import HeadDrafter, fill_drafter, head_tensors
from baton.errors import CheckpointError
from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RawConfig, get_bool
from baton.models.layer_cache import AttnRows, KVLayerSpec, LayerCache
from baton.models.layers.decoder_layer import MLP
from baton.models.layers.layernorm import RMSNorm
from baton.models.layers.linear import Build, Linear, MergedLinear
from baton.models.layers.rotary import rotate
from baton.models.loading.config_json import read_config
from baton.models.registry import model_class

log = logging.getLogger(__name__)

# Names of transformers' Muse Glimmer assistant.
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_LAYERS = ("qwen3", "muse_glimmer_assistant", None)
# Fields with their only supported value.
_EXPECTED: Mapping[str, object] = {
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": None,
    "is_neox_style": True,
    "logit_scale": 1.0,
}


class BlockRows:
    """The rows of blocks. `last`: the row that ends each row's block. `causal`: the cache with each row at its own
    position. `whole`: each row is a separate request at its block's end, so it sees the whole block.
    """

    def __init__(self, batch: DraftBatch, requests: IntArray, first: IntArray, lengths: IntArray) -> None:
        ends = np.cumsum(lengths)
        query_start = np.concatenate(([0], ends)).astype(np.int32)
        self.positions: IntArray = np.repeat(first - query_start[:-1], lengths) + np.arange(ends[-1])
        self.last: IntArray = np.repeat(ends - 1, lengths)
        self.causal = batch.pages.bind(requests, self.positions, query_start)
        alone = np.arange(len(self.positions) + 1, dtype=np.int32)
        self.whole = batch.pages.bind(np.repeat(requests, lengths), self.positions[self.last], alone)


class BlockAttention(nn.Module):
    """Attention of a block's rows [T, E] -> [T, E] to the context's keys and values, and to the block's own. `causal`:
    a row sees no later row of its block."""

    def __init__(self, config: ModelConfig, layer_id: int, causal: bool, build: Build) -> None:
        super().__init__()
        self._layer_id, self._causal, self._scale = layer_id, causal, config.head_dim**-0.5
        self._heads, self._kv_heads, self._size = config.num_heads, config.num_kv_heads, config.head_dim
        kv = build.ranks.share(config.num_kv_heads, "key-value heads").times(config.head_dim)
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim, build, config.qkv_bias)
        self.kv_proj = MergedLinear(config.hidden_size, {"k_proj": kv, "v_proj": kv}, build, config.qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, build, config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps, build)
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps, build)

    def keys_values(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k, v = self.kv_proj(x).view(len(x), 2 * self._kv_heads, self._size).split(self._kv_heads, dim=1)
        return rotate(self.k_norm(k), self._kv_heads, *cos_sin), v

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], rows: BlockRows, last: Tensor) -> Tensor:
        q = self.q_norm(self.q_proj(x).view(len(x), self._heads, self._size))
        q = rotate(q, self._heads, *cos_sin)
        k, v = self.keys_values(x, cos_sin)
        if self._causal:
            out = rows.causal(self._layer_id, AttnRows(q, k, v, self._scale))
        else:
            rows.causal.write(self._layer_id, k, v)
            # Each row writes its block's last entry again.
            out = rows.whole(self._layer_id, AttnRows(q, k[last], v[last], self._scale))
        return self.o_proj(out.reshape(len(x), -1))  # type: ignore[no-any-return]


class BlockLayer(nn.Module):
    """A pre-norm layer of blocks: [T, E] -> [T, E]. `write` stores the keys and values of context rows [T, E]."""

    def __init__(self, config: ModelConfig, layer_id: int, causal: bool, build: Build) -> None:
        super().__init__()
        self._layer_id = layer_id
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps, build)
        self.self_attn = BlockAttention(config, layer_id, causal, build)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps, build)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, build)

    def write(self, context: Tensor, cos_sin: tuple[Tensor, Tensor], cache: LayerCache) -> None:
        cache.write(self._layer_id, *self.self_attn.keys_values(context, cos_sin))

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], rows: BlockRows, last: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, rows, last)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class DFlash(HeadDrafter):
    """`num_known_rows`: rows of a block before the first that predicts a draft."""

    num_known_rows = 1

    def __init__(self, config: ModelConfig, raw: RawConfig, target: CausalLM, names: set[str], build: Build) -> None:
        specs = [KVLayerSpec(config.num_kv_heads, config.head_dim, window) for window in config.windows]
        super().__init__(config, specs, target, names, build)
        self.mask_token_id = _mask_token(raw, config.vocab_size)
        self.aux_layers = _aux_layers(raw, len(target.kv_layers))
        self.feature_size = target.hidden_size * len(self.aux_layers)
        self.fc = Linear(self.feature_size, config.hidden_size, build, bias="fc.bias" in names)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_eps, build)
        causal = _causal_layers(raw, config)
        self.layers = nn.ModuleList(BlockLayer(config, i, one, build) for i, one in enumerate(causal))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps, build)
        if "lm_head.weight" in names:
            self.add_head(config.hidden_size, config.vocab_size, build)
        elif config.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"drafter: no lm_head.weight, and the target's is for a hidden_size of {target.hidden_size}, "
                f"not {config.hidden_size}"
            )

    @classmethod
    def load(cls, path: str, target: CausalLM, build: Build) -> DFlash:
        """Raises `CheckpointError`."""
        raw = read_config(path)
        if raw.get("model_type") not in _LAYERS:
            raise CheckpointError(f"drafter: config.json: model_type is {raw['model_type']!r}, expected qwen3")
        for section in (raw, _flat_config(raw)):
            for name, value in _EXPECTED.items():
                if section.get(name, value) not in (value, None):
                    raise CheckpointError(f"drafter: config.json: {name} is {section[name]!r}, which is not supported")
        raw = {"vocab_size": target.vocab_size, **raw}
        config = model_class("qwen3").parse_config({**raw, "model_type": "qwen3"})
        drafter = cls(config, raw, target, {_renamed(name) for name in head_tensors(path)}, build)
        fill_drafter(drafter, path, drafter.unused, _renamed)
        log.info("the %s drafter reads the streams that enter layers %s", cls.__name__, drafter.aux_layers)
        return drafter.eval()

    unused = frozenset({"t2d"})

    def combine(self, hidden_TE: Tensor, aux: list[Tensor]) -> Tensor:
        return torch.cat(aux, dim=-1)

    def extend(self, batch: DraftBatch) -> None:  # type: ignore[override]
        """Write the context's keys and values: no attention, no MLP."""
        assert batch.features_TF is not None
        requests = np.arange(len(batch.num_drafts))
        cache = batch.pages.bind(requests, batch.positions, batch.query_start)
        context = self.hidden_norm(self.fc(batch.features_TF))
        cos_sin = self.rotary.at(self._tensor(batch.positions))
        for layer in self.layers:
            layer.write(context, cos_sin, cache)  # type: ignore[operator]

    def draft(self, batch: DraftBatch, extended: None) -> list[list[int]]:  # type: ignore[override]
        drafts: list[list[int]] = [[] for _ in batch.num_drafts]
        going = np.flatnonzero(batch.num_drafts)
        counts = batch.num_drafts[going]
        known = batch.query_start[1:][going].astype(np.int64) - 1  # the last rows, before the blocks
        lengths = counts + self.num_known_rows
        rows = BlockRows(batch, going, batch.positions[known] + 1, lengths)
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        ids = np.full(len(rows.positions), self.mask_token_id)
        before = ids[starts] = batch.next_ids[known]
        states_TE = self(self._tensor(ids), rows)
        for step in range(int(counts.max())):
            more = np.flatnonzero(counts > step)
            at = starts[more] + self.num_known_rows + step
            logits = self.block_logits(states_TE[self._tensor(at)], self._tensor(before[more]))
            chosen = batch.choose(logits, going[more], step, self.draft_to_target)
            before[more] = chosen
            for request, token in zip(going[more].tolist(), chosen.tolist(), strict=True):
                drafts[request].append(token)
        return drafts

    def forward(self, ids_T: Tensor, rows: BlockRows) -> Tensor:  # type: ignore[override]
        x = self._embed(ids_T)
        cos_sin, last = self.rotary.at(self._tensor(rows.positions)), self._tensor(rows.last)
        for layer in self.layers:
            x = layer(x, cos_sin, rows, last)
        return self.norm(x)  # type: ignore[no-any-return]

    def block_logits(self, states_RE: Tensor, before_R: Tensor) -> Tensor:
        """`before_R`: the tokens before."""
        return self.compute_logits(states_RE)


def _renamed(name: str) -> str:
    for old, new in _RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _flat_config(raw: RawConfig) -> RawConfig:
    nested_config = raw.get("dflash_config") or {}
    if not isinstance(nested_config, Mapping):
        raise CheckpointError(f"drafter: config.json: dflash_config is {nested_config!r}, expected an object")
    return {**raw, **nested_config}


def _mask_token(raw: RawConfig, vocab_size: int) -> int:
    token = _flat_config(raw).get("mask_token_id")
    if type(token) is not int or not 0 <= token < vocab_size:
        raise CheckpointError(f"drafter: config.json: mask_token_id is {token!r}, expected 0 to {vocab_size - 1}")
    return token


def _aux_layers(raw: RawConfig, num_layers: int) -> tuple[int, ...]:
    """The config's id i means the output of layer i, which enters layer i + 1."""
    own = _flat_config(raw)
    ids, count = own.get("target_layer_ids"), own.get("num_target_layers")
    valid = isinstance(ids, list) and all(type(i) is int and 0 <= i < num_layers for i in ids)
    if not isinstance(ids, list) or not ids or not valid or ids != sorted(set(ids)):
        what = f"expected ascending layers in 0..{num_layers - 1}"
        raise CheckpointError(f"drafter: config.json: target_layer_ids is {ids!r}, {what}")
    # Some count the ids.
    if count not in (None, num_layers, len(ids)):
        raise CheckpointError(f"drafter: config.json: num_target_layers is {count!r}, and the target has {num_layers}")
    return tuple(i + 1 for i in ids)


def _causal_layers(raw: RawConfig, config: ModelConfig) -> list[bool]:
    """As in vLLM: as configured, else layers with a window."""
    own = _flat_config(raw)
    given = next((name for name in ("is_causal", "causal") if own.get(name) is not None), None)
    causals = [window is not None if given is None else get_bool(own, given) for window in config.windows]
    if own.get("use_swa") or any(
        w is not None and not causal for w, causal in zip(config.windows, causals, strict=True)
    ):
        raise CheckpointError("drafter: config.json: a window in both directions is not supported")
    return causals
