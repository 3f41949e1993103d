"""Chooses drafts from a drafter's logits."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from baton.engine.sampling.noise import gumbel, gumbel_rows
from baton.engine.sampling.sampler import BLOCK_SIZE, MINUS_INFINITY, on_device, unpack_masks
from baton.engine.step_plans import FloatArray, IntArray, Noise
from baton.structured.drafting import Constrained


class DraftSampler:
    """Chooses drafts with the target's noise at their positions. `first_position` [R]: of each request's first
    draft. `margins`: as `DraftBatch.margins`, filled."""

    def __init__(
        self,
        noise: Noise,
        first_position: IntArray,
        vocab_size: int,
        constrained: Constrained | None = None,
        margins: FloatArray | None = None,
    ) -> None:
        self._noise, self._first, self._vocab_size = noise, first_position, vocab_size
        self._constrained, self._margins = constrained, margins
        self._greedy = not noise.temperature.any()

    def __call__(self, logits_RV: Tensor, requests: IntArray, step: int, target_ids: Tensor | None) -> IntArray:
        if self._constrained is None:
            return self._choose(logits_RV, requests, step, target_ids)
        row_bits = [(row, self._constrained.bits(request)) for row, request in enumerate(requests.tolist())]
        bits = {row: allowed for row, allowed in row_bits if allowed is not None}
        if bits:
            allowed_RV = unpack_masks(np.stack(list(bits.values())), logits_RV, self._vocab_size)
            allowed_RV = allowed_RV if target_ids is None else allowed_RV.index_select(1, target_ids)
            rows = on_device(np.array(list(bits)), logits_RV)
            masked_RV = logits_RV.index_select(0, rows).masked_fill(~allowed_RV, MINUS_INFINITY)
            logits_RV = logits_RV.index_copy(0, rows, masked_RV)
        chosen = self._choose(logits_RV, requests, step, target_ids)
        for request, token in zip(requests.tolist(), chosen.tolist(), strict=True):
            self._constrained.chose(request, token)
        return chosen

    def noise(self, requests: IntArray, step: int) -> tuple[FloatArray, list[FloatArray | None]] | None:
        """As `drafters.base.DraftNoise`, without tokens that a grammar forbids."""
        if self._greedy:
            return None
        own, position = self._noise.take(requests), self._first[requests] + step
        words = zip(own.seed.tolist(), own.sample_index.tolist(), position.tolist(), own.temperature, strict=True)
        noise = [gumbel(*word, self._vocab_size) if temperature else None for *word, temperature in words]
        return own.temperature, noise

    def _choose(self, logits_RV: Tensor, requests: IntArray, step: int, target_ids: Tensor | None) -> IntArray:
        if self._greedy:
            likeliest = logits_RV.argmax(dim=-1)
            self._note_margins(requests, step, logits_RV)
            ids: IntArray = (likeliest if target_ids is None else target_ids[likeliest]).cpu().numpy()
            return ids
        drawn = np.flatnonzero(self._noise.temperature[requests])
        best = np.empty(len(requests), dtype=np.int64)
        if len(drawn) < len(requests):
            best[:] = logits_RV.argmax(dim=-1).cpu().numpy()
            self._note_margins(requests, step, logits_RV)
        at_once = max(1, BLOCK_SIZE // self._vocab_size)
        for rows in (drawn[i : i + at_once] for i in range(0, len(drawn), at_once)):
            own = self._noise.take(requests[rows])
            noise = on_device(gumbel_rows(own, self._first[requests[rows]] + step, self._vocab_size), logits_RV)
            logits = logits_RV if len(rows) == len(requests) else logits_RV.index_select(0, on_device(rows, logits_RV))
            scores = logits.double() / on_device(own.temperature, logits_RV)[:, None]
            scores += noise if target_ids is None else noise.index_select(1, target_ids)
            best[rows] = scores.argmax(dim=-1).cpu().numpy()
            self._note_margins(requests[rows], step, scores)
        if target_ids is None:
            return best
        picked: IntArray = target_ids.index_select(0, on_device(best, target_ids)).cpu().numpy()
        return picked

    def _note_margins(self, requests: IntArray, step: int, scores_RV: Tensor) -> None:
        if self._margins is not None and scores_RV.shape[-1] > 1:
            first, second = scores_RV.topk(2, dim=-1).values.double().cpu().numpy().T
            self._margins[requests, step] = first - second
