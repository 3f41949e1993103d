"""Every drafting method with prefix hits, chunks, preemption and handoffs: always the tokens without a drafter, and
after handoffs the acceptance of one engine.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from baton.engine.config import SpeculativeConfig
from baton.engine.step_plans import DraftPlan, DraftResult
from baton.errors import CheckpointError
from baton.kv.cache import KVCache
from baton.models.architectures.glm4_moe import Glm4Moe
from baton.models.config import ModelConfig, RawConfig
from baton.models.loading.loader import load_model
from baton.sampling_params import SamplingParams
from testkit.checkpoints.common import make_checkpoint, make_drafter
from testkit.checkpoints.drafters_layers import block_drafter, latent_head, make_mtp_checkpoint, mtp
from testkit.checkpoints.drafters_tokens import draft_model, ngram, windowed_draft_model
from testkit.checkpoints.gemma4 import make_assistant, make_gemma4
from testkit.checkpoints.kinds import WholeSequence
from testkit.engines import MakeDrafts, Mode, Stepped, draft_by, pair, request, stepped

Settings = dict[str, Any]
NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7, seed=5, ignore_eos=True, logprobs=0)
# One token, fewer than drafts, one less and one more than pages, and multiples of both page sizes.
WINDOW = 6
LENGTHS = [1, 2, 6, 7, 15, 16, 42, 48]


def eagle31(path: Path) -> Settings:
    flags = {"fc_norm": True, "norm_output": True}
    made = make_drafter(path / "head", "eagle3", path / "target", draft_vocab_size=200, **flags)
    return {"method": "eagle3", "model": str(made), "num_speculative_tokens": 3}


MADE: dict[str, Callable[[Path], Settings]] = {
    "ngram": lambda path: ngram(),
    "draft_model": lambda path: draft_model(path / "small"),
    "draft_model with a window": lambda path: windowed_draft_model(path / "small"),
    "the target itself": lambda path: {"method": "draft_model", "model": str(path / "target")},
    "eagle31": eagle31,
    "a head of latents": lambda path: latent_head(path / "latent", path / "target"),
    "a head on latents": lambda path: eagle31(path),
    "dflash": lambda path: block_drafter(path / "dflash", path / "target", "dflash"),
    "dspark": lambda path: block_drafter(path / "dspark", path / "target", "dspark"),
    "assistant": lambda path: make_assistant(path / "assistant", path / "target"),
    "mtp": lambda path: mtp(),
    "mtp of keys and values": lambda path: mtp(),
    "mtp of three modules": lambda path: mtp(),
}
# The targets of drafters that are not for a Llama.
SHAPES = {
    "a head on latents": "deepseek_v3",
    "assistant": "gemma4",
    "mtp": "deepseek_v3",
    "mtp of keys and values": "glm4_moe",
    "mtp of three modules": "three modules",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("llama", "deepseek_v3", "gemma4", "glm4_moe", "three modules")
    made = {name: tmp_path_factory.mktemp(name) for name in names}
    make_checkpoint(made["llama"] / "target", "llama", num_hidden_layers=2, vocab_size=260)
    for shape in ("deepseek_v3", "glm4_moe"):
        make_mtp_checkpoint(made[shape] / "target", shape)
    make_mtp_checkpoint(made["three modules"] / "target", "glm4_moe", num=3)
    make_gemma4(made["gemma4"] / "target")
    return made


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["llama"]


Expected = dict[str, list[Any]]


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Callable[[str], Expected]:
    """Tokens and logprobs of every prompt without a drafter, greedy and sampled."""

    @functools.cache
    def run(target: str) -> Expected:
        with stepped(**settings_of(folders[target], None)) as one:
            return {
                name: [one.run(f"{name}{n}", prompt_of(n), params).result for n in LENGTHS]
                for name, params in (("greedy", GREEDY), ("drawn", SAMPLED))
            }

    return run


def prompt_of(length: int, salt: int = 0) -> list[int]:
    # It repeats itself, so that prompt lookup finds matches.
    return [3 + (5 * (i % 9) + 13 * salt + (i % 9) ** 2) % 200 for i in range(length)]


def settings_of(folder: Path, drafter: Settings | None, **more: Any) -> Settings:
    spec = None if drafter is None else SpeculativeConfig.parse(json.dumps(drafter))
    return {"model": str(folder / "target"), "speculative_config": spec, **more}


def record_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, tuple[int, ...]]]:
    """Record (position and token before the drafts, drafts): random drafters are hardly ever right."""
    found: list[tuple[int, int, tuple[int, ...]]] = []

    def draft(before: MakeDrafts, plan: DraftPlan) -> DraftResult:
        result = before(plan)
        last = plan.rows.query_start[1:] - 1
        places = zip(plan.rows.positions[last].tolist(), plan.rows.token_ids[last].tolist(), strict=True)
        found.extend((*place, tuple(ids)) for place, ids in zip(places, result.drafts, strict=True) if ids)
        return result

    draft_by(monkeypatch, draft)
    return found


def run_all(one: Stepped, name: str, params: SamplingParams) -> list[Any]:
    streams = [one.add(request(f"{name}{n}", prompt_of(n), params)) for n in LENGTHS]
    while not all(stream.ended for stream in streams):
        one.step()
    assert one.is_idle()
    return streams


@pytest.mark.parametrize("drafter", MADE)
def test_a_drafter_changes_no_token_and_a_handoff_neither_drafts_nor_acceptance(
    drafter: str,
    folders: dict[str, Path],
    plain: Callable[[str], Expected],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = SHAPES.get(drafter, "llama")
    folder, expected = folders[target], plain(target)
    made = MADE[drafter](folder)
    drafted = record_drafts(monkeypatch)
    with stepped(**settings_of(folder, made, block_size=16)) as one:
        alone = {"greedy": run_all(one, "g", GREEDY), "drawn": run_all(one, "d", SAMPLED)}
        again = run_all(one, "again", GREEDY)  # from the prefix cache
    for name, streams in alone.items():
        assert [stream.result for stream in streams] == expected[name]
    assert [s.result for s in again] == [s.result for s in alone["greedy"]]
    assert [s.accepted for s in again] == [s.accepted for s in alone["greedy"]]
    # Chunks that end inside pages, and preempted requests.
    small = settings_of(folder, made, block_size=7, max_num_batched_tokens=9, max_num_seqs=3)
    with stepped(**small) as one:
        streams, scheduler = [one.add(request(f"g{n}", prompt_of(n), GREEDY)) for n in LENGTHS], one.core.scheduler
        while not all(stream.ended for stream in streams):
            one.step()
            if one.core.metrics.num_steps % 5 == 0 and scheduler.running:
                scheduler.preempt(scheduler.running[-1])
        assert scheduler.num_preemptions > 1
        assert [stream.result for stream in streams] == expected["greedy"]
        assert [stream.accepted for stream in streams] == [stream.accepted for stream in alone["greedy"]]
    by_one = set(drafted)
    assert len(by_one) > 2 * len(LENGTHS)
    drafted.clear()
    sizes: Settings = {"block_size": 16, "max_num_batched_tokens": 20, "decode": {"block_size": 7}}
    with pair(tmp_path, **settings_of(folder, made), **sizes) as two:
        for mode, params, name in (("push", GREEDY, "greedy"), ("pull", SAMPLED, "drawn")):
            legs = [two.legs(f"{mode}{name}{n}", prompt_of(n), params, _mode(mode)) for n in LENGTHS]
            two.step_until(lambda legs=legs: all(told.ended and rest.ended for told, rest in legs), limit_s=300.0)
            two.settle()
            assert [rest.result for _, rest in legs] == expected[name]
            assert [rest.accepted for _, rest in legs] == [stream.accepted for stream in alone[name]]
        assert set(drafted) == by_one
        metrics = two.decode.core.metrics
        assert (metrics.num_handoffs["committed"], metrics.recoveries) == (2 * len(LENGTHS), {})


def test_states_of_modules_that_do_not_fit_are_not_taken(
    folders: dict[str, Path], plain: Callable[[str], Expected], tmp_path: Path
) -> None:
    expected = plain("three modules")["greedy"]
    with pair(tmp_path, **settings_of(folders["three modules"], mtp())) as two:
        assert two.prefill.core.legs is not None
        for change in (-9999, -4, 4):
            two.prefill.core.legs.alter_seeds = lambda seeds, change=change: replace(
                seeds, drafter_states=(seeds.drafter_states + b"1234")[: len(seeds.drafter_states) + change]
            )
            _, rest = two.legs(f"{change}", prompt_of(LENGTHS[-1]), GREEDY, "push")
            two.step_until(lambda rest=rest: rest.ended)
            assert rest.result == expected[-1]
            two.settle()
        assert two.decode.core.metrics.handoff_failures["bad_seeds"] == 3


def test_a_windows_pages_stay_while_a_later_module_reads_them(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Module j has j entries fewer. No known target has several modules and windows."""
    plain = Glm4Moe.parse_config.__func__  # type: ignore[attr-defined]

    def windowed(cls: type[Glm4Moe], raw: RawConfig) -> ModelConfig:
        config: ModelConfig = plain(cls, raw)
        return dataclasses.replace(config, windows=(WINDOW,) * config.num_layers)

    monkeypatch.setattr(Glm4Moe, "parse_config", classmethod(windowed))
    settings = settings_of(folders["three modules"], mtp(5), block_size=1)
    drafted = record_drafts(monkeypatch)
    with monkeypatch.context() as kept:
        kept.setattr(KVCache, "slide", lambda *_: None)
        with stepped(**settings) as one:
            expected = [(s.token_ids, s.accepted) for s in run_all(one, "g", GREEDY)]
    by_all, drafted[:] = sorted(drafted), []
    with stepped(**settings) as one:
        assert [(s.token_ids, s.accepted) for s in run_all(one, "g", GREEDY)] == expected
    assert sorted(drafted) == by_all


def _mode(name: str) -> Mode:
    return "push" if name == "push" else "pull"


def test_a_model_that_drafts_for_itself_is_always_right(folder: Path) -> None:
    drafter = {"method": "draft_model", "model": str(folder / "target"), "num_speculative_tokens": 3}
    with stepped(**settings_of(folder, drafter)) as one:
        for params in (GREEDY, SAMPLED):
            for n in LENGTHS:
                stream = one.run(f"{n}{params.seed}", prompt_of(n), params)
                assert stream.accepted == [3, 3, 1]  # ten tokens: one, four, four, one


def test_drafts_are_those_of_the_small_model_computed_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = windowed_draft_model(folder / "small")
    model, seen = load_model(drafter["model"]), []

    def whole(tokens: list[int], num: int) -> list[int]:
        import torch

        found: list[int] = []
        for _ in range(num):
            ids = torch.tensor(tokens + found)
            hidden, _ = model(ids, torch.arange(len(ids)), WholeSequence(model))
            found.append(int(model.compute_logits(hidden[-1:]).argmax()))
        return found

    def draft(before: MakeDrafts, plan: DraftPlan) -> DraftResult:
        result = before(plan)
        seen.extend(zip([context.tolist() for context in plan.contexts], result.drafts, strict=True))
        return result

    draft_by(monkeypatch, draft)
    with stepped(**settings_of(folder, drafter, max_num_batched_tokens=20)) as one:
        run_all(one, "g", GREEDY)
    drafted = [(context, drafts) for context, drafts in seen if drafts]
    assert len(drafted) > 3 * len(LENGTHS)
    for context, drafts in drafted:
        assert drafts == whole(context, len(drafts))


def test_there_are_no_drafts_after_the_context_of_a_draft_model(folder: Path, tmp_path: Path) -> None:
    drafter = draft_model(tmp_path / "short", max_position_embeddings=24)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prompts = [prompt_of(n) for n in (3, 15, 22, 23, 24, 40)]
    with stepped(**settings_of(folder, None)) as one:
        expected = [one.run(str(i), prompt, params).token_ids for i, prompt in enumerate(prompts)]
    with stepped(**settings_of(folder, drafter, max_num_batched_tokens=10)) as one:
        streams = [one.run(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        assert [stream.token_ids for stream in streams] == expected
        assert streams[0].accepted
        assert not streams[-1].accepted


def test_models_that_cannot_draft_for_a_target_are_refused(folder: Path, tmp_path: Path) -> None:
    drafter = draft_model(tmp_path / "other", vocab_size=300)
    with (
        pytest.raises(CheckpointError, match="drafter: vocab_size is 300, the target's is 260"),
        stepped(**settings_of(folder, drafter)),
    ):
        pass
