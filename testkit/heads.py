"""A random EAGLE-3 head and batches for it, to compare its passes in one call with its modules one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.drafters.base import DraftBatch
from baton.drafters.eagle3 import Eagle3
from baton.drafters.head import HeadDrafter
from baton.engine.sampling.draft_sampler import DraftSampler
from baton.engine.step_plans import Noise
from baton.models.base import Embedding
from baton.models.layers.linear import Linear
from testkit.layers import LayerKind, PagedRequests, build_of, config_of, fill

TARGET_VOCAB = 300
ONE_LAYER = LayerKind(windows=(None,))


@dataclass(frozen=True)
class HeadKind:
    """`draft_vocab` None: the target's LM head, over all its tokens."""

    layers: LayerKind = ONE_LAYER
    draft_vocab: int | None = 128
    norm_before_residual: bool = False
    norm_output: bool = False


def make_head(kind: HeadKind, hidden: int, heads: tuple[int, int, int], inner: int, seed: int) -> Eagle3:
    """`heads`: query heads, key heads, size."""
    build, vocab = build_of(kind.layers), TARGET_VOCAB if kind.draft_vocab else 320
    embedding, lm_head = Embedding(vocab, hidden, build), Linear(hidden, vocab, build)
    fill(embedding, seed)
    fill(lm_head, seed + 1)
    target: Any = SimpleNamespace(
        hidden_size=hidden, vocab_size=vocab, max_position=512, kv_layers=[None] * 8, project=lm_head.forward,
        model=SimpleNamespace(embed_tokens=embedding), whole_head=lambda: lm_head,
    )  # fmt: skip
    raw = {"norm_before_residual": kind.norm_before_residual, "norm_output": kind.norm_output}
    names = {"lm_head.weight", "d2t"} if kind.draft_vocab else set()
    config = config_of(kind.layers, hidden, heads, inner, vocab)
    head = Eagle3(config, {**raw, "draft_vocab_size": kind.draft_vocab or vocab}, target, names, build)
    fill(head, seed + 2)
    if kind.draft_vocab:
        order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
        head.draft_to_target = order[: kind.draft_vocab].sort().values
    return head


def make_batch(
    head: Eagle3, pages: PagedRequests, num_drafts: Sequence[int], temperatures: Sequence[float], seed: int
) -> DraftBatch:
    random, batch = np.random.default_rng(seed), pages.batches[0]
    vocab, num_rows, starts = head.embedding_and_head()[0].shape[0], len(pages.positions), batch.query_start
    features = torch.from_numpy(random.standard_normal((num_rows, head.feature_size), dtype=np.float32)).bfloat16()
    words = random.integers(0, 1 << 60, (2, len(num_drafts))).astype(np.uint64)
    margins = np.full((len(num_drafts), max(num_drafts)), np.inf)
    noise, first = Noise(*words, np.array(temperatures)), pages.positions[starts[1:] - 1] + 2
    choose = DraftSampler(noise, first, vocab, margins=margins)
    return DraftBatch(
        next_ids=random.integers(0, vocab, num_rows),
        positions=pages.positions,
        query_start=starts,
        features_TF=features,
        num_drafts=np.array(num_drafts),
        contexts=(),
        pages=pages,  # type: ignore[arg-type]
        choose=choose,
        noise=choose.noise,
        margins=margins,
    )


def one_by_one(
    head: Eagle3, batch: DraftBatch, pages: PagedRequests
) -> tuple[list[list[int]], npt.NDArray[np.float64]]:
    """The drafts of the head's modules called one by one, over `pages`, and their margins, which the batch has not."""
    own = replace(batch, pages=pages)  # type: ignore[arg-type]
    head = copy.copy(head)
    head.writes = False
    extended = HeadDrafter.extend(head, own)
    drafts = HeadDrafter.draft(head, own, extended) if batch.num_drafts.any() else [[] for _ in batch.num_drafts]
    assert batch.margins is not None
    margins = batch.margins.copy()
    batch.margins.fill(np.inf)
    return drafts, margins
