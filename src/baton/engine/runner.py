"""Runs target and drafter over the scheduled rows. Knows tensors and pages, not queues, clients or handoffs.

One step is `forward` (target), then `propose` (drafter); sampling lies between them and belongs to the core.
Shapes: T rows of the step, R requests, E hidden size, V vocabulary, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.drafters.base import Drafter
from baton.engine.attention import AttentionBackend, AttnBatch
from baton.engine.noise import gumbel
from baton.engine.request import Request
from baton.engine.scheduler import ScheduledRows
from baton.kv.geometry import GroupSpec
from baton.models.base import CausalLM


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """`hidden_TE` after the final norm; `features_TF` for the drafter; `row_start`: each request's first row."""

    hidden_TE: Tensor
    features_TF: Tensor | None
    row_start: dict[Request, int]


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Drafter rows [start, stop) of a request; their features are the step's rows `first_row`... `num_drafts`: how many
    tokens to draft behind them."""

    request: Request
    first_row: int
    start: int
    stop: int
    num_drafts: int


class _Attend:
    """Binds one forward's rows to the paged cache: layer id -> (group tensor, layer inside it)."""

    def __init__(
        self, runner: ModelRunner, layers: Sequence[tuple[GroupSpec, int]], batches: dict[str, AttnBatch]
    ) -> None:
        self._runner, self._layers, self._batches = runner, layers, batches

    def __call__(self, layer_id: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float) -> Tensor:
        group, index = self._layers[layer_id]
        return self._runner.backend.write_and_attend(
            self._runner.kv[group.name], index, q_THD, k_TGD, v_TGD, scale, self._batches[group.name], group.window
        )


class ModelRunner:
    """`kv[group]` is the group's region [num_pages, num_layers, 2, page_size, G, D]; pages are the mutable state."""

    def __init__(
        self,
        model: CausalLM,
        drafter: Drafter | None,
        groups: Sequence[GroupSpec],
        kv: dict[str, Tensor],
        backend: AttentionBackend,
        device: torch.device,
        num_speculative_tokens: int,
        coupled: bool,
    ) -> None:
        self.model, self.drafter, self.kv, self.backend = model, drafter, kv, backend
        self.device, self.num_speculative_tokens, self.coupled = device, num_speculative_tokens, coupled
        self._target_groups = [g for g in groups if g.owner == "target"]
        self._draft_groups = [g for g in groups if g.owner == "draft"]
        self._target_layers = _layer_map(self._target_groups)
        self._draft_layers = _layer_map(self._draft_groups)
        self._aux_layers = drafter.aux_layers if drafter else ()
        self._draft_to_target: npt.NDArray[np.int64] | None = None
        if drafter is not None and drafter.draft_to_target is not None:
            self._draft_to_target = drafter.draft_to_target.cpu().numpy()

    def _batches(
        self, groups: Sequence[GroupSpec], requests: Sequence[Request], query_start: list[int], positions: list[int]
    ) -> dict[str, AttnBatch]:
        starts = np.asarray(query_start, dtype=np.int32)
        position_array = np.asarray(positions, dtype=np.int64)
        batches: dict[str, AttnBatch] = {}
        for group in groups:
            tables = [request.kv.tables[group.name] for request in requests]
            if len(tables) == 1:
                table = tables[0][None]
            else:
                table = np.zeros((len(tables), max(t.size for t in tables)), dtype=np.int32)
                for row, ids in enumerate(tables):
                    table[row, : ids.size] = ids
            batches[group.name] = AttnBatch(query_start=starts, positions=position_array, page_table=table)
        return batches

    def _ids(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def forward(self, scheduled: Sequence[ScheduledRows]) -> TargetOutput:
        """Target forward: rows are known tokens, then the request's drafts; their KV is written."""
        ids: list[int] = []
        positions: list[int] = []
        query_start = [0]
        row_start: dict[Request, int] = {}
        for rows in scheduled:
            request, stop = rows.request, rows.start + rows.num_rows
            row_start[request] = len(ids)
            known = request.token_ids[rows.start : stop]
            ids += known
            ids += request.draft_ids[: rows.num_rows - len(known)]
            positions += range(rows.start, stop)
            query_start.append(len(ids))
        requests = [rows.request for rows in scheduled]
        batches = self._batches(self._target_groups, requests, query_start, positions)
        attend = _Attend(self, self._target_layers, batches)
        hidden_TE, aux = self.model(self._ids(ids), self._ids(positions), attend, self._aux_layers)
        features = self.drafter.combine(hidden_TE, aux) if self.drafter is not None else None
        return TargetOutput(hidden_TE, features, row_start)

    @torch.inference_mode()
    def logits(self, output: TargetOutput, rows: list[int]) -> Tensor:
        """Target logits float32 [len(rows), V] of those rows of the step."""
        if len(rows) == output.hidden_TE.shape[0]:
            return self.model.compute_logits(output.hidden_TE)
        return self.model.compute_logits(output.hidden_TE[self._ids(rows)])

    @torch.inference_mode()
    def propose(self, output: TargetOutput, rows: Sequence[DraftRows]) -> None:
        """Drafter forward: writes drafter KV [start, stop) of each request and leaves its drafts in `draft_ids`."""
        drafter = self.drafter
        if drafter is None or not rows:
            return
        assert output.features_TF is not None
        requests = [r.request for r in rows]
        ids: list[int] = []
        positions: list[int] = []
        picked: list[int] = []
        query_start = [0]
        for r in rows:
            ids += r.request.token_ids[r.start + 1 : r.stop + 1]
            positions += range(r.start, r.stop)
            picked += range(r.first_row, r.first_row + r.stop - r.start)
            query_start.append(len(ids))
        features = output.features_TF
        if len(picked) != features.shape[0]:
            features = features[self._ids(picked)]
        attend = _Attend(self, self._draft_layers, self._batches(self._draft_groups, requests, query_start, positions))
        out_TE, feedback_TE = drafter(self._ids(ids), features, self._ids(positions), attend, True)
        drafting = [r for r in rows if r.num_drafts]
        if not drafting:
            return
        last_rows = self._ids([stop - 1 for r, stop in zip(rows, query_start[1:], strict=True) if r.num_drafts])
        out_RE, feedback_RE = out_TE[last_rows], feedback_TE[last_rows]
        for r in drafting:
            r.request.draft_ids = []
        for step in range(self.num_speculative_tokens):
            self._choose_drafts(drafter.compute_logits(out_RE), [r.request for r in drafting])
            going = [i for i, r in enumerate(drafting) if r.num_drafts > step + 1]
            if not going:
                return
            if len(going) < len(drafting):
                feedback_RE, drafting = feedback_RE[self._ids(going)], [drafting[i] for i in going]
            requests = [r.request for r in drafting]
            positions = [r.stop + step for r in drafting]
            starts = list(range(len(requests) + 1))
            attend = _Attend(self, self._draft_layers, self._batches(self._draft_groups, requests, starts, positions))
            ids = [request.draft_ids[-1] for request in requests]
            out_RE, feedback_RE = drafter(self._ids(ids), feedback_RE, self._ids(positions), attend, False)

    def _choose_drafts(self, logits_RV: Tensor, requests: Sequence[Request]) -> None:
        chosen = logits_RV.argmax(dim=-1).tolist()
        logits: npt.NDArray[np.float32] | None = None
        to_target = self._draft_to_target
        for row, request in enumerate(requests):
            params = request.params
            draft = chosen[row]
            if params.temperature > 0.0 and self.coupled:
                if logits is None:
                    logits = logits_RV.cpu().numpy()
                assert params.seed is not None
                position = len(request.token_ids) + len(request.draft_ids)
                noise = gumbel(params.seed, params.sample_index, position, self.model.vocab_size)
                scores = logits[row].astype(np.float64) / params.temperature
                draft = int(np.argmax(scores + (noise if to_target is None else noise[to_target])))
            request.draft_ids.append(draft if to_target is None else int(to_target[draft]))

    def copy_page(self, group: str, source: int, destination: int) -> None:
        """Copy the bytes of one page of one group."""
        kv = self.kv[group]
        kv[destination].copy_(kv[source])


def _layer_map(groups: Sequence[GroupSpec]) -> list[tuple[GroupSpec, int]]:
    by_id = {layer: (group, index) for group in groups for index, layer in enumerate(group.layer_ids)}
    return [by_id[layer] for layer in range(len(by_id))]
