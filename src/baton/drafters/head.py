"""Base class of drafters that are a small model (head) on top of the target's hidden states.

Row i of a head's forward takes the features of position i and token x_{i+1}, and writes its KV into slot i of the
head's own group. After the last known token, it continues from its own output and drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.drafters.base import DraftBatch
from baton.drafters.chain import IntArray
from baton.errors import CheckpointError
from baton.models.base import CausalLM, Embedding
from baton.models.config import ModelConfig
from baton.models.layer_cache import KVLayerSpec, LatentLayerSpec, LayerCache, LayerSpec
from baton.models.layers.linear import Build, Linear
from baton.models.layers.rotary import Rotary
from baton.models.loading.filling import fill_module
from baton.models.loading.stored import stored_tensors

# Rows per drafting request from which only the last ones are computed.
FEW = 4


class HeadDrafter(nn.Module, ABC):
    """Embedding, LM head, rotary tables, draft vocabulary.

    `aux_layers`: target layers whose input residual streams are the features; () for the final-norm hidden state.
    `feature_size`: features per row. `draft_to_target`: int64 [draft_vocab] target ids, None if the vocabularies are
    the same.
    """

    kv_layers: list[LayerSpec]
    kv_modules: list[int | None]
    aux_layers: tuple[int, ...]
    feature_size: int
    draft_to_target: Tensor | None
    needs_contexts = False
    writes = False

    def __init__(
        self, config: ModelConfig, layers: Sequence[LayerSpec], target: CausalLM, names: set[str], build: Build
    ) -> None:
        """`layers`: the KV cache specs. `names`: the checkpoint's tensors. A head without its own embedding or LM head
        uses the target's."""
        super().__init__()
        self.kv_layers = list(layers)
        self.kv_modules = [1] * len(self.kv_layers)
        self.draft_to_target = None
        self._device = build.device
        # The head drafts even beyond its own config's length.
        length = max(config.max_position, target.max_position)
        self.rotary = Rotary(config.rope, config.rotary_dim or config.head_dim, length, build.dtype, build.device)
        # Functions, not modules: registering a shared module would make its weights this head's. Embeddings
        # are unscaled, even if the target scales its own.
        self._embed: Callable[[Tensor], Tensor] = partial(F.embedding, weight=target.model.embed_tokens.weight)
        self._head: Callable[[Tensor], Tensor] = target.project
        self._target = (target,)
        own_embed = "embed_tokens.weight" in names
        if own_embed:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, build)
            self._embed = self.embed_tokens.forward
        if not own_embed and config.hidden_size != target.hidden_size:
            raise CheckpointError(
                f"drafter: hidden_size is {config.hidden_size}, the target's is {target.hidden_size}, "
                "and the drafter has no embed_tokens.weight of its own"
            )
        if config.vocab_size != target.vocab_size:
            raise CheckpointError(f"drafter: vocab_size is {config.vocab_size}, the target's is {target.vocab_size}")

    def add_head(self, hidden_size: int, draft_vocab: int, build: Build) -> None:
        self.lm_head = Linear(hidden_size, draft_vocab, build)
        self._head = self.lm_head.forward

    def embedding_and_head(self) -> tuple[Tensor, Linear | None]:
        """The embedding's weight [V, E], and the LM head unless each rank has a part."""
        (target,), own = self._target, self._modules
        embed, lm_head = own.get("embed_tokens", target.model.embed_tokens), own.get("lm_head", target.whole_head())
        assert isinstance(embed, Embedding)
        assert lm_head is None or isinstance(lm_head, Linear)
        return embed.weight, lm_head

    def combine(self, hidden_TE: Tensor, aux: list[Tensor]) -> Tensor:
        """As `Drafter.combine`. By default, the target's final-norm states."""
        return hidden_TE

    @abstractmethod
    def forward(
        self, next_ids_T: Tensor, features_TF: Tensor, positions_T: Tensor, attend: LayerCache, first: bool
    ) -> tuple[Tensor, Tensor]:
        """One drafter forward over T rows. Token ids and positions are int64 [T].

        `first`: `features_TF` comes from `combine`, otherwise from the row's previous draft step.
        Returns (states for `compute_logits`, features for the next draft step).
        """

    def write(self, next_ids_T: Tensor, features_TF: Tensor, positions_T: Tensor, cache: LayerCache) -> None:
        """Write the entries that `forward` would, if the head `writes`."""
        raise NotImplementedError

    def extend(self, batch: DraftBatch) -> tuple[Tensor, Tensor]:
        """States and the next step's features, [R, E] each, of the last rows of requests that get drafts."""
        assert batch.features_TF is not None
        going, last = _last_rows(batch)
        ids, features, positions = batch.next_ids, batch.features_TF, batch.positions
        if self.writes and len(positions) >= FEW * len(going):
            self.write_rows(batch)
            rows = self._tensor(last)
            features = features[rows]
            if not len(last):
                return features, features
            attend = batch.pages.bind(going, positions[last], np.arange(len(last) + 1, dtype=np.int32))
            return self(self._tensor(ids[last]), features, self._tensor(positions[last]), attend, True)  # type: ignore[no-any-return]
        attend = batch.pages.bind(np.arange(len(batch.num_drafts)), positions, batch.query_start)
        states = self(self._tensor(ids), features, self._tensor(positions), attend, True)
        out_RE, feedback_RE = (of.index_select(0, self._tensor(last)) for of in states)
        return out_RE, feedback_RE

    def write_rows(self, batch: DraftBatch) -> None:
        assert batch.features_TF is not None
        cache = batch.pages.bind(np.arange(len(batch.num_drafts)), batch.positions, batch.query_start)
        self.write(self._tensor(batch.next_ids), batch.features_TF, self._tensor(batch.positions), cache)

    def draft(self, batch: DraftBatch, extended: tuple[Tensor, Tensor]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in batch.num_drafts]
        going, last = _last_rows(batch)
        next_positions = batch.positions[last] + 1
        out_RE, feedback_RE = extended
        for step in range(int(batch.num_drafts.max())):
            ids = batch.choose(self.compute_logits(out_RE), going, step, self.draft_to_target)
            for request, token in zip(going.tolist(), ids.tolist(), strict=True):
                drafts[request].append(token)
            more = np.flatnonzero(batch.num_drafts[going] > step + 1)
            if not len(more):
                break
            if len(more) < len(going):
                going, next_positions, ids = going[more], next_positions[more], ids[more]
                feedback_RE = feedback_RE[self._tensor(more)]
            positions = next_positions + step
            attend = batch.pages.bind(going, positions, np.arange(len(going) + 1, dtype=np.int32))
            out_RE, feedback_RE = self(self._tensor(ids), feedback_RE, self._tensor(positions), attend, False)
        return drafts

    def _tensor(self, values: IntArray) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def compute_logits(self, out_TE: Tensor) -> Tensor:
        """Draft logits [T, draft_vocab] in float32."""
        return self._head(out_TE).float()


def _last_rows(batch: DraftBatch) -> tuple[IntArray, IntArray]:
    """Requests with drafts, and their last rows."""
    going = np.flatnonzero(batch.num_drafts)
    return going, batch.query_start[1:][going].astype(np.int64) - 1


def attention_layers(config: ModelConfig) -> list[LayerSpec]:
    """A drafter's layers: latents, or keys and values."""
    if config.latent is not None:
        return [LatentLayerSpec(config.latent.latent_dim, config.latent.rope_dim)] * config.num_layers
    return [KVLayerSpec(config.num_kv_heads, config.head_dim, window) for window in config.windows]


def fill_drafter(
    drafter: HeadDrafter, path: str, skip: frozenset[str], renamed: Callable[[str], str] = lambda name: name
) -> None:
    """Copy a head's tensors into `drafter` under canonical names, `renamed`, except those in `skip`."""

    def rename(name: str) -> str | None:
        name = renamed(canonical_tensor_name(name))
        return None if name in skip or name.endswith("rotary_emb.inv_freq") else name

    fill_module(drafter, path, rename)


def canonical_tensor_name(name: str) -> str:
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def head_tensors(path: str) -> set[str]:
    return {canonical_tensor_name(name) for name in stored_tensors(path)}


def target_ids(offsets: Tensor, target_vocab: int) -> Tensor:
    """Target ids from `d2t`, the difference between target id and draft id for each draft id.

    Raises `CheckpointError`.
    """
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < target_vocab):
        raise CheckpointError(f"drafter: d2t maps outside the target's vocabulary of {target_vocab}")
    return ids


def expect_target_size(found: int, target: CausalLM) -> None:
    """Raise `CheckpointError` if a head was made for another hidden size."""
    if found != target.hidden_size:
        raise CheckpointError(
            f"drafter: made for a target of hidden_size {found}, the target's is {target.hidden_size}"
        )
