"""Runs target and drafter over a plan's rows.

Shapes: T rows of the step, R requests, E hidden size, F features per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from baton.drafters.base import ChainDrafter, DraftBatch, Drafter, TargetRead, num_modules, reads_of
from baton.engine.attention.base import AttentionBackend, AttnBatch
from baton.engine.attention.paged_cache import LayerMap, PagedCache, layer_map
from baton.engine.attention.scan import StateBatch
from baton.engine.memory.draft_states import DraftStates
from baton.engine.memory.group_memory import GroupMemory
from baton.engine.sampling.draft_sampler import DraftSampler
from baton.engine.step_plans import NOT_FINITE, DraftPlan, DraftResult, Int32Array, IntArray, PlanSpec, Rows, Written
from baton.kv.spec import GroupSpec, Owner
from baton.models.base import CausalLM
from baton.models.fused_head import FusedHead
from baton.structured import Constrained, DraftMatchers, Grammars


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """States after the final norm, and those of the drafter's `aux_layers`."""

    hidden_TE: Tensor
    aux: list[Tensor]

    def take(self, rows: Tensor) -> TargetOutput:
        return TargetOutput(self.hidden_TE[rows], [states[rows] for states in self.aux])


class ModelRunner:
    """One rank's target and drafter, over the pages of its groups. Callers must be in `torch.inference_mode()`.

    Without `grammars`, drafts are not constrained. `aux_layers`: the drafter's, for a pipeline stage without it.
    """

    def __init__(
        self,
        model: CausalLM,
        drafter: Drafter | None,
        groups: Sequence[GroupSpec],
        kv: dict[str, GroupMemory],
        backend: AttentionBackend,
        device: torch.device,
        grammars: Grammars | None = None,
        aux_layers: Sequence[int] = (),
    ) -> None:
        self.model, self.drafter, self.kv, self.backend, self.device = model, drafter, kv, backend, device
        self._matchers = DraftMatchers(grammars) if grammars is not None else None
        target_groups = [g for g in groups if g.owner == "target"]
        draft_groups = [g for g in groups if g.owner == "draft"]
        self._target_layers = layer_map(target_groups, kv, model.kv_layers)
        self._draft_layers = layer_map(draft_groups, kv, drafter.kv_layers if drafter else ())
        self._aux_layers = drafter.aux_layers if drafter else tuple(aux_layers)
        self.spec = plan_spec(groups, drafter)
        plain = isinstance(model, CausalLM) and type(model).compute_logits is CausalLM.compute_logits
        self._head = FusedHead.of(model.whole_head()) if plain else None

    def release(self) -> None:
        """Reference cycles may keep the runner alive."""
        for held in (self.kv, self._target_layers, self._draft_layers):
            held.clear()
        del self.model, self.drafter, self._head

    def forward(self, rows: Rows, written: Written | None = None) -> TargetOutput:
        batches = {
            name: AttnBatch(rows.query_start, rows.positions, rows.tables[name]) for name in self.spec.target_groups
        }
        states = {name: StateBatch(rows.query_start, rows.states[name]) for name in self.spec.state_groups}
        cache = PagedCache(self.backend, self._target_layers, batches, states, written)
        hidden_TE, aux = self.model(self._tensor(rows.token_ids), self._tensor(rows.positions), cache, self._aux_layers)
        return TargetOutput(hidden_TE, aux)

    def features(self, output: TargetOutput) -> Tensor | None:
        """[T, F]; None: it takes none."""
        features = self.drafter.combine(output.hidden_TE, output.aux) if self.drafter is not None else None
        if features is not None and features.shape[:-1] != output.hidden_TE.shape[:-1]:
            shape, num_rows = tuple(features.shape), len(output.hidden_TE)
            raise ValueError(f"drafter {_name(self.drafter)} made features of shape {shape} of {num_rows} rows")
        return features

    def logits(self, output: TargetOutput, rows: IntArray) -> Tensor:
        """Float32 [len(rows), V] of `rows` (ascending)."""
        if len(rows) == output.hidden_TE.shape[0]:
            return self.model.compute_logits(output.hidden_TE)
        return self.model.compute_logits(output.hidden_TE[self._tensor(rows)])

    def likeliest(self, output: TargetOutput, rows: IntArray, kept: IntArray) -> tuple[IntArray, Tensor] | None:
        """The greedy choices of `rows` (ascending), as of `choose_tokens`, and float32 logits [len(kept), V] of those
        with the indices `kept`. None: they need `logits`."""
        head = self._head
        if head is None or not len(rows):
            return None
        hidden_TE = output.hidden_TE
        if len(rows) < len(hidden_TE):
            hidden_TE = hidden_TE[self._tensor(rows)]
        made = head.likeliest(hidden_TE.contiguous(), kept)
        if made is not None:
            made[0][made[0] < 0] = NOT_FINITE
        return made

    def draft(self, plan: DraftPlan, output: TargetOutput) -> DraftResult:
        """Raises `ValueError` for invalid drafts."""
        drafter = self.drafter
        assert drafter is not None
        states = DraftStates(plan)
        batch = self._draft_batch(plan, output, states)
        extended = drafter.extend(batch)
        for group, source, destination in states.left_out():
            pages = self.kv[group].pages
            pages[destination].copy_(pages[source])
        mtp_hidden = np.zeros((0, 0, 0), dtype=np.float32)
        if plan.chain is not None:
            mtp_hidden = cast(ChainDrafter, drafter).mtp_hidden(extended).float().cpu().numpy()
        if not plan.num_drafts.any():
            return DraftResult([[] for _ in plan.num_drafts], mtp_hidden)
        drafts = drafter.draft(batch, extended)
        _check_drafts(drafts, plan.num_drafts.tolist(), self.model.vocab_size, _name(drafter))
        return DraftResult(drafts, mtp_hidden, batch.margins)

    def attend_for_drafter(self, plan: DraftPlan, reads: Sequence[TargetRead]) -> None:
        """Another stage's part of stage 0's `draft`."""
        stage, dtype = self.model.build.ranks.stage, self.model.build.dtype
        pages = self._target_pages(plan, DraftStates(plan))
        own = [read for read in reads if read.layer in self._target_layers]
        for step in range(int(plan.num_drafts.max(initial=0)) if own else 0):
            going = np.flatnonzero(plan.num_drafts > step)
            last = plan.rows.positions[plan.rows.query_start[1:][going] - 1]
            cache = pages.bind(going, last, np.arange(len(going) + 1, dtype=np.int32))
            for read in own:
                q = torch.empty(len(going), read.num_heads, read.head_dim, dtype=dtype, device=self.device)
                stage.receive(q, 0)
                stage.send(cache.attend_kept(read.layer, q, 1.0, read.window), 0)

    def _target_pages(self, plan: DraftPlan, states: DraftStates) -> _DraftPages:
        return _DraftPages(self, self._target_layers, plan.rows.tables, plan.first_entry[:0], states)

    def _draft_batch(self, plan: DraftPlan, output: TargetOutput, states: DraftStates) -> DraftBatch:
        rows, features = plan.rows, self.features(output)
        if features is not None and len(plan.feature_rows) != features.shape[0]:
            features = features[self._tensor(plan.feature_rows)]
        # The token after the last row is known, so the first draft is two positions after the row.
        first = rows.positions[rows.query_start[1:] - 1] + 2
        constrained = self._constrained(plan)
        margins = np.full((len(first), plan.num_drafts.max(initial=0)), np.inf) if plan.margins else None
        choose = DraftSampler(plan.noise, first, self.model.vocab_size, constrained, margins)
        return DraftBatch(
            next_ids=rows.token_ids,
            positions=rows.positions,
            query_start=rows.query_start,
            features_TF=features,
            num_drafts=plan.num_drafts,
            contexts=plan.contexts,
            pages=_DraftPages(self, self._draft_layers, rows.tables, plan.first_entry, states),
            choose=choose,
            chain=plan.chain,
            target_pages=self._target_pages(plan, states),
            noise=choose.noise if constrained is None else None,
            margins=margins,
        )

    def _constrained(self, plan: DraftPlan) -> Constrained | None:
        return self._matchers.at(plan.constraints) if plan.constraints and self._matchers is not None else None

    def _tensor(self, values: IntArray) -> Tensor:
        return torch.from_numpy(values).to(self.device)


@dataclass(frozen=True, slots=True)
class _DraftPages:
    """`first_entry`: `DraftPlan`'s."""

    runner: ModelRunner
    layers: LayerMap
    tables: Mapping[str, Int32Array]
    first_entry: IntArray
    states: DraftStates

    def bind(self, requests: IntArray, positions: IntArray, query_start: Int32Array) -> PagedCache:
        slots = positions
        if self.first_entry.any():
            # Slots and visibility count from a request's first entry.
            slots = positions - np.repeat(self.first_entry[requests], np.diff(query_start))
        batches = {name: AttnBatch(query_start, slots, table[requests]) for name, table in self.tables.items()}
        slots_of = self.states.bind(requests, positions, query_start)
        states = {name: StateBatch(query_start, slots) for name, slots in slots_of.items()}
        return PagedCache(self.runner.backend, self.layers, batches, states)


def _check_drafts(drafts: list[list[int]], most: list[int], vocab_size: int, name: str) -> None:
    """Raises `ValueError`: a user's drafter may return anything."""
    if len(drafts) != len(most):
        raise ValueError(f"drafter {name} returned drafts of {len(drafts)} requests, not of {len(most)}")
    for ids, count in zip(drafts, most, strict=True):
        if len(ids) > count:
            raise ValueError(f"drafter {name} returned {len(ids)} drafts where at most {count} were asked for")
        if not all(isinstance(token, int) and 0 <= token < vocab_size for token in ids):
            raise ValueError(f"drafter {name} returned drafts that are not token ids below {vocab_size}: {ids}")


def _name(drafter: object) -> str:
    return type(drafter).__qualname__


def plan_spec(groups: Sequence[GroupSpec], drafter: Drafter | None) -> PlanSpec:
    """What a step's plans must contain for a target and drafter with these groups."""

    def names(owner: Owner, states: bool) -> tuple[str, ...]:
        return tuple(g.name for g in groups if g.owner == owner and (g.kind == "state") is states)

    return PlanSpec(
        target_groups=names("target", False),
        draft_groups=names("draft", False) + _groups_read(groups, drafter),
        state_groups=names("target", True),
        drafts=drafter is not None,
        needs_contexts=drafter is not None and drafter.needs_contexts,
        num_modules=num_modules(drafter),
        draft_state_groups=names("draft", True),
    )


def _groups_read(groups: Sequence[GroupSpec], drafter: Drafter | None) -> tuple[str, ...]:
    read = {of.layer for of in reads_of(drafter)}
    return tuple(g.name for g in groups if g.owner == "target" and read & set(g.layer_ids))
