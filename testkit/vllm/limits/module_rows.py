"""The rows that vLLM's V2 runner gives to several MTP modules, by its own kernels in Triton's interpreter: in the
second step of a request that it computed, and in the first step of one whose prompt it received.

    python -m testkit.vllm.limits.module_rows

The V2 runner keeps each request's last rows by its place in the batch, and computes them again once the drafts on
which later modules' entries depend are verified. A received prompt has none yet, but vLLM pads its first step with
placeholders, which are all rejected: so entries that were received are computed again, from what the place's last
request left.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

NUM_DRAFTS, HIDDEN, MOST_TOKENS = 3, 4, 16
PROMPT = 10  # tokens of each prompt


def tokens_of(request: int, positions: Sequence[int]) -> list[int]:
    """They, and elements of hidden states, tell the request and the position."""
    return [1000 * request + position for position in positions]


def own_kernels() -> Any:
    """vLLM's module of kernels. On CPUs vLLM has placeholders for Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language
    from vllm import triton_utils

    triton_utils.triton, triton_utils.tl = triton, triton.language
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator

    return speculator


class Place:
    """One place of a batch, with what the runner keeps for it."""

    def __init__(self, kernels: Any) -> None:
        self._kernels, self._place = kernels, torch.zeros(1, dtype=torch.int32)
        self._ids = torch.zeros(1, NUM_DRAFTS - 1, dtype=torch.int64)
        self._states = torch.zeros(1, NUM_DRAFTS - 1, HIDDEN)

    def step(self, request: int, start: int, end: int, rejected: int) -> list[dict[str, int]]:
        """The rows of the first module for a step over tokens [start, end), of which the last ones are `rejected`: each
        one's position, and by `tokens_of` whose hidden state and whose next token it takes.
        """
        kernels, positions = self._kernels, range(start, end)
        batch = SimpleNamespace(
            idx_mapping=self._place,
            input_ids=torch.tensor(tokens_of(request, positions), dtype=torch.int32),
            positions=torch.tensor(positions),
            seq_lens=torch.tensor([end], dtype=torch.int32),
        )
        buffers = SimpleNamespace(
            input_ids=torch.zeros(MOST_TOKENS, dtype=torch.int32),
            positions=torch.zeros(MOST_TOKENS, dtype=torch.int64),
            seq_lens=torch.zeros(1, dtype=torch.int32),
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
        )
        sampled = torch.tensor(tokens_of(request, [end - rejected]))
        last, num_rejected = torch.zeros(1, dtype=torch.int64), torch.tensor([rejected], dtype=torch.int32)
        one, states = torch.ones(1, dtype=torch.int32), torch.zeros(MOST_TOKENS, HIDDEN)
        # Of prompts that are computed in chunks.
        ahead = torch.zeros(NUM_DRAFTS, 1, dtype=torch.int32), torch.zeros(1, NUM_DRAFTS - 1, dtype=torch.int64)
        kernels.prepare_input_buffers(
            1, batch, self._ids, one, num_rejected, sampled, *ahead, buffers, last, 1, NUM_DRAFTS
        )
        target = torch.tensor(tokens_of(request, positions)).float()[:, None].expand(-1, HIDDEN).contiguous()
        kernels.prepare_input_hidden_states_and_embeddings(
            1, end - start, states, target, self._states, None, None, batch, buffers, num_rejected, NUM_DRAFTS
        )
        kernels.cache_inputs(
            buffers, None, states, self._ids, None, self._states, last, self._place, 1, NUM_DRAFTS, False
        )
        rows = range(int(last) + 1)
        return [
            {
                "position": int(buffers.positions[row]),
                "state": int(states[row, 0]),
                "token": int(buffers.input_ids[row]),
            }
            for row in rows
        ]


def main() -> None:
    """Print the rows of request 1's second step, and of the first step of request 2, which has its place then."""
    place = Place(own_kernels())
    place.step(1, 0, PROMPT, 0)
    computed = place.step(1, PROMPT, PROMPT + 1 + NUM_DRAFTS, NUM_DRAFTS)
    received = place.step(2, PROMPT - 1, PROMPT + NUM_DRAFTS, NUM_DRAFTS)
    print(json.dumps({"computed": computed, "received": received}))


if __name__ == "__main__":
    main()
