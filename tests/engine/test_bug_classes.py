"""Bugs that other engines have had with speculation and handoffs, each injected into this engine and detected.

A *mutant* removes one safeguard from the engine's own code (not from the protocol's). Without the mutant the requests
must come out as on one engine; with it they must not. `MUTANTS` is the table: class, safeguard, workload.

A: the drafter's lifecycle. B: counts of blocks, and lookahead. C: the first decode step. D: geometry. E: auxiliary
state. For EAGLE-3's features, which are three times as wide as the target's (C), there is no mutant: features are never
sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from baton.engine.core import EngineCore
from baton.engine.legs.handoff_legs import HandoffLegs
from baton.engine.legs.leg import PagesReleased
from baton.engine.planning import DraftRows
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler
from baton.engine.step import StepRunner
from baton.kv.block_tables import BlockTables, Destination
from baton.kv.cache import KVCache
from baton.kv.geometry import Geometry
from baton.kv.interval import Interval
from baton.kv.spec import GroupSpec
from baton.models.registry import MODELS
from benchmarks.parity.cases import CHUNK, Case
from benchmarks.parity.trial import Cell, Trial, compare
from testkit.checkpoints import kinds
from testkit.engines import Mode, Pair, Stream

pytestmark = pytest.mark.usefixtures("one_thread")
Patch = pytest.MonkeyPatch


# ---------------------------------------------------------------- A: the drafter's lifecycle


def finalise_before_the_drafter(patch: Patch, two: Pair) -> None:
    """Final entries are declared right after the target's forward."""
    waiting: list[tuple[StepRunner, Sequence[DraftRows]]] = []
    draft, finalise = StepRunner._draft, EngineCore._finalise

    def later(core: EngineCore, scheduled: Any, rows: Sequence[DraftRows]) -> None:
        finalise(core, scheduled, rows)
        while waiting:
            draft(*waiting.pop())

    def put_off(steps: StepRunner, rows: Sequence[DraftRows]) -> dict[Request, Exception]:
        waiting.append((steps, rows))
        return {}

    patch.setattr(StepRunner, "_draft", put_off)
    patch.setattr(EngineCore, "_finalise", later)


def run_the_drafter_only_where_it_drafts(patch: Patch, two: Pair) -> None:
    """All chunks of a prompt but the last have no drafts, and then no KV of the drafter."""
    draft = StepRunner._draft
    patch.setattr(StepRunner, "_draft", lambda steps, rows: draft(steps, [r for r in rows if r.num_drafts]))


def lose_the_end_of_sending(patch: Patch, two: Pair) -> None:
    """The engine misses that a prefill leg's pages are free."""
    carry_out = EngineCore._carry_out

    def lose(core: EngineCore, effects: Sequence[Any]) -> None:
        carry_out(core, [effect for effect in effects if not isinstance(effect, PagesReleased)])

    patch.setattr(EngineCore, "_carry_out", lose)


# ---------------------------------------------------------------- B: counts of blocks, and lookahead


def declare_all_that_is_allocated(patch: Patch, two: Pair) -> None:
    """P's pages count as full of final tokens as soon as they are allocated."""
    original = HandoffLegs._final

    def final(self: HandoffLegs, request: Request, seeded: bool) -> dict[str, int]:
        found = original(self, request, seeded)
        return {name: len(request.kv.pages[name]) * self.cache.pools[name].page_size for name in found}

    patch.setattr(HandoffLegs, "_final", final)


def send_the_last_pages(patch: Patch, two: Pair) -> None:
    """If there is a page more than the tokens need, the first one is omitted."""
    original = KVCache.offered

    def offered(self: KVCache, tables: BlockTables, num_tokens: int) -> dict[str, list[int]]:
        found = original(self, tables, num_tokens)
        counts = {name: -(-num_tokens // pool.page_size) for name, pool in self.pools.items()}
        return {name: pages[-counts[name] :] for name, pages in found.items()}

    patch.setattr(KVCache, "offered", offered)


def receive_into_the_last_pages(patch: Patch, two: Pair) -> None:
    """D has a page for the next token too, and omits its first one."""
    receive_otherwise(patch, two, lambda pages, count, hit: pages[-count:])


def receive_without_the_pages_of_the_hit(patch: Patch, two: Pair) -> None:
    """The page list begins after the prefix hit, but the tokens at 0."""
    receive_otherwise(patch, two, lambda pages, count, hit: pages[hit:] + pages[:hit])


def receive_otherwise(patch: Patch, two: Pair, change: Callable[[list[int], int, int], list[int]]) -> None:
    """`change` gets a group's pages, the number that the prompt needs, and the number of fully hit pages."""
    assert two.decode.core.legs is not None
    agent, pools = two.decode.core.legs.agent, two.decode.core.cache.pools
    original = agent.open_decode

    def open_decode(ticket: Any, n: int, wanted: dict[str, Interval], pages: dict[str, list[int]]) -> None:
        changed = {}
        for name, ids in pages.items():
            size = pools[name].page_size
            changed[name] = change(ids, -(-n // size), wanted[name].start // size)
        original(ticket, n, wanted, changed)

    patch.setattr(agent, "open_decode", open_decode)


def count_the_first_token_to_the_prompt(patch: Patch, two: Pair) -> None:
    """D asks for the entries of a prompt with the sampled token after it."""
    original = Scheduler.start_receive

    def start_receive(self: Scheduler, request: Request, *more: Any) -> Destination | None:
        request.prefill_len += 1
        return original(self, request, *more)

    patch.setattr(Scheduler, "start_receive", start_receive)


def clip_states_by_the_hit(patch: Patch, two: Pair) -> None:
    """D's prefix hit is clipped from what it wants of every group."""

    def change(found: Destination, rules: KVCache, name: str) -> Interval:
        wanted = found.wanted[name]
        return Interval(wanted.stop, wanted.stop) if max(found.hits.values()) else wanted

    want_otherwise(patch, change, "state")


def want_otherwise(patch: Patch, change: Callable[[Destination, KVCache, str], Interval], kind: str) -> None:
    """`change` what D wants of the groups of one kind."""
    original = KVCache.attach_destination

    def attach(self: KVCache, tables: BlockTables, tokens: Sequence[int], *more: Any) -> Destination | None:
        found = original(self, tables, tokens, *more)
        if found is None:
            return None
        names = [name for name, rules in self.rules.items() if kind in (rules.kind, "draft" if rules.module else "")]
        return Destination(found.hits, found.wanted | {name: change(found, self, name) for name in names})

    patch.setattr(KVCache, "attach_destination", attach)


# ---------------------------------------------------------------- C: the first decode step


def begin_without_the_drafts(patch: Patch, two: Pair) -> None:
    change_seeds(patch, two, [])


def begin_with_placeholders(patch: Patch, two: Pair) -> None:
    change_seeds(patch, two, [0, 0, 0])


def change_seeds(patch: Patch, two: Pair, drafts: list[int]) -> None:
    original = EngineCore._committed

    def committed(self: EngineCore, request: Request, seeds: Any) -> None:
        original(self, request, msgspec.structs.replace(seeds, draft_token_ids=drafts))

    patch.setattr(EngineCore, "_committed", committed)


def compute_the_last_token_again(patch: Patch, two: Pair) -> None:
    """D's first step begins with the prompt's last token: a state processes it twice."""
    original = EngineCore._committed

    def committed(self: EngineCore, request: Request, seeds: Any) -> None:
        original(self, request, seeds)
        request.num_computed -= 1
        request.num_drafted -= 1

    patch.setattr(EngineCore, "_committed", committed)


def hold_the_drafters_last_entry(patch: Patch, two: Pair) -> None:
    """The entry that depends on the first token is not wanted."""
    want_otherwise(patch, lambda found, cache, name: _cut(found.wanted[name], 1), "draft")


def _cut(interval: Interval, count: int) -> Interval:
    return Interval(interval.start, max(interval.start, interval.stop - count))


# ---------------------------------------------------------------- D: geometry


def the_drafter_has_the_targets_heads(patch: Patch, two: Pair) -> None:
    """One entry size for all groups."""
    misread_the_drafter(patch, two, lambda spec, target: msgspec.structs.replace(spec, planes=target.planes))


def the_drafter_has_the_targets_pages(patch: Patch, two: Pair) -> None:
    """One block size for all groups."""
    misread_the_drafter(patch, two, lambda spec, target: msgspec.structs.replace(spec, page_size=target.page_size))


def misread_the_drafter(patch: Patch, two: Pair, change: Callable[[GroupSpec, GroupSpec], GroupSpec]) -> None:
    """Both engines report a wrong layout of the drafter's pages."""
    original, seen = Geometry.block_major, dict[str, GroupSpec]()

    def block_major(spec: GroupSpec, num_pages: int, **more: Any) -> Geometry:
        seen[spec.owner] = spec
        return original(change(spec, seen["target"]) if spec.owner == "draft" else spec, num_pages, **more)

    patch.setattr(Geometry, "block_major", block_major)


# ---------------------------------------------------------------- E: auxiliary state


def send_full_attention_alone(patch: Patch, two: Pair) -> None:
    want_otherwise(patch, lambda found, cache, name: _cut(found.wanted[name], 1 << 20), "sliding_window")


def send_no_state(patch: Patch, two: Pair) -> None:
    want_otherwise(patch, lambda found, cache, name: Interval(1, 1), "state")


def send_no_latents(patch: Patch, two: Pair) -> None:
    want_otherwise(patch, lambda found, cache, name: _cut(found.wanted[name], 1 << 20), "mla")


def send_no_entries(patch: Patch, two: Pair) -> None:
    want_otherwise(patch, lambda found, cache, name: _cut(found.wanted[name], 1 << 20), "compressed")


def send_no_kv_of_the_drafter(patch: Patch, two: Pair) -> None:
    want_otherwise(patch, lambda found, cache, name: _cut(found.wanted[name], 1 << 20), "draft")


def send_a_scratch_slot(patch: Patch, two: Pair) -> None:
    """A slot that a verification would write is sent instead of the state."""
    original = KVCache.offered

    def offered(self: KVCache, tables: BlockTables, num_tokens: int) -> dict[str, list[int]]:
        return {**original(self, tables, num_tokens), **{name: slots[:1] for name, slots in tables.scratch.items()}}

    patch.setattr(KVCache, "offered", offered)


# ---------------------------------------------------------------- the table


TOKENS, DRAFTS, HELD = "tokens [", "accepted [", "pages of P that no handoff uses"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A removed safeguard, the workload that must show it, and what `shows` it. With `DRAFTS` all tokens are right.
    `before`: apply it before the engines are built.
    """

    letter: str
    breaks: Callable[[Patch, Pair], None]
    shows: str
    target: str = "llama"
    drafter: str = "eagle"
    condition: str = "whole"
    sizes: str = "8/24"
    before: bool = False

    @property
    def name(self) -> str:
        return f"{self.letter}-{self.breaks.__name__}"


EVERY_KIND = "latents, window and states"
OTHER_HEADS = "eagle3, d2t"
MUTANTS = [
    Mutant("A", finalise_before_the_drafter, DRAFTS),
    Mutant("A", run_the_drafter_only_where_it_drafts, DRAFTS, condition="chunked"),
    Mutant("A", lose_the_end_of_sending, HELD),
    Mutant("B", declare_all_that_is_allocated, TOKENS, condition="chunked"),
    Mutant("B", send_the_last_pages, TOKENS),
    Mutant("B", receive_into_the_last_pages, TOKENS, sizes="8/24"),
    Mutant("B", receive_without_the_pages_of_the_hit, TOKENS, condition="hit on D", sizes="16/7"),
    Mutant("B", count_the_first_token_to_the_prompt, "not_final"),
    Mutant("B", clip_states_by_the_hit, TOKENS, EVERY_KIND, condition="hit on D"),
    Mutant("C", begin_without_the_drafts, DRAFTS),
    Mutant("C", begin_with_placeholders, DRAFTS),
    Mutant("C", compute_the_last_token_again, TOKENS, EVERY_KIND),
    Mutant("C", hold_the_drafters_last_entry, DRAFTS),
    # vllm#47466: the last prompt token ran as a verification over a delta net's state (GSM8K 0.15).
    Mutant("C", compute_the_last_token_again, TOKENS, "qwen3_5_text", "mtp"),
    # vllm#54926: with Gemma 4's assistant D did not begin with drafts.
    Mutant("C", begin_without_the_drafts, DRAFTS, "gemma4_text", "assistant"),
    Mutant("D", the_drafter_has_the_targets_heads, "bytes were sent", drafter=OTHER_HEADS, before=True),
    Mutant("D", the_drafter_has_the_targets_pages, "register_refused", sizes="per group", before=True),
    Mutant("E", send_full_attention_alone, TOKENS, "mistral, window"),
    Mutant("E", send_no_state, TOKENS, EVERY_KIND),
    Mutant("E", send_no_latents, TOKENS, EVERY_KIND),
    Mutant("E", send_a_scratch_slot, TOKENS, EVERY_KIND),
    Mutant("E", send_no_state, TOKENS, "nemotron_h", "mtp"),
    # vllm#43765: states in groups of their own, beside those of the attention layers.
    Mutant("E", send_no_state, TOKENS, "qwen3_5_text", "mtp"),
    # sglang#36140: D begins with nothing of a block drafter.
    Mutant("E", send_no_kv_of_the_drafter, DRAFTS, "llama", "dflash"),
    Mutant("E", send_no_kv_of_the_drafter, DRAFTS, "llama", "dspark"),
    Mutant("E", send_no_latents, TOKENS, "kimi_linear"),
    Mutant("E", send_no_entries, TOKENS, "deepseek_v4", "mtp"),
    Mutant("E", send_full_attention_alone, TOKENS, "deepseek_v4", "mtp"),
]
LENGTHS = (1, 2, 8, 9, 15, 16, 22, 23, 24, 31, 35, 48)


def cases_of(condition: str, mode: Mode) -> list[Case]:
    return [Case(condition, mode, length, number, seed=7) for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A pair's trial and one engine's streams of its cases, computed by correct engines once each."""
    known: dict[tuple[str, str, str], tuple[Trial, dict[Case, Stream]]] = {}

    def trial(mutant: Mutant) -> tuple[Trial, dict[Case, Stream]]:
        key = mutant.target, mutant.drafter, mutant.condition
        if key not in known:
            found = Trial(mutant.target, mutant.drafter, tmp_path_factory.mktemp("trial"))
            known[key] = found, found.alone(cases_of(mutant.condition, "push"))
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(*kinds.REGISTERED)
        assert kinds.MODEL_TYPE in MODELS
        yield trial


def handed_over(mutant: Mutant, trials: Any, patch: Patch | None) -> Cell:
    trial, alone = trials(mutant)
    if patch is not None and mutant.before:
        mutant.breaks(patch, None)  # type: ignore[arg-type]
    with trial.pair(mutant.sizes) as two:
        if patch is not None and not mutant.before:
            mutant.breaks(patch, two)
        if patch is not None and mutant.shows == HELD:
            return Cell(failures=held(two, alone))
        return compare(two, alone, limit_s=300.0)


def held(two: Pair, alone: dict[Case, Stream]) -> list[str]:
    """Until the requests have ended, and P's agent has no handoff left."""
    with pytest.raises(AssertionError):
        compare(two, alone, limit_s=1.0)
    two.step_until(lambda: all(stream.ended for stream in two.decode.streams.values()))
    agent = two.prefill.engine.agent
    assert agent is not None
    two.step_until(lambda: not agent.stats().outstanding)
    two.prefill.step()
    return [HELD] * two.prefill.core.load().num_referenced_pages


SOUND = {(m.target, m.drafter, m.condition, m.sizes): m for m in MUTANTS}


@pytest.mark.parametrize("mutant", SOUND.values(), ids=[", ".join(key) for key in SOUND])
def test_without_a_mutant_all_is_as_on_one_engine(mutant: Mutant, trials: Any) -> None:
    cell = handed_over(mutant, trials, None)
    assert cell.failures == []
    assert cell.num_identical == len(LENGTHS)
    assert cell.num_bytes == cell.wanted_bytes


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_is_caught(mutant: Mutant, trials: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = handed_over(mutant, trials, monkeypatch).failures
    found = [text for text in failures if mutant.shows in text]
    assert found, failures
    assert found == failures or mutant.shows != DRAFTS, "a drafter decides no token"


def test_every_class_has_mutants() -> None:
    assert {mutant.letter for mutant in MUTANTS} == set("ABCDE")
    assert all(len(list(group)) > 1 for _, group in itertools.groupby(MUTANTS, lambda m: m.letter))
    assert max(LENGTHS) > CHUNK
