"""Bugs that other engines have had, each injected into the vLLM plug-in and detected; without vLLM.

Both halves of the plug-in run, on P and on D, over memory whose entries depend on their layer and tokens. vLLM is
modelled by what matters here: chunks, blocks for drafts after the tokens, windows that free blocks, and blocks that
others overwrite once they are unreferenced. The agents are replaced by the planner: copies run at once, or as late as
allowed.

A *mutant* removes one safeguard from the plug-in's own code. Classes as in `tests/engine/test_bug_classes.py`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from baton.errors import ProtocolError
from baton.handoff.agent.leg_events import DecodePages
from baton.handoff.plan.planner import plan_copies
from baton.handoff.protocol import events as ev
from baton.handoff.protocol.messages import Seeds
from baton.kv.interval import Interval
from baton.testing import RecordingAgent
from baton.vllm.memory import geometry
from baton.vllm.memory import geometry as geometry_module
from baton.vllm.memory.geometry import CacheLayout, describe_caches
from baton.vllm.memory.groups import CacheTable, LayerGroup, split_tables
from baton.vllm.scheduler import SchedulerSide
from baton.vllm.worker import WorkerSide
from tests.vllm.test_plugin_scheduler import Pool, Request, leg, side, ticket

Patch = pytest.MonkeyPatch
KERNEL_TOKENS = 4
WINDOW = 6
NUM_TARGET_LAYERS = 4
DRAFTER = 4
LOOKAHEAD = 3
GARBAGE = -1.0


def layer_name(layer: int) -> str:
    return f"model.layers.{layer}.attn"


def entry_of(layer: int, tokens: Sequence[int]) -> float:
    """A layer's entry for the last of `tokens`, which depends on all of them."""
    return float(zlib.crc32(repr((layer, list(tokens))).encode()) % (1 << 20))


class Engine:
    """An engine's memory, block pool and both halves of the plug-in. `block_size` is vLLM's; its kernel's is 4."""

    def __init__(self, role: str, block_size: int, with_states: bool) -> None:
        full = [0, 1, 2] if with_states else [0, 1, 2, DRAFTER]
        other = ("state", None, 1) if with_states else ("sliding_window", WINDOW, block_size)
        self.tables = [
            CacheTable(0, "full", None, block_size, tuple(map(layer_name, full))),
            CacheTable(1, *other, (layer_name(3),)),  # type: ignore[arg-type]
        ]
        # Layers are not equally spaced.
        place = {0: 0, 1: 1, 2: 3, DRAFTER: 2}
        pages = 100 * block_size // KERNEL_TOKENS
        buffer = torch.full((4, pages, 1, KERNEL_TOKENS, 2), GARBAGE)
        rest = torch.full((100, 1, 1, 2) if with_states else (pages, 1, KERNEL_TOKENS, 2), GARBAGE)
        self.caches = {layer_name(layer): buffer[place[layer]] for layer in full} | {layer_name(3): rest}
        groups = split_tables(self.tables, NUM_TARGET_LAYERS)
        self.layout: CacheLayout = describe_caches(self.caches, groups, dict.fromkeys(self.caches, "tokens"), "token")
        self.pool, self.agent = Pool(), RecordingAgent()
        self.scheduler = side(role, truncate=with_states and role == "P", tables=self.tables, pool=self.pool)
        self.worker = WorkerSide(self.layout)
        self.worker.bind(self.agent)
        self.blocks: tuple[list[int], ...] = ([], [])
        self._free = [list(range(98, 0, -3)), list(range(1, 99, 2))]

    def reserve(self, num_tokens: int) -> tuple[list[int], ...]:
        """Allocate blocks for `num_tokens` tokens. Returns the new ones."""
        fresh: tuple[list[int], ...] = ([], [])
        for number, table in enumerate(self.tables):
            wanted = 1 if table.kind == "state" else -(-num_tokens // table.block_size)
            while len(self.blocks[number]) < wanted:
                block = self._free[number].pop()
                self.blocks[number].append(block)
                fresh[number].append(block)
        return fresh

    def slot(self, table: int, layer: int, token: int) -> torch.Tensor:
        size = self.tables[table].block_size
        if self.tables[table].kind == "state":
            return self.caches[layer_name(layer)][self.blocks[table][0]][0, 0]
        page, at = divmod(self.blocks[table][token // size] * size + token % size, KERNEL_TOKENS)
        return self.caches[layer_name(layer)][page][0, at]

    def compute(self, tokens: Sequence[int], start: int, stop: int) -> None:
        """Entries [start, stop) of all layers, and guesses after them."""
        for layer, token in itertools.product((0, 1, 2), range(start, stop)):
            self.slot(0, layer, token)[:] = entry_of(layer, tokens[: token + 1])
        if self.tables[1].kind == "state":
            self.slot(1, 3, 0)[:] = entry_of(3, tokens[:stop])
            return
        for token in range(start, stop):
            self.slot(1, 3, token)[:] = entry_of(3, tokens[: token + 1])
            # After the last known token the drafter uses the sampled one.
            self.slot(0, DRAFTER, token)[:] = entry_of(DRAFTER, [*tokens, -7][: token + 2])
        for layer, token in itertools.product((0, 1, 2, DRAFTER), range(stop, stop + LOOKAHEAD)):
            self.slot(0, layer, token)[:] = GARBAGE

    def overwrite(self, table: int, blocks: Sequence[int]) -> None:
        """Other requests overwrite these blocks unless they are referenced."""
        size = self.tables[table].block_size // KERNEL_TOKENS or 1
        for block in blocks:
            if self.pool.references[block] <= 0:
                for name in self.tables[table].layers:
                    self.caches[name][block * size : (block + 1) * size] = GARBAGE


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt of `length` tokens, of which D already holds `hit` and P computes `chunk` at a time. `late`: nothing is
    copied before P's request has ended. `other_end`: P was sent another last token.
    """

    length: int
    chunk: int = 100
    hit: int = 0
    late: bool = False
    with_states: bool = False
    other_end: bool = False


CASES = [
    Case(length, chunk, hit, late)
    for length, chunk, late in itertools.product((9, 12, 13, 17, 25), (5, 100), (False, True))
    for hit in ((0, 8) if length > 9 else (0,))
]
CASES += [Case(length, chunk, with_states=True) for length, chunk in itertools.product((9, 14), (5, 100))]
CASES += [Case(13, other_end=True)]


def faults(case: Case) -> list[str]:
    """Faults of one handoff: wrong entries that D uses, and blocks that are never freed."""
    prompt = list(range(200, 200 + case.length))
    on_p = [*prompt[:-1], 7] if case.other_end else prompt
    n = case.length - 1
    p, d = Engine("P", 8, case.with_states), Engine("D", 4, case.with_states)
    t = ticket(prompt)
    request, waiting = leg("prefill", t, on_p[:n] if case.with_states else on_p), leg("decode", t, prompt)
    p.scheduler.on_new_request(request)
    d.scheduler.on_new_request(waiting)
    p.worker.begin(p.scheduler.take_step())
    d.worker.begin(d.scheduler.take_step())
    d.worker.post(ev.DecodeAdmitted(t.key))
    d.worker.results()
    d.scheduler.on_admitted((0, one) for one in d.worker.take_admitted())
    d.reserve(case.length + LOOKAHEAD)
    if case.hit:
        d.compute(prompt, 0, case.hit)
    num = d.scheduler.num_matched(waiting.request_id, case.hit)
    assert num == n - case.hit
    d.scheduler.on_allocated(waiting.request_id, d.blocks, num)
    d.worker.begin(d.scheduler.take_step())
    copies = _Copies(p, d, case.late)
    _prefill(p, request, case, copies)
    finished = p.agent.of(ev.Sampled)
    p.worker.post(ev.PrefillReleased(t.key, "committed"))
    for one in p.worker.results().sent:
        p.scheduler.on_sent(one)
        for table in (0, 1):
            p.pool.free_blocks(p.blocks[table])
    seeds = finished[-1].seeds if finished else Seeds(first_token=0)
    d.worker.post(ev.DecodeCommitted(t.key, seeds, 0, 0))
    results = d.worker.results()
    assert results.received == {waiting.request_id}
    found = [f"block {block} is held for ever" for block, count in p.pool.references.items() if count > 0]
    if results.failed:
        return found if case.other_end else [*found, "D took nothing"]
    return found + _wrong(d, prompt, n)


def _prefill(p: Engine, request: Request, case: Case, copies: _Copies) -> None:
    """P's steps, as vLLM runs them."""
    tokens = list(request.prompt_token_ids or ())
    for start in range(0, len(tokens), case.chunk):
        stop = min(start + case.chunk, len(tokens))
        new = p.reserve(stop + LOOKAHEAD)
        for table in (0, 1):
            p.pool.touch(new[table])
        p.scheduler.on_scheduled(request.request_id, stop, tuple(list(part) for part in new), replace=start == 0)
        step = p.scheduler.take_step()
        p.worker.begin(step)
        copies.run()
        p.compute(tokens, start, stop)
        p.worker.finalise(step.computed)
        copies.run()
        left = p.tables[1].first_block(stop) if p.tables[1].kind == "sliding_window" else 0
        gone = [block for block in p.blocks[1][:left] if block not in copies.gone]
        copies.gone += gone
        p.pool.free_blocks(gone)
        p.overwrite(1, gone)
    held, _ = p.scheduler.on_finished(request)
    assert held
    p.worker.begin(p.scheduler.take_step())
    p.blocks = (p.blocks[0], [block for block in p.blocks[1] if block not in copies.gone])
    copies.late = False
    copies.run()


class _Copies:
    """The agents' work: copy to D what it wants, as far as P has declared it final."""

    def __init__(self, p: Engine, d: Engine, late: bool) -> None:
        self.p, self.d, self.late = p, d, late
        self.gone: list[int] = []  # blocks that P's window has left
        self._done: dict[str, int] = {}

    def run(self) -> None:
        declarations, openings = self.p.agent.of(ev.Declared), self.d.agent.of(DecodePages)
        if self.late or not declarations or not openings:
            return
        declared, opened = declarations[-1], openings[-1]
        for name, wanted in opened.wanted.items():
            source, dest = self.p.layout.geometries[name], self.d.layout.geometries[name]
            start = max(wanted.start, self._done.get(name, 0))
            stop = min(wanted.stop, declared.final[name])
            if start >= stop:
                continue
            for runs in plan_copies(
                [source], dest, declared.pages[name], opened.pages[name], Interval(start, stop)
            ).values():
                read = _bytes(self.p, runs.source_region)
                write = _bytes(self.d, runs.dest_region)
                for at, to, size in zip(runs.source_offset, runs.dest_offset, runs.nbytes, strict=True):
                    write[to : to + size] = read[at : at + size]
            self._done[name] = stop


def _bytes(engine: Engine, region: int) -> np.ndarray:
    memory = engine.layout.regions[region]
    assert isinstance(memory, np.ndarray)
    return memory.reshape(-1).view(np.uint8)


def _wrong(d: Engine, prompt: list[int], n: int) -> list[str]:
    """Entries of the first n tokens that D continues from and that differ from what it would have computed."""
    first = max(0, n - WINDOW + 1)
    places = [(0, layer, token, entry_of(layer, prompt[: token + 1])) for layer in (0, 1, 2) for token in range(n)]
    if d.tables[1].kind == "state":
        places.append((1, 3, 0, entry_of(3, prompt[:n])))
    else:
        places += [(1, 3, token, entry_of(3, prompt[: token + 1])) for token in range(first, n)]
        places += [(0, DRAFTER, token, entry_of(DRAFTER, prompt[: token + 2])) for token in range(n)]
    return [
        f"layer {layer}, token {token}"
        for table, layer, token, value in places
        if d.slot(table, layer, token).tolist() != [value] * 2
    ]


# ---------------------------------------------------------------- A: the drafter's lifecycle


def declare_before_the_forward_passes(patch: Patch) -> None:
    begin = WorkerSide.begin

    def both(self: WorkerSide, step: Any) -> None:
        begin(self, step)
        self.finalise(step.computed)

    patch.setattr(WorkerSide, "begin", both)


def lose_the_end_of_sending(patch: Patch) -> None:
    patch.setattr(WorkerSide, "_report_if_settled", lambda self, key, leg: None)


# ---------------------------------------------------------------- B: counts of blocks, and lookahead


def trim_blocks_for_drafts_from_the_front(patch: Patch) -> None:
    """P sends as many blocks as D has, taking the last of its allocated ones."""
    finalise = WorkerSide.finalise

    def cut(self: WorkerSide, computed: Any) -> None:
        whole = CacheLayout.kernel_tables

        def trimmed(layout: CacheLayout, tables: Any) -> dict[str, list[int]]:
            found = whole(layout, tables)
            for group in layout.groups:
                count = -(-max(leg.num_tokens for leg in self._prefills.values()) // KERNEL_TOKENS)
                if group.kind != "state" and len(found[group.name]) > count:
                    found[group.name] = found[group.name][-count:]
            return found

        with patch.context() as inner:
            inner.setattr(CacheLayout, "kernel_tables", trimmed)
            finalise(self, computed)

    patch.setattr(WorkerSide, "finalise", cut)


def want_a_hit_at_the_wrong_end(patch: Patch) -> None:
    wanted = LayerGroup.wanted

    def front(self: LayerGroup, num_tokens: int, hit: int, whole: bool = False) -> Interval:
        found = wanted(self, num_tokens, hit, whole)
        return Interval(found.start - hit, found.stop - hit) if self.kind == "full" else found

    patch.setattr(LayerGroup, "wanted", front)


def forget_the_blocks_of_earlier_chunks(patch: Patch) -> None:
    on_scheduled = SchedulerSide.on_scheduled

    def replaced(self: SchedulerSide, request_id: str, num_computed: int, new: Any, replace: bool) -> None:
        on_scheduled(self, request_id, num_computed, new, replace=True)

    patch.setattr(SchedulerSide, "on_scheduled", replaced)


def take_blocks_of_vllm_for_those_of_its_kernel(patch: Patch) -> None:
    patch.setattr(geometry_module, "kernel_pages", lambda table, blocks_per_page: list(table))


# ---------------------------------------------------------------- C: the first decode step


def take_a_prompt_with_another_end(patch: Patch) -> None:
    """The drafter's last entry was computed from a token that D's prompt does not have."""
    received = WorkerSide._received

    def trust(self: WorkerSide, decode: Any, event: Any) -> None:
        decode.next_token = event.seeds.first_token
        received(self, decode, event)

    patch.setattr(WorkerSide, "_received", trust)


def hand_over_a_placeholder(patch: Patch) -> None:
    """The token after the handed-over ones is not sent."""
    commit = WorkerSide._finish_prefill
    patch.setattr(WorkerSide, "_finish_prefill", lambda self, key, token: commit(self, key, None))


# ---------------------------------------------------------------- D: geometry


def take_layers_for_equally_distant(patch: Patch) -> None:
    patch.setattr(geometry, "_continues", lambda run, tensor, kernel: True)


# ---------------------------------------------------------------- E: auxiliary state


def let_the_window_go_on(patch: Patch) -> None:
    """The block that vLLM's window leaves when D computes the next token is not pinned."""
    patch.setattr(SchedulerSide, "_pin", lambda self, leg: None)


def _without(patch: Patch, kind: str) -> None:
    wanted = LayerGroup.wanted

    def nothing(self: LayerGroup, num_tokens: int, hit: int, whole: bool = False) -> Interval:
        return Interval(0, 0) if self.kind == kind else wanted(self, num_tokens, hit, whole)

    patch.setattr(LayerGroup, "wanted", nothing)


def skip_states(patch: Patch) -> None:
    _without(patch, "state")


def skip_windows(patch: Patch) -> None:
    _without(patch, "sliding_window")


def skip_the_drafter(patch: Patch) -> None:
    wanted = LayerGroup.wanted

    def nothing(self: LayerGroup, num_tokens: int, hit: int, whole: bool = False) -> Interval:
        return Interval(0, 0) if self.owner == "draft" else wanted(self, num_tokens, hit, whole)

    patch.setattr(LayerGroup, "wanted", nothing)


# What shows that each is missing.
MUTANTS: dict[str, dict[Callable[[Patch], None], str]] = {
    "A": {
        declare_before_the_forward_passes: "layer 0, token 0",
        lose_the_end_of_sending: "block 2 is held for ever",
        skip_the_drafter: f"layer {DRAFTER}, token 0",
    },
    "B": {
        trim_blocks_for_drafts_from_the_front: "layer 0, token 0",
        want_a_hit_at_the_wrong_end: "layer 0, token 8",
        forget_the_blocks_of_earlier_chunks: "layer 0, token 5",
        take_blocks_of_vllm_for_those_of_its_kernel: "the source block table ends before the interval does",
    },
    "C": {take_a_prompt_with_another_end: f"layer {DRAFTER}, token 11", hand_over_a_placeholder: "D took nothing"},
    "D": {take_layers_for_equally_distant: "layer 2, token 0"},
    "E": {
        let_the_window_go_on: "layer 3, token 7",
        skip_states: "layer 3, token 0",
        skip_windows: "layer 3, token 7",
    },
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_is_right_as_it_is(case: Case) -> None:
    assert faults(case) == []


@pytest.mark.parametrize(
    ("mutant", "shows"),
    [pytest.param(*both, id=f"{name}-{both[0].__name__}") for name, ms in MUTANTS.items() for both in ms.items()],
)
def test_a_cure_that_is_taken_out_is_missed(mutant: Callable[[Patch], None], shows: str, monkeypatch: Patch) -> None:
    mutant(monkeypatch)

    def found() -> Iterator[str]:
        for case in CASES:
            try:
                yield from faults(case)
            except ProtocolError as error:  # an invalid plan is refused by name
                yield str(error)

    assert any(text.endswith(shows) for text in found())
