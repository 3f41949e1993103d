"""The base of every architecture. Parameter names are Hugging Face's."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.config import ModelConfig, RawConfig
from baton.models.fused_layers import FusedLayers
from baton.models.layer_cache import KVLayerSpec, LayerCache, LayerSpec
from baton.models.layers.decoder_layer import DecoderLayer
from baton.models.layers.layernorm import make_norm
from baton.models.layers.linear import Build, Linear
from baton.models.layers.parallel import stage_layers
from baton.models.layers.rotary import Rotary


class Embedding(nn.Module):
    """Token embedding: int64 [T] -> [T, E]."""

    def __init__(self, vocab_size: int, hidden: int, build: Build) -> None:
        super().__init__()
        self.weight = build.empty(vocab_size, hidden)

    def forward(self, ids_T: Tensor) -> Tensor:
        return F.embedding(ids_T, self.weight)


class Decoder(nn.Module):
    """Embedding, layers and final norm. A pipeline stage has its own `layers` (by layer id) only, and stage 0 the rest.
    Subclasses may carry several residual streams."""

    def __init__(self, config: ModelConfig, layers: Mapping[int, nn.Module], build: Build) -> None:
        super().__init__()
        self._config, self._build, self._stage = config, build, build.ranks.stage
        if self._stage.index == 0:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, build)
            self.norm = make_norm(config, config.hidden_size, build)
        self.layers = nn.ModuleDict({str(layer_id): layer for layer_id, layer in layers.items()})
        self._multiplier = config.embedding_multiplier
        self.rotaries, self._rotary_of = rotaries(config, build)

    @functools.cached_property
    def fused(self) -> FusedLayers | None:
        """The filled layers for one kernel call; None if ranks or stages share them."""
        alone = self._stage.count == 1 and self._build.ranks.size == 1
        return FusedLayers.of(self.layers.values(), self._rotary_of) if alone else None

    def forward(
        self, input_ids_T: Tensor, positions_T: Tensor, cache: LayerCache, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """As `CausalLM.forward`. Later pipeline stages return their residual stream, and nothing of `aux_layers`."""
        stage, num_layers, wanted = self._stage, self._config.num_layers, sorted(set(aux_layers))
        seen: dict[int, Tensor] = {}  # the residual streams that enter `wanted` layers
        if stage.index == 0:
            x = self._embed(input_ids_T)
        else:
            before = stage_layers(num_layers, stage.index - 1, stage.count)
            x = self._receive(len(input_ids_T), [a for a in wanted if a < before.stop], stage.index - 1, seen)
        x = self._run_layers(x, input_ids_T, positions_T, cache, wanted, seen)
        if stage.index + 1 == stage.count:
            seen[num_layers] = seen[num_layers + 1] = x
        if stage.count > 1:
            kept = [seen[a] for a in wanted if a in seen]
            stage.send(torch.stack([x, *kept]), (stage.index + 1) % stage.count)
        if stage.index > 0:
            return x, []
        if stage.count > 1:
            x = self._receive(len(input_ids_T), wanted, stage.count - 1, seen)
        features = {a: self.feature(seen[a]) if a <= num_layers else seen[a] for a in wanted}
        return self.norm(self.collapse(x)), [features[layer_id] for layer_id in aux_layers]

    def _embed(self, input_ids_T: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(input_ids_T)
        return self.spread(x * self._multiplier if self._multiplier != 1.0 else x)

    def _run_layers(
        self,
        x: Tensor,
        input_ids_T: Tensor,
        positions_T: Tensor,
        cache: LayerCache,
        wanted: Sequence[int],
        seen: dict[int, Tensor],
    ) -> Tensor:
        """This stage's layers, in one kernel if they can be fused. The inputs of `wanted` layers go into `seen`."""
        inputs = self.layer_inputs(input_ids_T, x)
        regions = None if inputs or self.fused is None else self.fused.regions(len(x), cache)
        if regions is not None and self.fused is not None:
            seen.update({layer_id: torch.empty_like(x) for layer_id in wanted if layer_id < self._config.num_layers})
            self.fused.run(x, self.rotaries, regions, seen)
            return x
        cos_sin = [rotary.at(positions_T) for rotary in self.rotaries]
        for name, layer in self.layers.items():
            layer_id = int(name)
            if layer_id in wanted:
                seen[layer_id] = x
            x = layer(x, cos_sin[self._rotary_of[layer_id]], cache, *inputs.get(layer_id, ()))
        return x

    @property
    def stream_size(self) -> int:
        return self._config.hidden_size

    def spread(self, embeds_TE: Tensor) -> Tensor:
        """The residual stream that enters the first layer."""
        return embeds_TE

    def collapse(self, x: Tensor) -> Tensor:
        """The final norm's input [T, E], from the residual stream after the last layer."""
        return x

    def feature(self, x: Tensor) -> Tensor:
        """A drafter's features of a residual stream [T, E]."""
        return x

    def layer_inputs(self, input_ids_T: Tensor, embeds_TE: Tensor) -> Mapping[int, tuple[Tensor, ...]]:
        """Further arguments, by layer. `embeds_TE`: scaled."""
        return {}

    def _receive(self, num_rows: int, aux_layers: Sequence[int], source: int, seen: dict[int, Tensor]) -> Tensor:
        """The residual stream; `seen` gets the auxiliary states so far."""
        shape = 1 + len(aux_layers), num_rows, self.stream_size
        got = torch.empty(shape, dtype=self._build.dtype, device=self._build.device)
        self._stage.receive(got, source)
        seen.update(zip(aux_layers, got[1:], strict=True))
        return got[0]


def rotaries(config: ModelConfig, build: Build) -> tuple[list[Rotary], list[int]]:
    """Distinct rotary embeddings, and each layer's index into them."""
    ropes = config.layer_ropes or (config.rope,) * config.num_layers
    sizes = config.layer_rotary_dims or (config.rotary_dim or config.head_dim,) * config.num_layers
    of_layers = list(zip(ropes, sizes, strict=True))
    distinct = [kind for layer, kind in enumerate(of_layers) if kind not in of_layers[:layer]]
    tables = [Rotary(spec, size, config.max_position, build.dtype, build.device) for spec, size in distinct]
    return tables, [distinct.index(kind) for kind in of_layers]


class CausalLM(nn.Module, ABC):
    """A target model. Pages and batches are hidden in the `LayerCache` of each forward.

    `kv_layers`: over all ranks. `max_position`: the longest context in tokens. `own_parts`: prefixes of names of its
    tensors besides embedding, layers and norm.
    """

    decoder: type[Decoder] = Decoder
    own_parts: tuple[str, ...] = ()
    kv_layers: list[LayerSpec]
    vocab_size: int
    hidden_size: int
    max_position: int

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self.config, self.build = config, build
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_position = config.max_position
        self.kv_layers = [self.kv_layer(config, i) for i in range(config.num_layers)]
        own = build.ranks.stage.layers(config.num_layers)
        self.model = self.decoder(config, {i: self.layer(config, i, build) for i in own}, build)
        self._is_cut = False
        if build.ranks.stage.index > 0:
            return
        # Replicated if the ranks do not divide the vocabulary, or if the head is tied.
        is_cut = config.vocab_size % build.ranks.size == 0 and not config.tie_word_embeddings
        share = build.ranks.share(config.vocab_size, "tokens") if is_cut else None
        self.lm_head = Linear(config.hidden_size, share.length if share else config.vocab_size, build, share=share)
        self._is_cut = is_cut and build.ranks.size > 1
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    @abstractmethod
    def parse_config(cls, raw: RawConfig) -> ModelConfig:
        """Raises `CheckpointError` naming the field."""

    def kv_layer(self, config: ModelConfig, layer_id: int) -> LayerSpec:
        return KVLayerSpec(config.num_kv_heads, config.head_dim, config.windows[layer_id])

    def layer(self, config: ModelConfig, layer_id: int, build: Build) -> nn.Module:
        """Its forward takes the residual stream [T, E], the rows' rotary (cos, sin) and a `LayerCache`, and returns the
        next residual stream [T, E]."""
        return DecoderLayer(config, layer_id, build)

    def mtp_config(self, num_modules: int) -> ModelConfig:
        """`num_modules` MTP modules: layers like the last, with experts if the model has them."""
        config = self.config
        moe = config.moe and dataclasses.replace(config.moe, layers=(True,) * num_modules)
        windows, ropes = config.windows[-1:] * num_modules, config.layer_ropes[-1:] * num_modules
        return dataclasses.replace(config, num_layers=num_modules, windows=windows, layer_ropes=ropes, moe=moe)

    def stored_name(self, name: str) -> str | None:
        """The model's name of a stored tensor; None: not loaded."""
        is_tied = name == "lm_head.weight" and self.config.tie_word_embeddings
        return None if is_tied or name.endswith("rotary_emb.inv_freq") else name

    def unpack(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """A stored tensor as this model's: one, several, or none if another is needed first."""
        return ((name, tensor),)

    def forward(
        self, input_ids_T: Tensor, positions_T: Tensor, cache: LayerCache, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Int64 token ids [T] at int64 positions [T].

        Returns the hidden states after the final norm [T, E] and, for each l in `aux_layers` (0..num_layers), the
        residual stream [T, E] that enters layer l (l = num_layers: the last layer's output, before the norm; num_layers
        + 1: the same, of all streams if there are several).
        """
        hidden, aux = self.model(input_ids_T, positions_T, cache, aux_layers)
        return hidden, aux

    def compute_logits(self, hidden_TE: Tensor) -> Tensor:
        """Logits [T, V] in float32 of final-norm hidden states [T, E]."""
        return self.project(hidden_TE).float()

    def whole_head(self) -> Linear | None:
        """None on other stages, or if each rank has a part."""
        return self.lm_head if self.build.ranks.stage.index == 0 and not self._is_cut else None

    def project(self, hidden_TE: Tensor) -> Tensor:
        """The LM head's output [T, V] for rows [T, E]. A collective: all ranks call it."""
        part: Tensor = self.lm_head(hidden_TE)
        return torch.cat(tuple(self.build.ranks.gather(part)), dim=-1) if self._is_cut else part
