"""Several MTP modules that run one after the other (DeepSeek-V3, arXiv:2412.19437, 2.2).

Module j proposes draft number j. Its row i takes x_{i+j}, so its last j - 1 rows take drafts of the modules before it.
Those rows are computed again when their tokens are known: final entries depend on known tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.drafters.base import DraftBatch
from baton.drafters.chain import IntArray
from baton.drafters.mtp_head import MtpHead


@dataclass(frozen=True, slots=True)
class Extended:
    """`last` [R, E]: the first module's output at each request's last row. `mtp_hidden` [R, K - 1, E]."""

    last: Tensor
    mtp_hidden: Tensor


class MtpChain(MtpHead):
    """If more drafts are wanted than there are modules, the last module runs again."""

    def extend(self, batch: DraftBatch) -> Extended:  # type: ignore[override]
        """Compute every module's new entries, each from the previous module's output."""
        chain, features = batch.chain, batch.features_TF
        assert chain is not None
        assert features is not None
        spans, begins = chain.spans, batch.positions[batch.query_start[:-1]]
        known = [
            np.concatenate((batch.next_ids[first:stop], ahead))
            for first, stop, ahead in zip(batch.query_start[:-1], batch.query_start[1:], chain.ahead, strict=True)
        ]
        brought = torch.from_numpy(chain.mtp_hidden).to(features)
        if not len(brought):
            brought = features[:0]
        everyone = np.arange(len(known))
        at = batch.query_start[:-1].astype(np.int64)
        made = self._run(0, batch, everyone, batch.next_ids, features, batch.positions, np.diff(batch.query_start))
        last, mtp_hidden = made[self._tensor(batch.query_start[1:].astype(np.int64) - 1)], []
        for module in range(1, len(self.layers)):
            # The carried rows, the new output of the module before this one, and a row of zeros.
            pool = torch.cat((brought, made, features.new_zeros(1, features.shape[1])))
            rows: list[IntArray] = []
            left: list[int] = []
            tokens: list[IntArray] = []
            for r, (begin, (start, stop)) in enumerate(zip(begins, spans[:, module], strict=True)):
                before, end = spans[r, module - 1]
                lead = chain.mtp_hidden_row[r, module - 1 : module] if start < before else ()
                assert all(row >= 0 for row in lead), "no row was carried for a module that needs one"
                own = np.concatenate((lead, len(brought) + at[r] + np.arange(end - before))).astype(np.int64)
                rows.append(own[: stop - start])
                left.append(int(own[stop - start]) if stop < end else len(pool) - 1)
                tokens.append(known[r][start + module - begin : stop + module - begin])
            mtp_hidden.append(pool[self._tensor(np.array(left))])
            counts = spans[:, module, 1] - spans[:, module, 0]
            positions = np.concatenate([np.arange(*span) for span in spans[:, module]])
            inputs = pool[self._tensor(np.concatenate(rows))]
            made = self._run(module, batch, everyone, np.concatenate(tokens), inputs, positions, counts)
            at = np.cumsum(counts) - counts
        return Extended(last, torch.stack(mtp_hidden, 1))

    def mtp_hidden(self, extended: Extended) -> Tensor:
        return extended.mtp_hidden

    def draft(self, batch: DraftBatch, extended: Extended) -> list[list[int]]:  # type: ignore[override]
        assert batch.chain is not None
        spans, stops = batch.chain.spans, batch.positions[batch.query_start[1:] - 1] + 1
        drafts: list[list[int]] = [[] for _ in batch.num_drafts]
        going = np.flatnonzero(batch.num_drafts)
        out, made = extended.last[self._tensor(going)], extended.last[:0]
        # The first row of each request in `made`.
        at = np.zeros(len(stops), dtype=np.int64)
        for step in range(int(batch.num_drafts.max())):
            for request, token in zip(going.tolist(), self._chosen(batch, out, going, step), strict=True):
                drafts[request].append(token)
            more = batch.num_drafts[going] > step + 1
            going, module = going[more], step + 1
            if not len(going):
                break
            if module < len(self.layers):
                pool = torch.cat((extended.mtp_hidden[:, module - 1], made))
                own, before = spans[:, module, 1], spans[:, module - 1, 1]
                rows: list[int] = []
                for r in going.tolist():
                    rows += [r] if own[r] < before[r] else []
                    rows += range(len(stops) + at[r], len(stops) + at[r] + stops[r] - before[r])
                counts = (stops - own)[going]
                tokens = np.concatenate([drafts[r][-n:] for r, n in zip(going.tolist(), counts.tolist(), strict=True)])
                positions = np.concatenate([np.arange(own[r], stops[r]) for r in going.tolist()])
                made = self._run(module, batch, going, tokens, pool[self._tensor(np.array(rows))], positions, counts)
                at[going] = np.cumsum(counts) - counts
                out = made[self._tensor(np.cumsum(counts) - 1)]
            else:
                tokens, ones = np.array([drafts[r][-1] for r in going.tolist()]), np.ones(len(going), dtype=np.int64)
                positions = stops[going] + step + 1 - len(self.layers)
                out = self._run(-1, batch, going, tokens, out[torch.from_numpy(more).to(out.device)], positions, ones)
        return drafts

    def _chosen(self, batch: DraftBatch, out: Tensor, going: IntArray, step: int) -> Sequence[int]:
        chosen: list[int] = batch.choose(self.compute_logits(out), going, step, None).tolist()
        return chosen

    def _run(
        self,
        module: int,
        batch: DraftBatch,
        requests: IntArray,
        tokens: IntArray,
        states: Tensor,
        positions: IntArray,
        counts: IntArray,
    ) -> Tensor:
        """`counts`: rows of each request. Returns states [T, E]."""
        if not len(positions):
            return states
        query_start = np.concatenate(([0], np.cumsum(counts[counts > 0]))).astype(np.int32)
        attend = batch.pages.bind(requests[counts > 0], positions, query_start)
        cos_sin = self.rotary.at(self._tensor(positions))
        output: Tensor = self.layers[module](self._embed(self._tensor(tokens)), states, cos_sin, attend)
        return output
