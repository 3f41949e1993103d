"""Draft models with states: they draft what the model computed from scratch over the known tokens would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.config import KVTransferConfig, SpeculativeConfig
from baton.engine.executor import LocalExecutor
from baton.engine.memory.draft_states import DraftStates
from baton.engine.step_plans import DraftPlan, DraftResult, DraftSlots, Noise, Rows
from baton.models.loading.loader import load_model
from baton.sampling_params import SamplingParams
from testkit.checkpoints.kinds import WholeSequence
from testkit.engines import MakeDrafts, Stepped, Stream, draft_by, pair, request, stepped

pytest.importorskip("transformers")
from testkit.checkpoints.granite import make_granite

pytestmark = pytest.mark.usefixtures("one_thread")

Settings = dict[str, Any]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
INTERVAL = 16
LENGTHS = (1, 2, 3, 4, 5, 16, 17, 48, 61)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, 250, (length,), generator=generator).tolist()


PROMPTS = [prompt_of(length) for length in LENGTHS]
CHAT = prompt_of(70)
# Each begins with a part of the one before it.
TURNS = [CHAT, CHAT[:50] + prompt_of(20, 7), CHAT[:50] + prompt_of(20, 7) + prompt_of(9, 8), CHAT[:64], CHAT[:33]]


def relative(path: Path, of: Path) -> Path:
    """A model that often, but not always, agrees with another."""
    path.mkdir()
    for file in of.iterdir():
        if file.name != "model.safetensors":
            (path / file.name).symlink_to(file)
    weights = load_file(of / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in sorted(weights):
        if "norm" not in name and "A_log" not in name:
            weights[name] += 0.2 * weights[name].std() * torch.randn(weights[name].shape, generator=generator)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hybrids: a target, and `small`, which drafts for it."""
    root = tmp_path_factory.mktemp("hybrids")
    relative(root / "small", make_granite(root / "target", 1))
    return root


def settings(folder: Path, **more: Any) -> Settings:
    spec = {"method": "draft_model", "model": str(folder / "small"), "num_speculative_tokens": 3}
    return {
        "model": str(folder / "target"),
        "speculative_config": SpeculativeConfig.parse(json.dumps(spec)),
        "kv_cache_memory": 16 << 20,
        "dtype": "float32",
        "max_num_batched_tokens": 40,
        "mamba_block_size": INTERVAL,
        **more,
    }


def all_of(one: Stepped, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[Stream]:
    streams = [one.add(request(f"{len(one.streams)}", prompt, params)) for prompt in prompts]
    while not all(stream.ended for stream in streams):
        one.step()
    assert one.is_idle()
    return streams


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    """Tokens of all prompts without a drafter."""
    with stepped(**settings(folder, speculative_config=None, enable_prefix_caching=False)) as one:
        return [stream.token_ids for stream in all_of(one, PROMPTS + TURNS)]


def record(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Record (tokens before the drafts, drafts)."""
    seen: list[tuple[list[int], list[int]]] = []

    def draft(before: MakeDrafts, plan: DraftPlan) -> DraftResult:
        result = before(plan)
        seen.extend((c.tolist(), d) for c, d in zip(plan.contexts, result.drafts, strict=True) if d)
        return result

    draft_by(monkeypatch, draft)
    return seen


def test_drafts_are_those_of_a_model_that_begins_anew_each_time(
    folder: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chunks, hits, no, some and all drafts accepted, and preempted requests."""
    seen = record(monkeypatch)
    with stepped(**settings(folder)) as one:
        prompts, scheduler = PROMPTS + TURNS, one.core.scheduler
        streams = [one.add(request(f"{i}", prompt, PARAMS)) for i, prompt in enumerate(prompts)]
        while not all(stream.ended for stream in streams):
            one.step()
            if one.core.metrics.num_steps % 4 == 0 and scheduler.running:
                scheduler.preempt(scheduler.running[-1])
        assert scheduler.num_preemptions > 2
        streams += all_of(one, TURNS)
        assert one.core.metrics.num_cached_tokens >= 48 + 64 + 48 + 32
    assert [stream.token_ids for stream in streams] == plain + plain[len(PROMPTS) :]
    assert {0, 1, 2, 3} == {count for stream in streams for count in stream.accepted}
    model, again = load_model(folder / "small"), {}
    for context, drafts in seen:
        tokens = list(context)
        for draft in drafts:
            if tuple(tokens) not in again:
                whole = WholeSequence(model)
                whole.num_rows = len(tokens)
                hidden, _ = model(torch.tensor(tokens), torch.arange(len(tokens)), whole)
                again[tuple(tokens)] = int(model.compute_logits(hidden[-1:]).argmax())
            assert draft == again[tuple(tokens)]
            tokens.append(draft)
    assert len(again) > 100


def test_a_handoff_changes_neither_tokens_nor_acceptance(folder: Path, plain: list[list[int]], tmp_path: Path) -> None:
    common = settings(folder, integrity="full")
    with stepped(**common) as single, pair(tmp_path, {"block_size": 7}, **common) as two:
        whole = all_of(single, PROMPTS + TURNS)
        assert [stream.token_ids for stream in whole] == plain
        two.check_handoffs(whole, PROMPTS + TURNS, PARAMS)


def state_bytes(model: Path) -> int:
    specs = load_model(model).kv_layers
    planes = [plane for spec in specs for plane in getattr(spec, "planes", ())]
    return sum(plane.num_heads * plane.head_dim * 4 for plane in planes)


def test_the_drafters_state_is_sent_whole_and_none_of_its_scratch(folder: Path, tmp_path: Path) -> None:
    state, attention = state_bytes(folder / "small"), 2 * 2 * 12 * 4
    assert state == state_bytes(folder / "target") == 3 * 4 * (3 * (96 + 12 + 12) + 6 * 12 * 16)
    with pair(tmp_path, **settings(folder)) as two:
        for length in (5, 45):
            before = two.decode.core.metrics.handoff_bytes
            two.legs(f"{length}", prompt_of(length), PARAMS, "push")
            two.settle()
            assert two.decode.core.metrics.handoff_bytes - before == 2 * (state + length * attention)
        # D computes a prompt itself, so that it has both states after it.
        prompt = prompt_of(64, 5)
        alone = two.decode.run("alone", prompt, PARAMS)
        before = two.decode.core.metrics.handoff_bytes
        _, rest = two.legs("again", prompt, PARAMS, "pull")
        two.settle()
        assert (rest.token_ids, rest.accepted) == (alone.token_ids, alone.accepted)
        assert two.decode.core.metrics.handoff_bytes == before


def test_a_failed_handoff_is_recomputed_from_states_that_d_has(folder: Path, tmp_path: Path) -> None:
    transfer = KVTransferConfig(kv_transport="faulty+local://?fault=fail&every=1")
    common = settings(folder, integrity="full", kv_transfer_config=transfer, recovery="recompute")
    with stepped(**settings(folder, enable_prefix_caching=False)) as single, pair(tmp_path, **common) as two:
        two.decode.run("before", CHAT[:60], PARAMS)
        _, rest = two.legs("r", CHAT, PARAMS, "push")
        two.settle()
        assert two.decode.core.metrics.recoveries["recompute"] == 1
        (whole,) = all_of(single, [CHAT])
        assert (rest.token_ids, rest.accepted) == (whole.token_ids, whole.accepted)


def test_a_drafter_that_starts_cold_begins_at_a_state_that_d_has(folder: Path, tmp_path: Path) -> None:
    """The drafter's other layers begin there too, even if D has more of them."""
    itself = {"method": "draft_model", "model": str(folder / "target"), "draft_kv": "prefer"}
    on_d = settings(folder, speculative_config=SpeculativeConfig.parse({**itself, "num_speculative_tokens": 3}))
    with pair(tmp_path, on_d, **settings(folder, speculative_config=None)) as two:
        alone = two.decode.run("alone", CHAT, PARAMS)
        plans = [two.decode.core.executor.draft]
        starts: list[int] = []

        def told(plan: DraftPlan) -> DraftResult:
            starts.append(int(plan.rows.positions[0]))
            return plans[0](plan)

        two.decode.core.executor.draft = told  # type: ignore[method-assign]
        _, rest = two.legs("r", CHAT, PARAMS, "push")
        two.settle()
        assert starts[0] == 64
        assert rest.token_ids == alone.token_ids
        assert set(rest.accepted[:-1]) == {3}


def test_drafts_that_fail_are_drafted_again_from_the_same_states(folder: Path) -> None:
    prompts = PROMPTS[3:6]
    with stepped(**settings(folder)) as one:
        expected = all_of(one, prompts)
    with stepped(**settings(folder)) as one:
        draft, failed = one.core.executor.draft, []

        def fails(plan: DraftPlan) -> DraftResult:
            result = draft(plan)
            if len(plan.num_drafts) > 1:
                failed.append(plan)
                raise RuntimeError("behind the drafter's last write")
            return result

        one.core.executor.draft = fails  # type: ignore[method-assign]
        streams = all_of(one, prompts)
        assert failed
    assert [(s.result, s.accepted) for s in streams] == [(s.result, s.accepted) for s in expected]


# ---------------------------------------------------------------- slots


def plan_of(spans: list[tuple[int, int]], num_drafts: list[int], slots: DraftSlots) -> DraftPlan:
    positions = np.concatenate([np.arange(*span) for span in spans])
    query_start = np.cumsum([0, *(stop - start for start, stop in spans)]).astype(np.int32)
    noise = Noise(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint64), np.zeros(0))
    rows = Rows(positions, positions, query_start, {})
    return DraftPlan(rows, positions, np.array(num_drafts), noise, states={"s": slots})


def bound(states: DraftStates, requests: list[int], spans: list[tuple[int, int]]) -> Any:
    positions = np.concatenate([np.arange(*span) for span in spans])
    query_start = np.cumsum([0, *(stop - start for start, stop in spans)]).astype(np.int32)
    found = states.bind(np.array(requests), positions, query_start)["s"]
    return found.read.tolist(), list(zip(found.kept.tolist(), found.write.tolist(), strict=True))


def slots_of(read: list[int], scratch: list[list[int]], *checkpoints: tuple[int, int, int]) -> DraftSlots:
    columns = np.array(checkpoints, dtype=np.int64).reshape(-1, 3).T
    return DraftSlots(np.array(read), np.array(scratch), *columns)


def test_each_forward_goes_on_from_the_state_before_its_first_row() -> None:
    slots = slots_of([0, 50], [[11, 12, 13], [51, 52, 53]], (1, 8, 60), (1, 10, 61))
    states = DraftStates(plan_of([(0, 3), (6, 12)], [0, 4], slots))
    # The first request has no drafts; the second's first draft is computed with the rows themselves.
    found = bound(states, [0, 1], [(0, 3), (6, 13)])
    assert found == ([0, 50], [(2, 11), (3 + 1, 60), (3 + 3, 61), (3 + 5, 51), (3 + 6, 52)])
    assert bound(states, [1], [(13, 14)]) == ([52], [(0, 53)])
    assert bound(states, [1], [(14, 15)]) == ([53], [(0, 52)])
    assert bound(states, [1], [(15, 16)]) == ([52], []), "behind the last draft comes none"
    assert list(states.left_out()) == []


@pytest.mark.parametrize("num_drafts", [0, 1, 2])
def test_of_few_drafts_no_slot_is_missing(num_drafts: int) -> None:
    slots = slots_of([50], [[51, 52][: max(1, num_drafts)]])
    states = DraftStates(plan_of([(6, 7)], [num_drafts], slots))
    assert bound(states, [0], [(6, 8)]) == ([50], [(0, 51), (1, 52)][: max(1, num_drafts)])
    if num_drafts == 2:
        assert bound(states, [0], [(8, 9)]) == ([52], [])


def test_a_state_that_no_row_goes_into_stays_what_it_was() -> None:
    """After the end of a draft model's context its last state stands for all later ones."""
    slots = slots_of([50, 70], [[51, 52, 53], [71, 72, 73]], (0, 8, 60), (0, 10, 61), (1, 12, 80))
    states = DraftStates(plan_of([(6, 12), (10, 14)], [3, 3], slots))
    assert bound(states, [0], [(6, 10)]) == ([50], [(1, 60), (3, 51)])
    assert list(states.left_out()) == [("s", 51, 61), ("s", 70, 71), ("s", 71, 80)]


def test_after_its_context_a_draft_model_keeps_its_last_state(tmp_path: Path) -> None:
    """Whatever the slots held before, which may be another request's state."""
    make_granite(tmp_path / "target", 1)
    make_granite(tmp_path / "small", 2, max_position_embeddings=24)
    seen = []
    with stepped(**settings(tmp_path, max_num_batched_tokens=10, enable_prefix_caching=False)) as one:
        assert isinstance(one.core.executor, LocalExecutor)
        memory = one.core.executor.runner.kv["draft"]
        memory.pages.fill_(255)
        for length in (24, 40):
            stream = one.add(request(f"{length}", prompt_of(40)[:length], PARAMS))
            while len(stream.token_ids) < 4:
                one.step()
            (running,) = one.core.scheduler.running
            seen.append([plane[running.kv.slots("draft")[0]].clone() for plane in memory.planes])
            while not stream.ended:
                one.step()
            assert not any(stream.accepted)
    assert all(torch.equal(*both) for both in zip(*seen, strict=True))
    assert all(plane.any() for plane in seen[0])
