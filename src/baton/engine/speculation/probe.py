"""Plans over spare pages, to test whether target and drafter work and to measure them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from baton.drafters.chain import ModuleChain
from baton.engine.step_plans import DraftPlan, DraftSlots, IntArray, Noise, PlanSpec, Rows, StateSlots, StepPlan


def target_probe(
    spec: PlanSpec, pages: Mapping[str, npt.NDArray[np.int32]], num_requests: int, num_rows: int, context: int = 0
) -> StepPlan:
    """`num_rows` rows of each request after `context` tokens. Requests share `pages`, but not slots of states."""
    rows = _rows(spec.target_groups, pages, num_requests, num_rows, context)
    last = rows.query_start[1:].astype(np.int64) - 1
    begins = np.zeros(num_requests, dtype=np.int64)
    slots = {name: pages[name][:num_requests].astype(np.int64) for name in spec.state_groups}
    states = {name: StateSlots(begins, last, slot) for name, slot in slots.items()}
    return StepPlan(replace(rows, states=states), sample_rows=np.arange(num_requests * num_rows))


def draft_probe(
    spec: PlanSpec, pages: Mapping[str, npt.NDArray[np.int32]], num_requests: int, num_drafts: int
) -> DraftPlan:
    rows = _rows(spec.draft_groups, pages, num_requests, 1, 0, num_drafts)
    none, requests = np.zeros(0, dtype=np.int64), np.arange(num_requests)
    states = {
        name: DraftSlots(
            read=np.zeros(num_requests, dtype=np.int64),
            scratch=np.tile(pages[name].astype(np.int64), (num_requests, 1)),
            request=none,
            num_tokens=none,
            write=none,
        )
        for name in spec.draft_state_groups
    }
    word = np.zeros(num_requests, dtype=np.uint64)
    return DraftPlan(
        rows,
        feature_rows=requests,
        num_drafts=np.full(num_requests, num_drafts),
        noise=Noise(word, word, np.zeros(num_requests)),
        contexts=[np.zeros(2, dtype=np.int64)] * num_requests if spec.needs_contexts else (),
        chain=_first_rows(num_requests, spec.num_modules) if spec.num_modules > 1 else None,
        states=states,
    )


def _rows(
    groups: tuple[str, ...],
    pages: Mapping[str, npt.NDArray[np.int32]],
    num_requests: int,
    num_rows: int,
    context: int,
    num_drafts: int = 0,
) -> Rows:
    total = num_requests * num_rows
    length = context + num_rows + num_drafts  # enough for pages of one token
    tables = {name: np.tile(np.resize(pages[name], length), (num_requests, 1)) for name in groups}
    return Rows(
        token_ids=np.zeros(total, dtype=np.int64),
        positions=np.tile(np.arange(context, context + num_rows), num_requests),
        query_start=np.arange(0, total + 1, num_rows, dtype=np.int32),
        tables=tables,
    )


def _first_rows(num_requests: int, num_modules: int) -> ModuleChain:
    spans: IntArray = np.zeros((num_requests, num_modules, 2), dtype=np.int64)
    spans[:, 0, 1] = 1
    ahead = [np.zeros(0, dtype=np.int64)] * num_requests
    return ModuleChain(spans, ahead, np.full((num_requests, num_modules - 1), -1))
