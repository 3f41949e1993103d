"""Drafter rows that wait, where requests come, leave and are preempted at random steps, change no draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from baton.engine.request import Request
from baton.engine.speculation.adaptive import AdaptiveDrafts
from baton.wire import SamplingParams
from benchmarks.parity.models import DRAFTERS, NUM_DRAFTS, TARGETS
from testkit.disorder import Disorder, Said
from testkit.engines import Stepped, request, stepped
from testkit.inside import kept_features
from tests.engine.speculation.test_adaptive import auto

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS, NUM_PROMPTS, NUM_STEPS = 40, 6, 220
Drafts = dict[tuple[int, ...], list[int]]


class InStretches(AdaptiveDrafts):
    """Few drafts at few lengths of a request, with stretches shorter and longer than rows may wait."""

    def choose(self, requests: Sequence[Request], most: Sequence[int]) -> np.ndarray:
        counts = [NUM_DRAFTS if len(one.token_ids) % 23 in (2, 9) else 0 for one in requests]
        return np.minimum(counts, np.maximum(most, 0))

    def holds_none(self, requests: list[Request]) -> bool:
        return not self.choose(requests, [NUM_DRAFTS] * len(requests)).any()


def drafted(one: Stepped) -> Drafts:
    """The drafts that the running requests have got, by their known tokens."""
    return {tuple(r.token_ids): r.draft_ids for r in one.core.scheduler.running if r.draft_ids}


def alone(one: Stepped) -> tuple[list[Said], Drafts]:
    said, found, random = [], Drafts(), Random(1)
    one.core.steps.adaptive, one.core.steps.deferred, one.core.late = InStretches(NUM_DRAFTS), None, None
    for number in range(NUM_PROMPTS):
        prompt = [2 + number, *random.choices(range(2, 9), k=7 * number)]
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=4.0 * (number % 2), seed=number, ignore_eos=True)
        stream = one.add(request(f"{number}", prompt, params))
        said.append(Said(prompt, params, stream))
        while not stream.ended:
            one.step()
            found |= drafted(one)
    return said, found


@pytest.mark.parametrize(
    ("target", "drafter", "most_rows"),
    [
        ("llama", "eagle3", 60),
        ("llama", "eagle3", 500),
        ("mistral, window", "eagle", 200),
        ("qwen3_next", "mtp", 200),
        ("llama", "draft_model", 200),
        ("llama", "draft_model, window", 200),
    ],
)
def test_drafts_are_those_of_rows_that_never_waited(target: str, drafter: str, most_rows: int, tmp_path: Path) -> None:
    model, make = TARGETS[target](tmp_path / "target", 0), DRAFTERS[drafter].make
    assert make is not None
    settings: dict[str, Any] = {"model": str(model), "speculative_config": auto(make(tmp_path / "drafter", model, 1))}
    settings |= {"skip_tokenizer_init": True, "block_size": 4, "max_model_len": 128}
    with stepped(**settings, kv_cache_memory=4 << 20, enable_prefix_caching=False) as one:
        wanted, expected = alone(one)
    assert sum(sum(said.stream.accepted) for said in wanted) > 0
    memory = 1 << (20 if target == "qwen3_next" else 18)
    with stepped(**settings, kv_cache_memory=memory, mamba_block_size=4) as one:
        deferred = one.core.steps.deferred
        assert deferred is not None
        deferred.most_rows = most_rows
        one.core.steps.adaptive = InStretches(NUM_DRAFTS)
        # A draft model's rows that waited get drafts only if all have room in the step.
        room = 128 if one.core.steps.drafts_from_tokens else 1 + 2 * NUM_DRAFTS
        disorder, num_drafts = Disorder(one, wanted, 0, room), 0
        for _ in range(NUM_STEPS):
            disorder.step()
            found = drafted(one)
            assert found.items() <= expected.items()
            num_drafts += len(found)
            assert sum(len(kept.hidden_TE) for kept in kept_features(one).values()) <= most_rows + 64
        assert min(disorder.num_ended, disorder.num_preempted, num_drafts) > 9
