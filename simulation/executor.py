"""An `Executor` over cells. The value of a token's KV depends on all tokens up to it, its group and its plane, so KV of
a wrong position, prompt or group has another value.

Every value that is read must be right, and every page that is written must belong to its request alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from baton.engine.request import Request
from baton.engine.step_plans import DraftPlan, DraftResult, DraftSlots, PlanSpec, Rows, StepPlan, StepResult, Written
from baton.kv.spec import Owner
from baton.sampling_params import SamplingParams
from simulation.modelled.memory import GroupMemory
from simulation.story import VOCAB, Story, extend

if TYPE_CHECKING:
    from simulation.engine import Engine

_RIGHT_GUESS = 0.7
_BREAKS = 0.4
Half = Literal["target", "drafter"]
_Entry = tuple[GroupMemory, list[int], int, int]  # memory, block table, entry, state to write
_Row = list[_Entry]  # of all groups


class StepFailed(Exception):
    """An injected fault: a request's rows cannot be computed."""


@dataclass(frozen=True, slots=True)
class _Computed:
    """One request's rows in the last step. `request` is None if the engine tests whether it still computes.
    `num_known`: tokens that were known before the step.
    """

    request: Request | None
    story: Story
    start: int
    num_known: int


class CellExecutor:
    """`failing`: ids of requests whose rows raise, and in which half of the step. `broken`: the current forward is
    going to raise.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._world = engine, engine.process.world
        memories = engine.process.memories
        self._target, self._states = _by_kind(memories, "target")
        self._draft, self._draft_states = _by_kind(memories, "draft")
        self.spec = PlanSpec(
            target_groups=tuple(memory.model.name for memory in self._target),
            draft_groups=tuple(memory.model.name for memory in self._draft),
            state_groups=tuple(memory.model.name for memory in self._states),
            drafts=engine.world.settings.num_drafts > 0 or bool(self._draft),
            needs_contexts=any(memory.model.reach > 1 for memory in self._draft),
            draft_state_groups=tuple(memory.model.name for memory in self._draft_states),
        )
        self.failing: dict[str, Half] = {}
        self.broken = False
        self._last: dict[int, _Computed] = {}  # by first row
        self._positions: list[int] = []

    def copy_page(self, group: str, source: int, destination: int) -> None:
        self._engine.memory(group).copy_page(source, destination)

    def close(self) -> None:
        """Nothing to close."""

    # ------------------------------------------------------------ the target

    def execute(self, plan: StepPlan, written: Written | None = None) -> StepResult:
        rows = plan.rows
        ids, positions, ends = rows.token_ids.tolist(), rows.positions.tolist(), rows.query_start.tolist()
        self._positions = positions
        self._last = {first: self._whose(rows, index, positions[first]) for index, first in enumerate(ends[:-1])}
        self.broken = False
        if written is None:
            self._may_fail(self._last.values(), "target")
        else:
            self.broken = self._breaks()
        self._world.progress()
        tables = {name: table.tolist() for name, table in rows.tables.items()}
        states: list[int] = []
        written_rows: list[_Row] = [[] for _ in ids]
        for index, (first, one) in enumerate(self._last.items()):
            own = ids[first : ends[index + 1]]
            after = extend(one.story.before(one.start), own)
            states += after
            for memory in self._target:
                table = tables[memory.model.name][index]
                self._check(one, memory, table, one.start)
                for row, state in enumerate(after):
                    entry = one.start + row
                    written_rows[first + row].append((memory, self._own(memory, table, entry), entry, state))
        if written is None:
            for memory, table, entry, state in itertools.chain.from_iterable(written_rows):
                memory.put(table, entry, state)
        elif written.at_once:
            self._write_by_layer(written_rows, self._failing_part(), written)
        else:
            self._write_by_rows(written_rows, written)
        for memory in self._states:
            slots = rows.states[memory.model.name]
            for one, slot in zip(self._last.values(), slots.read.tolist(), strict=True):
                self._check(one, memory, [slot], one.start)
            for row, slot in zip(slots.kept.tolist(), slots.write.tolist(), strict=True):
                memory.put(self._own(memory, [slot], 0), 0, states[row])
        computed = zip(self._last.values(), ends, ends[1:], strict=False)
        stories = [one.story for one, first, stop in computed for _ in range(first, stop)]
        chosen = [stories[row].follow(states[row], positions[row] + 1) for row in plan.sample_rows.tolist()]
        choices = np.array(chosen, dtype=np.int64)
        nothing = np.zeros((0, 0), dtype=np.float32)
        return StepResult(choices, nothing, nothing)

    def _write_by_rows(self, rows: list[_Row], written: Written) -> None:
        """Write a block of rows in all layers, report it, then write the other rows."""
        cut, fails_at = len(rows) // 2, self._failing_part()
        last_fails = fails_at is not None and self._world.random.random() < _BREAKS
        self._write_by_layer(rows[:cut], None if last_fails else fails_at, lambda layer: None)
        if cut:
            written.tell_rows(cut)
        self._write_by_layer(rows[cut:], fails_at, written)

    def _failing_part(self) -> int | None:
        return self._world.random.randrange(len(self._parts())) if self.broken else None

    def _parts(self) -> list[tuple[int, int, str]]:
        return sorted(
            (layer, rank, memory.model.name)
            for memory in self._target
            for rank, part in memory.ranks.items()
            for layer in part.spec.layer_ids
        )

    def _write_by_layer(self, rows: list[_Row], fails_at: int | None, tell: Callable[[int], None]) -> None:
        """Write layer by layer while time passes. The first tensor rank reports a layer as soon as it has written it,
        and the others write it a little later; the first does not continue before they have.
        """
        parts = self._parts()
        for number, (layer, rank, name) in enumerate(parts):
            for memory, table, entry, state in itertools.chain.from_iterable(rows):
                if memory.model.name == name:
                    index, token = divmod(entry, memory.page_size)
                    memory.ranks[rank].put(table[index], token, state + self.broken, layer)
            if rank == 0:
                tell(layer)
            self._engine.process.compute(1 / len(parts))
            if number == fails_at:
                self.broken = False
                raise StepFailed(self._engine.name)

    def _breaks(self) -> bool:
        """Whether a forward over several layers fails midway: for one request's rows, or for no particular request, and
        then the engine computes the rows again one request at a time.
        """
        world = self._world
        try:
            self._may_fail(self._last.values(), "target")
        except StepFailed:
            return True
        strikes = len(self._last) > 1 and world.settings.has("engine_abort") and not world.calm
        if not strikes or world.random.random() >= _BREAKS:
            return False
        world.injected["engine_abort"] += 1
        return True

    def _may_fail(self, computed: Iterable[_Computed], half: Half) -> None:
        for one in computed:
            if one.request is not None and self.failing.get(one.request.request_id) == half:
                raise StepFailed(one.request.request_id)

    def _whose(self, rows: Rows, index: int, start: int) -> _Computed:
        """Find the request that holds the page of the first row."""
        memory = self._target[0]
        name, place = memory.model.name, start // memory.page_size
        page = rows.tables[name][index, place]
        for request in self._engine.scheduler.running:
            pages = request.kv.pages.get(name, ())
            if place < len(pages) and pages[place] == page and request.num_computed == start:
                story = self._engine.stories[request.request_id]
                known = len(request.token_ids) if request.is_prefilling else start + 1
                return _Computed(request, story, start, known)
        return _Computed(None, Story([0], SamplingParams(max_tokens=1, temperature=0.0)), start, 1)

    # ------------------------------------------------------------ the drafter

    def draft(self, plan: DraftPlan) -> DraftResult:
        """Entries of a module that need tokens that are not known yet are computed from guesses, and the next step
        writes them again.
        """
        rows, random = plan.rows, self._world.random
        ids, positions, ends = rows.token_ids.tolist(), rows.positions.tolist(), rows.query_start.tolist()
        if [self._positions[row] for row in plan.feature_rows.tolist()] != positions:
            self._world.fail("wrong_features", f"{self._engine.name} drafts from features of other rows")
        drafts: list[list[int]] = []
        computed = [self._last[int(plan.feature_rows[first])] for first in ends[:-1]]
        self._may_fail(computed, "drafter")
        for index, (first, one) in enumerate(zip(ends, computed, strict=False)):
            stop = positions[ends[index + 1] - 1] + 1
            states = [*one.story.chain[: one.start + 1]]
            states += extend(states[-1], ids[first : ends[index + 1]])
            if plan.contexts:
                states += extend(states[-1], plan.contexts[index].tolist()[len(states) :])
            count = int(plan.num_drafts[index])
            written = stop + max(0, count - 1)  # the last draft has no entry yet
            for memory in self._draft:
                reach, table = memory.model.reach, rows.tables[memory.model.name][index].tolist()
                final = min(one.start, max(one.num_known - reach, 0))
                if final:
                    self._check(one, memory, table, final)
                for entry in range(final, written):
                    state = states[entry + reach] if entry + reach < len(states) and entry < stop else None
                    if state is None:
                        state = random.getrandbits(60)
                    elif entry < one.start and memory.holds(table, entry, state):
                        continue
                    memory.put(self._own(memory, table, entry), entry, state)
            for memory in self._draft_states:
                self._go_on(one, memory, plan.states[memory.model.name], index, states, stop)
            drafts.append(self._guesses(one.story, states[stop], stop + 1, count))
        return DraftResult(drafts, np.zeros((0, 0, 0), dtype=np.float32))

    def _go_on(
        self, one: _Computed, memory: GroupMemory, slots: DraftSlots, index: int, states: list[int], stop: int
    ) -> None:
        """Write one request's state, from its slot to the first of its scratch slots; the other scratch slots get
        values that depend on guesses.
        """
        self._check(one, memory, [int(slots.read[index])], one.start)
        kept, *behind = slots.scratch[index].tolist()
        memory.put(self._own(memory, [kept], 0), 0, states[stop - 1])
        for slot in behind:
            memory.put(self._own(memory, [slot], 0), 0, self._world.random.getrandbits(60))
        for request, count, slot in zip(slots.request, slots.num_tokens, slots.write, strict=True):
            if request == index:
                memory.put(self._own(memory, [int(slot)], 0), 0, states[int(count) - 1])

    def _guesses(self, story: Story, state: int, position: int, count: int) -> list[int]:
        """Guesses for `position` and the following ones: usually right until the first wrong one."""
        random, out = self._world.random, []
        for at in range(position, position + count):
            out.append(story.follow(state, at) if random.random() < _RIGHT_GUESS else random.randrange(VOCAB))
            (state,) = extend(state, out[-1:])
        return out

    # ------------------------------------------------------------ checks of reads and writes

    def _check(self, one: _Computed, memory: GroupMemory, table: list[int], stop: int) -> None:
        """A step reads all KV before `stop` that a query at `one.start` sees: every entry must be right."""
        if one.request is None:
            return
        group = memory.model
        # Computed here rather than by `Rules`, because this checks `Rules`.
        seen_from = 0 if group.window is None else max(0, one.start - group.window + 1)
        bad = memory.wrong(one.story, one.start, table, min(seen_from, stop), stop)
        if bad is not None:
            self._world.fail(
                "wrong_kv",
                f"{self._engine.name} computes {one.request.request_id} from token {one.start} on with another "
                f"entry of {group.name} at {bad}",
            )

    def _own(self, memory: GroupMemory, table: list[int], entry: int) -> list[int]:
        """Returns the table after a check that no other request, cache or peer uses the page to be written."""
        name, index = memory.model.name, entry // memory.page_size
        pool, page = self._engine.cache.pools[name], table[index] if index < len(table) else 0
        if page == 0 or pool._refs.get(page) != 1 or page in pool._cached or page in memory.writers:
            self._world.fail(
                "shared_write",
                f"{self._engine.name} writes entry {entry} of {name} into page {page}: held {pool._refs.get(page)} "
                f"times, cached: {page in pool._cached}, open to {memory.writers.get(page)}",
            )
        return table


def _by_kind(memories: Iterable[GroupMemory], owner: Owner) -> tuple[list[GroupMemory], list[GroupMemory]]:
    """An owner's groups with pages, and its state groups."""
    own = [memory for memory in memories if memory.model.owner == owner]
    return [m for m in own if m.model.kind != "state"], [m for m in own if m.model.kind == "state"]


__all__ = ["CellExecutor", "StepFailed"]
