"""k that the engine chooses: whatever it is, tokens stay the same."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from baton.engine.config import SpeculativeConfig
from baton.engine.config.speculative import MOST_AUTO_DRAFTS
from baton.engine.planning import DraftRows
from baton.engine.request import Request
from baton.engine.request_checks import make_request
from baton.engine.scheduler import ScheduledRows
from baton.engine.speculation.adaptive import (
    CHOOSE_EVERY,
    CHOOSE_SELDOM,
    PROBE_EVERY,
    PROBE_SELDOM,
    SEEDED_DRAFTS,
    AdaptiveDrafts,
)
from baton.engine.speculation.draft_choice import DraftChoice
from baton.engine.speculation.step_costs import draft_parts
from baton.engine.speculation.trials import TRY_STEPS
from baton.errors import ConfigError
from baton.verify.observe import make_cases
from baton.wire import SamplingParams
from testkit.checkpoints.drafters_layers import make_mtp_checkpoint
from testkit.checkpoints.qwen_hybrid import make_qwen_hybrid
from testkit.engines import EAGLE3, Mode, Stepped, pair, request, stepped

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)


@dataclass(eq=False)
class RequestStub:
    request_id: str
    token_ids: list[int] = field(default_factory=lambda: [0] * 9)
    is_prefilling: bool = False
    role: str = "full"


def auto(spec: dict[str, Any], **more: Any) -> SpeculativeConfig:
    found = SpeculativeConfig.parse(json.dumps({**spec, **more, "num_speculative_tokens": "auto"}))
    assert found is not None
    return found


class RandomCounts(AdaptiveDrafts):
    """Gives requests any number of drafts, and keeps any of them. `first`: the first count of each request."""

    def __init__(self, seed: int) -> None:
        super().__init__(MOST_AUTO_DRAFTS)
        self._random = random.Random(seed)
        self.given: list[int] = []
        self.first: dict[str, int] = {}

    def choose(self, requests: Sequence[Request], most: Sequence[int]) -> np.ndarray:
        counts = [self._random.randint(0, limit) for limit in most]
        self.given += counts
        for one, count in zip(requests, counts, strict=True):
            self.first.setdefault(one.request_id, count)
        return np.array(counts)

    def keep(self, requests: Sequence[Request], drafts: Sequence[Sequence[int]], margins_RK: np.ndarray) -> list[int]:
        assert margins_RK.shape[0] == len(requests)
        assert all(margins_RK.shape[1] >= len(ids) for ids in drafts)
        assert not np.isnan(margins_RK).any()
        return [self._random.randint(0, len(ids)) for ids in drafts]


def at_random(one: Stepped, seed: int) -> RandomCounts:
    assert one.core.steps.adaptive is not None
    one.core.steps.adaptive = counts = RandomCounts(seed)
    return counts


def prompts_of(one: Stepped) -> list[list[int]]:
    return [list(case.prompt_token_ids) for case in make_cases(one.engine.tokenizer, [1, 17, 40], PARAMS)]


@pytest.mark.parametrize("kind", ["eagle3", "two modules", "states"])
def test_tokens_do_not_depend_on_k(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kv_cache_memory": 8 << 20}
    # The target as its own drafter has states of its own, and guesses all.
    itself = {"method": "draft_model", "model": str(tmp_path)}
    spec = {"eagle3": EAGLE3, "two modules": {"method": "mtp"}, "states": itself}[kind]
    params = PARAMS if kind == "eagle3" else structs.replace(PARAMS, temperature=0.0)
    if kind == "two modules":
        settings["model"] = str(make_mtp_checkpoint(tmp_path, "deepseek_v3", num=2))
    elif kind == "states":
        settings["model"] = str(make_qwen_hybrid(tmp_path))
    with stepped(**settings, speculative_config=None) as plain:
        prompts = prompts_of(plain)
        expected = [stream.token_ids for stream in plain.all_of(prompts, params)]
    with stepped(**settings, speculative_config=auto(spec)) as one:
        accepted = 0
        for seed in range(2):
            counts = at_random(one, seed)
            streams = one.all_of(prompts, params)
            assert [stream.token_ids for stream in streams] == expected
            assert min(counts.given) < 2 < max(counts.given) <= MOST_AUTO_DRAFTS
            accepted += sum(sum(stream.accepted) for stream in streams)
        assert accepted > 0 or kind == "two modules"  # random modules guess nothing


@pytest.mark.parametrize(
    ("prefill_k", "decode_k", "mode"), [(5, "auto", "push"), ("auto", 4, "pull"), ("auto", "auto", "push")]
)
def test_handoffs_between_engines_with_different_k(
    prefill_k: int | str, decode_k: int | str, mode: Mode, tmp_path: Path
) -> None:
    def spec(k: int | str) -> SpeculativeConfig | None:
        return SpeculativeConfig.parse(json.dumps({**EAGLE3, "num_speculative_tokens": k}))

    memory = {"kv_cache_memory": 8 << 20}
    with stepped(**memory, speculative_config=None) as plain:
        prompts = prompts_of(plain)
        expected = [stream.token_ids for stream in plain.all_of(prompts, PARAMS)]
    decode = {"speculative_config": spec(decode_k), "block_size": 7}
    with pair(tmp_path, decode, speculative_config=spec(prefill_k), **memory) as both:
        wanted: dict[str, int] = {}
        if decode_k == "auto":
            wanted = at_random(both.decode, 1).first
        legs = [both.legs(f"{i}", prompt, PARAMS, mode) for i, prompt in enumerate(prompts)]
        both.step_until(lambda: all(stream.ended for _, stream in legs))
        assert [stream.token_ids for _, stream in legs] == expected
        assert all(stream.accepted for _, stream in legs)
        # The drafts that came with the first token are verified, as many as D wants.
        sent = 5 if prefill_k == 5 else SEEDED_DRAFTS
        for i, (_, stream) in enumerate(legs):
            most = wanted.get(f"{i}", 4)
            assert stream.chunks[0].drafted == ([min(sent, most)] if most else [])
        both.settle()


def test_the_engine_itself_chooses(tmp_path: Path) -> None:
    """Drafts that are always wrong are given up, and tried again now and then; right ones are many."""
    with stepped(speculative_config=auto(EAGLE3), kv_cache_memory=8 << 20) as one:
        adaptive = one.core.steps.adaptive
        assert adaptive is not None
        assert adaptive.costs.target.num_seen > 0
        assert (adaptive.costs.target.each() >= 0).all()
        requests = [make_request(one.engine, request(name, [1, 2, 3], PARAMS)) for name in ("bad", "good")]
        for _ in range(60):
            adaptive.verified(requests[0], 4, 0)
        counts = [adaptive.choose(requests[:1], [8])[0] for _ in range(PROBE_EVERY)]
        assert sorted(set(counts)) == [0, 1]
        assert counts.count(1) == 1
        for _ in range(600):
            adaptive.verified(requests[1], 8, 8)
        assert adaptive.choose(requests[1:], [8])[0] >= 4


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"verifier": "rejection"}, "is auto with the coupled verifier alone"),
        ({"num_speculative_tokens": "many"}, "must be 0 to 32"),
    ],
)
def test_invalid_adaptive_k_is_refused(fields: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SpeculativeConfig.parse(json.dumps({**EAGLE3, "num_speculative_tokens": "auto", **fields}))


def test_a_fixed_k_measures_nothing() -> None:
    with stepped(kv_cache_memory=8 << 20) as one:
        assert one.core.steps.adaptive is None


def test_rows_that_cost_less_than_fewer_are_chosen() -> None:
    """Kernels compute rows in groups: here three drafts cost less to verify than two."""
    seconds = {1: 1.0, 2: 1.05, 3: 1.3, 4: 1.1, 5: 1.5, 6: 1.45, 7: 1.7, 8: 1.6}
    chosen = {}
    for knows in (True, False):
        adaptive = AdaptiveDrafts(8)
        if knows:
            adaptive.costs.few_rows.fit(seconds)
        for rows, measured in seconds.items():
            observed = measured / float(adaptive.costs.few_rows.of(rows))
            adaptive.costs.target.observe((1.0, rows, 1, 0, 0, 0, 0, 0), observed)
            adaptive.costs.drafter.observe(draft_parts(1, [rows]), 0.02 * rows)
        for cost in (adaptive.costs.target, adaptive.costs.drafter):
            cost.fit()
        one: Any = RequestStub("one")
        for _ in range(200):
            for accepted in (0, 1, 1, 0, 1, 3, 1, 2):
                adaptive.keep([one], [[0] * 8], np.full((1, 8), np.inf))
                adaptive.verified(one, 8, accepted)
        chosen[knows] = adaptive.choose([one], [8]).tolist()
    assert chosen == {True: [3], False: [2]}


def test_drafts_below_the_threshold_are_not_verified_unless_they_probe() -> None:
    class Sure(AdaptiveDrafts):
        def _best(self, requests: Sequence[Request], bounds: np.ndarray) -> DraftChoice:
            return DraftChoice(np.minimum(bounds, 4), 0.5)

    adaptive = Sure(4)
    requests: list[Any] = [RequestStub(f"{number}") for number in range(8)]
    margins = np.array([[9.0, 9.0, 0.1, 9.0]] * 7 + [[0.1, 9.0, 9.0, 9.0]])
    drafts = [[1, 2, 3, 4]] * 6 + [[1], []]
    for _ in range(PROBE_EVERY - 1):
        adaptive.choose(requests, [4] * 8)
    assert adaptive.keep(requests, drafts, margins) == [2] * 6 + [1, 0]
    requests[0].role = "prefill"  # its drafts go to D, which chooses
    adaptive.choose(requests, [4] * 8)
    assert adaptive.keep(requests, drafts, margins) == [4, 4] + [2] * 4 + [1, 0]


def test_few_requests_are_probed_at_a_time_and_all_in_turn() -> None:
    adaptive = AdaptiveDrafts(8)
    for requests, drafts in itertools.product((1, 16), (0, 1, 4)):  # a row costs as much as ten forwards
        rows = requests * (1 + drafts)
        adaptive.costs.target.observe((1.0, rows, requests, 0, 0, 0, 0, 0), 0.01 + 0.1 * rows)
    adaptive.costs.target.fit()
    requests: list[Any] = [RequestStub(f"{number}") for number in range(16)]
    probed = {}
    for number in range(1, 7 * PROBE_EVERY + 5 * PROBE_SELDOM + 1):
        counts = adaptive.choose(requests, [8] * 16)
        if counts.any():
            assert counts.max() == 1
            probed[number] = np.flatnonzero(counts).tolist()
    first = [PROBE_EVERY, 3 * PROBE_EVERY, 7 * PROBE_EVERY]
    assert list(probed) == [*first, *range(first[-1] + PROBE_SELDOM, number + 1, PROBE_SELDOM)]
    assert [len(one) for one in probed.values()] == [2] * 8
    assert sorted(itertools.chain(*probed.values())) == list(range(16))


def test_a_choice_of_no_drafts_holds_longer_unless_requests_leave() -> None:
    chosen: list[int] = []

    class Never(AdaptiveDrafts):
        def _best(self, requests: Sequence[Request], bounds: np.ndarray) -> DraftChoice:
            chosen.append(len(requests))
            return DraftChoice(np.zeros_like(bounds))

    adaptive = Never(8)
    requests: list[Any] = [RequestStub(f"{number}") for number in range(10)]
    for _ in range(CHOOSE_SELDOM):
        adaptive.choose(requests, [8] * 10)
    assert chosen == [10]
    adaptive.choose(requests, [8] * 10)
    assert chosen == [10, 10]
    adaptive.choose(requests[2:], [8] * 8)
    assert chosen == [10, 10]
    adaptive.choose(requests[3:], [8] * 7)
    assert chosen == [10, 10, 7]


def test_a_choice_holds_for_some_steps_unless_a_request_comes() -> None:
    chosen: list[int] = []

    class Counted(AdaptiveDrafts):
        def _best(self, requests: Sequence[Request], bounds: np.ndarray) -> DraftChoice:
            chosen.append(len(requests))
            return DraftChoice(np.minimum(bounds, 3))

    adaptive = Counted(8)
    requests: list[Any] = [RequestStub(f"{number}") for number in range(3)]
    for _ in range(TRY_STEPS):
        assert adaptive.choose(requests[:2], [8, 2]).tolist() == [3, 2]
    assert chosen == [2]
    adaptive.choose(requests[:2], [8, 2])
    assert chosen == [2, 2]
    assert adaptive.choose([*requests[1:]], [8, 1]).tolist() == [3, 1]
    assert adaptive.choose(requests[2:], [8]).tolist() == [1]
    assert chosen == [2, 2, 2]


@pytest.mark.parametrize(("seconds", "num_chosen"), [(0.8, 5 + 12 + 1), (1.25, 5 + 4)])
def test_a_try_is_short(seconds: float, num_chosen: int) -> None:
    """`seconds`: of a step with drafts; others take 1."""
    chosen: list[int] = []

    class Always(AdaptiveDrafts):
        def _best(self, requests: Sequence[Request], bounds: np.ndarray) -> DraftChoice:
            chosen.append(len(requests))
            return DraftChoice(np.minimum(bounds, 3))

    adaptive, drafted = Always(8), []
    requests: list[Any] = [RequestStub(f"{number}") for number in range(8)]
    for _ in range(15 * CHOOSE_EVERY):
        counts = adaptive.choose(requests, [8] * 8)
        drafted.append(bool(counts.any()))
        if counts.any():
            adaptive.drafted(
                [DraftRows(one, (), 8, 9, k) for one, k in zip(requests, counts.tolist(), strict=True)], 0.2
            )
        scheduled = [ScheduledRows(one, 8, 1 + k) for one, k in zip(requests, counts.tolist(), strict=True)]
        adaptive.computed(scheduled, seconds - 0.2 if counts.any() else 1.0)
    assert drafted[:TRY_STEPS] == [True] * TRY_STEPS
    assert drafted[TRY_STEPS : 2 * TRY_STEPS] == [False] * TRY_STEPS
    assert drafted.count(seconds > 1) <= 4 * TRY_STEPS + 1  # a probe
    assert len(chosen) == num_chosen


@pytest.mark.parametrize("seed", range(4))
def test_there_is_a_choice_whatever_came_before(seed: int) -> None:
    """Batches jump between 1 and 64, requests come and leave at any time, and clocks stand still or jump."""
    rng, chooser, number = random.Random(seed), AdaptiveDrafts(MOST_AUTO_DRAFTS), itertools.count()
    batch: list[Any] = []
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        for _ in range(600):
            if not batch or rng.random() < 0.1:
                stay = rng.sample(batch, rng.randrange(len(batch) + 1))
                new = range(max(0, rng.choice([1, 1, 2, 8, 64]) - len(stay)))
                batch = stay + [RequestStub(f"{next(number)}", [0] * rng.choice([1, 9, 4000])) for _ in new]
                rng.shuffle(batch)
            if not batch:
                continue
            most = [rng.choice([MOST_AUTO_DRAFTS] * 9 + [-1, 0, 1]) for _ in batch]
            counts = chooser.choose(batch, most).tolist()
            assert all(0 <= count <= max(0, limit) for count, limit in zip(counts, most, strict=True))
            seconds = rng.choice([0.0, 1e-9, 1e-3, 1e-3, 0.02, 0.02, 3600.0])
            chooser.drafted([DraftRows(r, (), 8, 9, k) for r, k in zip(batch, counts, strict=True)], seconds)
            margins = np.array(
                [[rng.choice([0.0, 0.7, 9.0, np.inf, np.nan]) for _ in range(MOST_AUTO_DRAFTS)]] * len(batch)
            )
            kept = chooser.keep(batch, [[0] * count for count in counts], margins)
            assert all(0 <= few <= count for few, count in zip(kept, counts, strict=True))
            for one, count in zip(batch, kept, strict=True):
                chooser.verified(one, count, rng.randrange(count + 1))
                one.is_prefilling = rng.random() < 0.01
            chooser.computed([ScheduledRows(r, 8, 1 + k) for r, k in zip(batch, counts, strict=True)], seconds)
