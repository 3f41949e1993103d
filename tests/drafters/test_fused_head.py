"""An EAGLE-3 head's passes in one call draft what its modules draft one by one, and write the same keys and values."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.drafters.eagle3 import Eagle3
from baton.engine.config import SpeculativeConfig
from baton.engine.executor import LocalExecutor
from baton.errors import BatonError
from baton.models.fused_drafts import FusedDrafts
from baton.sampling_params import SamplingParams
from testkit.checkpoints.common import make_drafter
from testkit.engines import stepped
from testkit.heads import ONE_LAYER, HeadKind, make_batch, make_head, one_by_one
from testkit.layers import HAS_OWN_PRODUCTS, LayerKind, PagedRequests, skip_unless_in_place, usual_quantization

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not HAS_OWN_PRODUCTS, reason="no products of bfloat16 of our own"),
]
HIDDEN, HEADS, INNER = 192, (6, 2, 32), 320
KINDS = {
    "plain": HeadKind(),
    "the target's LM head": HeadKind(draft_vocab=None),
    "int8": HeadKind(replace(ONE_LAYER, quantization="int8")),
    "EAGLE-3.1": HeadKind(norm_before_residual=True, norm_output=True),
    "two layers, one with a window": HeadKind(LayerKind(windows=(None, 20), bias=True, rotary_dim=16)),
    "batch-invariant": HeadKind(replace(ONE_LAYER, batch_invariant=True)),
}
# Of layers that run in place here.
USUAL = HeadKind(replace(ONE_LAYER, quantization=usual_quantization()))
# Rows of each request, how many drafts it gets, and its temperature.
BATCHES = {
    "one request": ([(70, 72)], [3], [0.8]),
    "one row": ([(5, 6)], [1], [0.0]),
    "no drafts": ([(5, 9), (64, 65)], [0, 0], [0.0, 0.0]),
    "different numbers": ([(5, 9), (130, 131), (0, 3), (63, 64)], [2, 4, 0, 1], [0.0, 0.8, 0.8, 1.2]),
    "a prompt and others": ([(0, 40), (9, 12)], [2, 2], [0.0, 0.0]),
    "a long prompt and others": ([(9, 12), (0, 70), (3, 4)], [3, 0, 1], [0.8, 0.8, 0.0]),
    "a part of a long prompt": ([(0, 70)], [0], [0.0]),
}


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def fused_only(head: Eagle3) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a module was called")

    for layer in head.layers:
        layer.forward = refuse  # type: ignore[method-assign]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("kind", "threads"), [(kind, 2) for kind in KINDS] + [("plain", 1)], indirect=["threads"])
@pytest.mark.usefixtures("threads")
@torch.inference_mode()
def test_drafts_and_pages_are_those_of_the_modules(kind: str, batch: str) -> None:
    spans, num_drafts, temperatures = BATCHES[batch]
    skip_unless_in_place(KINDS[kind].layers)
    if len(KINDS[kind].layers.windows) > 1 and any(stop - start == 70 for start, stop in spans):
        pytest.skip("its second layer needs the whole output of its first")
    head = make_head(KINDS[kind], HIDDEN, HEADS, INNER, seed=3)
    pages = PagedRequests(KINDS[kind].layers, HEADS, spans, seed=5, ahead=4)
    other = copy.deepcopy(pages)
    made = make_batch(head, pages, num_drafts, temperatures, seed=7)
    expected, margins = one_by_one(head, made, other)
    assert np.isfinite(margins).sum() == sum(num_drafts)
    fused_only(head)
    assert head.draft(made, head.extend(made)) == expected
    assert made.margins is not None
    np.testing.assert_array_equal(made.margins, margins)
    assert [len(one) for one in expected] == num_drafts
    for mine, others in zip(pages.kv, other.kv, strict=True):
        assert torch.equal(mine.view(torch.int16), others.view(torch.int16))


@torch.inference_mode()
def test_other_drafts_come_from_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows of two layers, a choice that a grammar limits, and an LM head with outputs of half a block."""
    monkeypatch.delattr(FusedDrafts, "run")
    two = KINDS["two layers, one with a window"]
    head = make_head(two, HIDDEN, HEADS, INNER, seed=3)
    pages = PagedRequests(two.layers, HEADS, [(0, 65)], seed=5, ahead=4)
    assert isinstance(head.extend(make_batch(head, pages, [1], [0.0], seed=7)), tuple)
    head = make_head(USUAL, HIDDEN, HEADS, INNER, seed=3)
    pages = PagedRequests(ONE_LAYER, HEADS, [(3, 4)], seed=5, ahead=4)
    batch = make_batch(head, pages, [1], [0.0], seed=7)
    assert isinstance(head.extend(replace(batch, noise=None)), tuple)
    head = make_head(HeadKind(draft_vocab=96), HIDDEN, HEADS, INNER, seed=3)
    assert isinstance(head.extend(make_batch(head, pages, [1], [0.0], seed=7)), tuple)


@torch.inference_mode()
def test_rows_that_do_not_draft_compute_keys_and_values_alone() -> None:
    head = make_head(USUAL, HIDDEN, HEADS, INNER, seed=3)
    written: list[int] = []
    layer: Any = head.layers[0]
    write = layer.write

    def note(embeds: torch.Tensor, *rest: Any) -> None:
        written.append(len(embeds))
        write(embeds, *rest)

    layer.write = note

    def extend(spans: list[tuple[int, int]], num_drafts: list[int]) -> None:
        pages = PagedRequests(ONE_LAYER, HEADS, spans, seed=5, ahead=4)
        head.extend(make_batch(head, pages, num_drafts, [0.0] * len(spans), seed=7))

    extend([(5, 6), (64, 65)], [0, 0])
    extend([(5, 6), (64, 65), (9, 12)], [0, 2, 0])
    extend([(5, 6), (64, 65), (9, 10)], [0, 2, 0])
    assert written == [2, 5], "the last step is too small"


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.usefixtures("threads")
@torch.inference_mode()
def test_a_slot_that_does_not_exist_is_an_error() -> None:
    """In the second pass."""
    head = make_head(USUAL, HIDDEN, HEADS, INNER, seed=3)
    pages = PagedRequests(ONE_LAYER, HEADS, [(7, 8)], seed=5, ahead=1)
    pages.batches[0].page_table[0, 1] = 0
    with pytest.raises(BatonError, match="null page"):
        head.extend(make_batch(head, pages, [2], [0.0], seed=7))


def test_an_engine_runs_its_head_in_one_call(checkpoint: Any, tmp_path: Path) -> None:
    """Else nothing but its speed would show that it no longer does."""
    target: Path = checkpoint("llama", torch_dtype="bfloat16", intermediate_size=192)
    drafter = make_drafter(tmp_path, "eagle3", target, draft_vocab_size=128)
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
    spec = SpeculativeConfig.parse(json.dumps(speculative))
    settings = {"batch_invariant": False, "quantization": usual_quantization()}
    with stepped(model=str(target), speculative_config=spec, **settings) as one:
        executor = one.core.executor
        assert isinstance(executor, LocalExecutor)
        assert isinstance(executor.runner.drafter, Eagle3)
        fused_only(executor.runner.drafter)
        made = one.run("a", list(range(3, 93)), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert made.error is None
    assert made.chunks[1].drafted == [3]
