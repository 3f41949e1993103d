"""Engines with different drafters: what `draft_kv` allows moves no wrong byte and changes no token, and what it does
not allow is refused with both sides' values.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from baton.comparison import differing_facts
from baton.engine.config import SpeculativeConfig
from baton.engine.step_plans import DraftPlan, DraftResult
from baton.errors import ConfigError
from baton.sampling_params import SamplingParams
from testkit.checkpoints.common import make_checkpoint
from testkit.checkpoints.drafters_tokens import draft_model, ngram, windowed_draft_model
from testkit.engines import EAGLE3, TARGET, Mode, Pair, Stepped, Stream, pair, stepped

Settings = dict[str, Any]
EAGLE = {"method": "eagle", "model": "models/baton-demo-eagle", "num_speculative_tokens": 2}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
LENGTHS = [1, 2, 15, 16, 17, 40]


def prompt_of(length: int) -> list[int]:
    return [3 + (7 * i + 13 * length + i * i) % 200 for i in range(length)]


def made(path: Path, name: str) -> Path:
    (path / name).mkdir()
    return path / name


def spec(drafter: Settings | None, **more: Any) -> SpeculativeConfig | None:
    return None if drafter is None else SpeculativeConfig.parse(json.dumps({**drafter, **more}))


@pytest.fixture(scope="module")
def expected() -> dict[int | None, list[list[int]]]:
    with stepped(speculative_config=None) as one:
        return {
            params.seed: [one.run(f"{n}{params.seed}", prompt_of(n), params).token_ids for n in LENGTHS]
            for params in (GREEDY, SAMPLED)
        }


def hand_over(two: Pair, mode: Mode, params: SamplingParams, salt: str = "") -> list[Stream]:
    legs = [two.legs(f"{mode}{n}{params.seed}{salt}", prompt_of(n), params, mode) for n in LENGTHS]
    two.step_until(lambda: all(told.ended and rest.ended for told, rest in legs), limit_s=300.0)
    two.settle()
    return [rest for _, rest in legs]


def rows_of_drafts(one: Stepped, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of rows of each drafter step from now on."""
    sizes: list[int] = []
    draft = one.core.executor.draft

    def told(plan: DraftPlan) -> DraftResult:
        sizes.append(len(plan.rows.token_ids))
        return draft(plan)

    monkeypatch.setattr(one.core.executor, "draft", told)
    return sizes


def bytes_of(two: Pair) -> int:
    return two.decode.core.metrics.handoff_bytes


LENIENT: dict[str, tuple[Settings | None, Settings | None]] = {
    "only D drafts": (None, EAGLE3),
    "only P drafts": (EAGLE3, None),
    "another method": (EAGLE, EAGLE3),
    "n-grams on P, a head on D": (ngram(), EAGLE3),
    "a head on P, n-grams on D": (EAGLE3, ngram()),
}


@pytest.mark.parametrize(("case", "policy"), [*((case, "prefer") for case in LENIENT), ("another method", "drop")])
def test_engines_that_draft_unlike_each_other_give_the_same_tokens(
    case: str, policy: str, tmp_path: Path, expected: dict[int | None, list[list[int]]]
) -> None:
    on_p, on_d = (spec(drafter, draft_kv=policy) if drafter else None for drafter in LENIENT[case])
    settings: Settings = {"speculative_config": on_p, "decode": {"speculative_config": on_d, "block_size": 7}}
    with (
        pair(tmp_path, **settings) as two,
        pair(made(tmp_path, "none"), speculative_config=None, decode={"block_size": 7}) as plain,
    ):
        for mode, params in (("push", GREEDY), ("pull", SAMPLED)):
            streams = hand_over(two, mode, params)  # type: ignore[arg-type]
            hand_over(plain, mode, params)  # type: ignore[arg-type]
            assert [stream.token_ids for stream in streams] == expected[params.seed]
            if on_d is not None:
                assert all(stream.accepted for stream in streams)
        metrics = two.decode.core.metrics
        assert (metrics.num_handoffs["committed"], metrics.recoveries) == (2 * len(LENGTHS), {})
        assert not metrics.handoff_failures
        # Only the target's KV moves.
        assert bytes_of(two) == bytes_of(plain)


@pytest.mark.parametrize("num", [0, 1, 5])
def test_a_drafter_of_both_moves_whatever_number_of_drafts_each_makes(
    num: int, tmp_path: Path, expected: dict[int | None, list[list[int]]]
) -> None:
    on_p, on_d = (spec({**EAGLE3, "num_speculative_tokens": k}, draft_kv="prefer") for k in (num, 3))
    with (
        pair(made(tmp_path, "a"), speculative_config=on_p, decode={"speculative_config": on_d}) as two,
        pair(made(tmp_path, "b"), speculative_config=on_d) as alike,
    ):
        streams, others = (hand_over(each, "push", GREEDY) for each in (two, alike))
        assert [stream.token_ids for stream in streams] == expected[None]
        assert bytes_of(two) == bytes_of(alike)
        if num >= 3:  # D takes as many drafts as it makes
            assert [stream.accepted for stream in streams] == [stream.accepted for stream in others]
        if num == 0:
            # D begins with a step of one row, and then drafts with all KV that P's drafter has computed.
            assert sum(sum(stream.accepted) for stream in streams) > 0


def test_under_drop_the_same_drafter_starts_cold(tmp_path: Path, expected: dict[int | None, list[list[int]]]) -> None:
    dropped = spec(EAGLE3, draft_kv="drop")
    with (
        pair(made(tmp_path, "a"), speculative_config=dropped) as two,
        pair(made(tmp_path, "b"), speculative_config=None) as plain,
    ):
        streams = hand_over(two, "push", GREEDY)
        hand_over(plain, "push", GREEDY)
        assert [stream.token_ids for stream in streams] == expected[None]
        assert bytes_of(two) == bytes_of(plain)
        # Entries of a drafter that began after the prompt are not cached as a prefix; those that D computes itself are.
        pool = two.decode.core.cache.pools["draft"]
        assert pool.num_cached == 0
        again = [two.decode.run(f"own{n}", prompt_of(n), GREEDY) for n in LENGTHS]
        assert [stream.token_ids for stream in again] == expected[None]
        assert pool.num_cached > 0


def test_a_cold_drafter_depends_on_nothing_that_others_left_in_its_pages(tmp_path: Path) -> None:
    """Two engines whose pages held different requests before draft alike."""
    found = []
    for salt in ("x", "y"):
        only_d = {"speculative_config": spec(EAGLE3, draft_kv="prefer")}
        with pair(made(tmp_path, salt), speculative_config=None, decode=only_d) as two:
            if salt == "y":
                for kv in two.decode.core.executor.runner.kv.values():  # type: ignore[attr-defined]
                    if kv.spec.owner == "draft":
                        kv.planes[0].fill_(float("nan"))
                        kv.planes[1].fill_(float("nan"))
            found.append([(s.token_ids, s.accepted) for s in hand_over(two, "push", GREEDY)])
    assert found[0] == found[1]
    assert sum(sum(accepted) for _, accepted in found[0]) > 0


@pytest.mark.parametrize("kind", ["full", "windows", "states"])
def test_a_draft_model_that_starts_cold_computes_the_prompt_itself(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafters: list[Settings] = []
    if kind == "states":
        pytest.importorskip("transformers")
        from testkit.checkpoints.granite import make_granite

        target = make_granite(tmp_path / "target")
    else:
        target = make_checkpoint(tmp_path / "target", "llama", num_hidden_layers=2)
        windowed = kind == "windows"
        drafters.append(
            windowed_draft_model(tmp_path / "s") if windowed else draft_model(tmp_path / "s", num_hidden_layers=2)
        )
    itself: Settings = {"method": "draft_model", "model": str(target)}
    for drafter in (itself, *drafters):
        on_d = {
            "speculative_config": spec(drafter, draft_kv="prefer"),
            "max_num_batched_tokens": 9,
            "mamba_block_size": 16,
        }
        with (
            stepped(model=str(target), speculative_config=on_d["speculative_config"]) as one,
            pair(
                made(tmp_path, f"keys {drafter is itself}"), model=str(target), speculative_config=None, decode=on_d
            ) as two,
        ):
            alone = [one.run(str(n), prompt_of(n), GREEDY) for n in LENGTHS]
            sizes = rows_of_drafts(two.decode, monkeypatch)
            streams = hand_over(two, "pull", GREEDY)
            assert max(sizes) <= 9, "what all requests catch up with is in one budget"
            assert [stream.token_ids for stream in streams] == [stream.token_ids for stream in alone]
            if drafter is itself:
                # A drafter that has caught up makes no wrong drafts; the longest prompts catch up last.
                assert all(set(stream.accepted[:-1]) <= {3} for stream in streams)
                # When each catches up depends on when the others' handoffs end.
                assert sum(len(stream.accepted) for stream in streams) >= len(streams)
            # Now D's own entries and those of handoffs without drafter KV are cached prefixes.
            again = hand_over(two, "push", GREEDY, "again")
            assert [stream.token_ids for stream in again] == [stream.token_ids for stream in alone]
            assert two.decode.core.cache.pools["draft"].num_cached > 0


def test_a_cold_request_that_loses_its_pages_drafts_as_if_it_had_computed_all(
    tmp_path: Path, expected: dict[int | None, list[list[int]]]
) -> None:
    on_d = {"speculative_config": spec(EAGLE3, draft_kv="prefer")}
    with pair(tmp_path, speculative_config=None, decode=on_d) as two:
        told, rest = two.legs("r", prompt_of(40), GREEDY, "push")
        two.step_until(lambda: len(rest.token_ids) > 3)
        scheduler = two.decode.core.scheduler
        scheduler.preempt(scheduler.running[0])
        two.step_until(lambda: told.ended and rest.ended)
        assert rest.token_ids == expected[None][LENGTHS.index(40)]
        two.settle()


REFUSED: list[tuple[Settings | None, str, Settings | None, str, str]] = [
    (None, "", EAGLE3, "require", "drafter.method: here '(none|eagle3)', peer '(none|eagle3)'"),
    (EAGLE3, "require", None, "", "drafter.method: here '(none|eagle3)', peer '(none|eagle3)'"),
    (EAGLE3, "require", EAGLE3, "drop", "drafter.kv: here '(require|drop)', peer '(require|drop)'"),
    (EAGLE, "prefer", EAGLE3, "require", "drafter.method: here 'eagle3?', peer 'eagle3?'"),
]


@pytest.mark.parametrize(("on_p", "p_policy", "on_d", "d_policy", "why"), REFUSED)
def test_a_required_drafter_that_the_peer_lacks_fails_the_handoff_with_both_values(
    on_p: Settings | None, p_policy: str, on_d: Settings | None, d_policy: str, why: str, tmp_path: Path
) -> None:
    decode = {"speculative_config": spec(on_d, draft_kv=d_policy) if on_d else None, "recovery": "none"}
    with pair(tmp_path, speculative_config=spec(on_p, draft_kv=p_policy) if on_p else None, decode=decode) as two:
        _, rest = two.legs("r", prompt_of(17), GREEDY, "push")
        two.step_until(lambda: rest.ended)
        assert rest.error is not None
        assert rest.error.startswith("incompatible_peer")
        assert re.search(why, rest.error), rest.error


def test_which_facts_may_differ() -> None:
    base = {"model.weights": "w", "drafter.method": "none"}
    head = {
        **base,
        "drafter.method": "eagle3",
        "drafter.verifier": "coupled",
        "drafter.num_speculative_tokens": "3",
        "group.draft": "g",
    }
    for p, d in itertools.product(["require", "prefer", "drop"], repeat=2):
        differing, moves = differing_facts({**head, "drafter.kv": p}, {**head, "drafter.kv": d})
        assert set(differing) == ({"drafter.kv"} if {p, d} == {"require", "drop"} else set())
        assert moves == ("drop" not in (p, d) or "require" in (p, d))
    lenient = {**head, "drafter.kv": "prefer"}
    assert differing_facts(lenient, base) == differing_facts(base, lenient) == ({}, False)
    assert differing_facts(lenient, {**lenient, "drafter.num_speculative_tokens": "1"}) == ({}, True)
    strict = {**head, "drafter.kv": "require"}
    assert set(differing_facts(strict, {**strict, "drafter.num_speculative_tokens": "1"})[0]) == {
        "drafter.num_speculative_tokens"
    }
    assert differing_facts(strict, {**strict, "drafter.num_speculative_tokens": "auto"}) == ({}, True)
    assert differing_facts(lenient, {**lenient, "group.draft": "other"}) == ({}, False)
    assert set(differing_facts(lenient, {**lenient, "drafter.verifier": "rejection"})[0]) == {"drafter.verifier"}
    assert set(differing_facts(lenient, {**lenient, "model.weights": "v"})[0]) == {"model.weights"}


def test_only_a_prefill_engine_may_make_no_drafts() -> None:
    with (
        pytest.raises(ConfigError, match="num_speculative_tokens: may be 0 with role prefill alone"),
        stepped(model=TARGET, speculative_config=spec({**EAGLE3, "num_speculative_tokens": 0})),
    ):
        pass
