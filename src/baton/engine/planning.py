"""Makes the plans of a step from scheduled requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.drafters.chain import ModuleChain
from baton.engine.request import Request
from baton.engine.sampling.sampling_state import SamplingRows, noise_of, sampling_of
from baton.engine.scheduler import ScheduledRows
from baton.engine.step_plans import (
    DraftPlan,
    DraftSlots,
    Int32Array,
    IntArray,
    PlanSpec,
    PromptLogprobRows,
    Rows,
    StateSlots,
    StepPlan,
)
from baton.kv.geometry import NULL_PAGE
from baton.kv.interval import known_entries
from baton.structured import Allowed, Known


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """With its first index into the result's choices and logits."""

    request: Request
    first_choice: int
    first_logits: int


class FeatureRows(NamedTuple):
    """Rows of a step's features. `step`: its number (see `StepPlan`)."""

    step: int
    first: int
    num_rows: int


class DraftRows(NamedTuple):
    """Drafter rows [start, stop) of a request, and where their features are."""

    request: Request
    features: tuple[FeatureRows, ...]
    start: int
    stop: int
    num_drafts: int


def is_sampled(rows: ScheduledRows) -> bool:
    request = rows.request
    if not request.is_prefilling:
        return True
    return rows.start + rows.num_rows == len(request.token_ids) and request.params.max_tokens > 0


def allowed_tokens(
    scheduled: Sequence[ScheduledRows],
) -> tuple[dict[Request, Allowed | None], dict[Request, Exception]]:
    """By sampled request (None: all), and the requests that have none or whose grammar failed."""
    allowed: dict[Request, Allowed | None] = {}
    refused: dict[Request, Exception] = {}
    for rows in scheduled:
        request = rows.request
        if not request.sampler.plain_greedy and is_sampled(rows):
            try:
                allowed[request] = request.allowed()
            except Exception as error:
                refused[request] = error
    return allowed, refused


def step_plan(
    scheduled: Sequence[ScheduledRows], allowed: Mapping[Request, Allowed | None], spec: PlanSpec, rejection: bool
) -> tuple[StepPlan, list[SampledRequest]]:
    ids: list[int] = []
    sample_rows: list[int] = []
    logit_rows: list[int] = []
    sampled: list[SampledRequest] = []
    to_sample: list[SamplingRows] = []
    scored: list[tuple[int, int, int]] = []
    for rows in scheduled:
        request, stop = rows.request, rows.start + rows.num_rows
        known = request.token_ids[rows.start : stop]
        ids += known
        ids += request.draft_ids[: rows.num_rows - len(known)]
        if request.params.prompt_logprobs is not None:
            first = len(ids) - rows.num_rows - rows.start
            scored += [
                (first + at - 1, request.token_ids[at], request.params.prompt_logprobs)
                for at in request.logprob_positions(rows.start, stop)
            ]
        if not is_sampled(rows):
            continue
        wanted = range(len(ids) - (1 if request.is_prefilling else rows.num_rows), len(ids))
        sampled.append(SampledRequest(request, len(sample_rows), len(logit_rows)))
        if not request.sampler.plain_greedy:
            to_sample.append(SamplingRows(request.sampler, len(sample_rows), request.draft_ids, allowed.get(request)))
        if request.params.logprobs is not None:
            logit_rows += range(len(sample_rows), len(sample_rows) + len(wanted))
        sample_rows += wanted
    requests = [rows.request for rows in scheduled]
    spans = [(rows.start, rows.num_rows) for rows in scheduled]
    rows_of_step = _rows(ids, spans, requests, spec.target_groups)
    if spec.state_groups:
        rows_of_step = replace(rows_of_step, states={name: _state_slots(scheduled, name) for name in spec.state_groups})
    sampling = sampling_of(to_sample, rejection)
    plan = StepPlan(rows_of_step, _array(sample_rows), sampling, _array(logit_rows))
    if scored:
        plan = replace(plan, scored=PromptLogprobRows(*(_array(list(column)) for column in zip(*scored, strict=True))))
    return plan, sampled


def draft_plan(
    draft_rows: Sequence[DraftRows], spec: PlanSpec, rejection: bool, margins: bool = False, is_late: bool = False
) -> DraftPlan:
    """Drafts are chosen with the noise that the target will use; with `rejection`, greedily. `is_late`: no row is of
    the last step."""
    ids: list[int] = []
    feature_rows: list[int] = []
    steps: list[int] = []
    for rows in draft_rows:
        ids += rows.request.token_ids[rows.start + 1 : rows.stop + 1]
        for some in rows.features:
            feature_rows += range(some.first, some.first + some.num_rows)
            steps += [some.step] * some.num_rows
    requests = [rows.request for rows in draft_rows]
    noise = noise_of([request.params for request in requests])
    spans = [(rows.start, rows.stop - rows.start) for rows in draft_rows]
    return DraftPlan(
        rows=_rows(ids, spans, requests, spec.draft_groups),
        feature_rows=_array(feature_rows),
        feature_steps=_array(steps if is_late or len(set(steps)) > 1 else []),
        num_drafts=_array([rows.num_drafts for rows in draft_rows]),
        first_entry=_array([request.first_drafted for request in requests]),
        noise=replace(noise, temperature=np.zeros(len(requests))) if rejection else noise,
        contexts=[_array(request.token_ids) for request in requests] if spec.needs_contexts else (),
        constraints=_constraints(draft_rows),
        chain=_chain(draft_rows, spec.num_modules) if spec.num_modules > 1 else None,
        states={name: _draft_slots(draft_rows, name) for name in spec.draft_state_groups},
        margins=margins,
    )


def _constraints(draft_rows: Sequence[DraftRows]) -> Sequence[Known | None]:
    grammars = [
        Known(request.request_id, request.params.structured_outputs, _array(request.output_ids))
        if rows.num_drafts and request.params.structured_outputs is not None
        else None
        for rows in draft_rows
        for request in [rows.request]
    ]
    return grammars if any(grammars) else ()


def _chain(draft_rows: Sequence[DraftRows], num_modules: int) -> ModuleChain:
    """The entries of each module that became computable since the last plan, and the carried rows."""
    modules = range(1, num_modules + 1)
    spans = np.zeros((len(draft_rows), num_modules, 2), dtype=np.int64)
    mtp_hidden_row = np.full((len(draft_rows), num_modules - 1), -1)
    mtp_hidden: list[npt.NDArray[np.float32]] = []
    ahead: list[IntArray] = []
    for index, rows in enumerate(draft_rows):
        request = rows.request
        known = (request.num_known_drafted, rows.start), (len(request.token_ids), rows.stop)
        for bound, (num_known, computed) in enumerate(known):
            ends = [known_entries(module, num_known, computed) for module in modules]
            spans[index, :, bound] = np.maximum(ends, request.first_drafted)
        ahead.append(_array(request.token_ids[rows.stop + 1 : rows.stop + num_modules]))
        if request.mtp_hidden is not None:
            mtp_hidden_row[index] = np.arange(num_modules - 1) + len(mtp_hidden) * (num_modules - 1)
            mtp_hidden.append(request.mtp_hidden)
    return ModuleChain(spans, ahead, mtp_hidden_row, *([np.concatenate(mtp_hidden)] if mtp_hidden else ()))


def _rows(ids: list[int], spans: Sequence[tuple[int, int]], requests: Sequence[Request], groups: Sequence[str]) -> Rows:
    """`spans`: (first position, count) per request."""
    query_start = [0]
    positions: list[int] = []
    for start, count in spans:
        positions += range(start, start + count)
        query_start.append(len(positions))
    tables = {name: _table(requests, name) for name in groups}
    return Rows(_array(ids), _array(positions), np.array(query_start, dtype=np.int32), tables)


def _state_slots(scheduled: Sequence[ScheduledRows], group: str) -> StateSlots:
    """A verification keeps the state after each row: any may be the last accepted one."""
    read: list[int] = []
    kept: list[int] = []
    write: list[int] = []
    num_rows = 0
    for rows in scheduled:
        first = num_rows - rows.start
        num_rows += rows.num_rows
        num_kept = 1 if rows.request.is_prefilling else rows.num_rows
        state, scratch = rows.request.kv.slots(group)
        read.append(state if rows.start else NULL_PAGE)
        for count, slot in rows.request.kv.checkpoints[group].items():
            kept.append(first + count - 1)
            write.append(slot)
        kept += range(num_rows - num_kept, num_rows)
        write += scratch[:num_kept]
    return StateSlots(_array(read), _array(kept), _array(write))


def _draft_slots(draft_rows: Sequence[DraftRows], group: str) -> DraftSlots:
    """A drafter has no state before its first entry."""
    read: list[int] = []
    scratch: list[list[int]] = []
    checkpoints: list[tuple[int, int, int]] = []
    for index, rows in enumerate(draft_rows):
        request = rows.request
        state, own = request.kv.slots(group)
        read.append(state if rows.start > request.first_drafted else NULL_PAGE)
        scratch.append(own)
        checkpoints += [(index, count, slot) for count, slot in request.kv.checkpoints[group].items()]
    columns = np.array(checkpoints, dtype=np.int64).reshape(-1, 3)
    return DraftSlots(_array(read), np.array(scratch, dtype=np.int64), *np.ascontiguousarray(columns.T))


def _table(requests: Sequence[Request], group: str) -> Int32Array:
    tables = [request.kv.tables[group] for request in requests]
    if len(tables) == 1:
        return tables[0][None]
    table = np.zeros((len(tables), max(t.size for t in tables)), dtype=np.int32)
    for row, ids in enumerate(tables):
        table[row, : ids.size] = ids
    return table


def _array(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
