"""Attention of one decoding row over latents, absorbed against expanded.

    python -m benchmarks.engine.latents

One layer of DeepSeek-V2-Lite's sizes (16 heads, latents of 512 + 64, heads of 128 + 64 and values of 128), bfloat16,
one thread. Both forms run in turns; the output is the thread's CPU time, the median of the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from baton.engine.attention.base import AttnBatch
from baton.engine.attention.latent import PagedLatentAttention
from baton.models.layer_cache import LatentRows
from baton.models.layers.latent import LatentProjection
from baton.models.layers.linear import Build
from baton.models.layers.specs import LatentSpec

SPEC = LatentSpec(latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=None, is_interleaved=True)
HEADS, PAGE, ROUNDS = 16, 16, 15
LENGTHS = (128, 512, 2048, 8192)


class _Expanded(PagedLatentAttention):
    def _is_cheaper_expanded(self, *asked: object) -> bool:
        return True


class _Absorbed(PagedLatentAttention):
    def _is_cheaper_expanded(self, *asked: object) -> bool:
        return False


def forms(length: int) -> dict[str, Callable[[], object]]:
    """A decode step after `length` - 1 cached tokens, in each form."""
    projection = LatentProjection(SPEC, HEADS, Build(torch.bfloat16, torch.device("cpu")))
    torch.nn.init.normal_(projection.weight, std=0.02)
    num_pages = -(-length // PAGE)
    width = SPEC.latent_dim + SPEC.rope_dim
    kept = torch.randn(num_pages + 1, 1, PAGE, 1, width, dtype=torch.bfloat16)
    table = (np.random.default_rng(0).permutation(num_pages) + 1).astype(np.int32)[None]
    batch = AttnBatch(np.array([0, 1], dtype=np.int32), np.array([length - 1]), table)
    query = torch.randn(1, HEADS, SPEC.nope_dim + SPEC.rope_dim, dtype=torch.bfloat16)
    latent = torch.randn(1, SPEC.latent_dim, dtype=torch.bfloat16)
    rope = torch.randn(1, SPEC.rope_dim, dtype=torch.bfloat16)

    def step(kind: type[PagedLatentAttention]) -> Callable[[], object]:
        layer = kind([kept], 0, batch)
        return lambda: layer.attend(LatentRows(query, latent, rope, 0.07, projection))

    return {"absorbed": step(_Absorbed), "expanded": step(_Expanded)}


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    for length in LENGTHS:
        steps = forms(length)
        spent: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(ROUNDS + 2):  # the first two warm up
            for name, step in steps.items():
                started = time.thread_time()
                step()
                spent[name].append((time.thread_time() - started) * 1e3)
        absorbed, expanded = (statistics.median(spent[name][2:]) for name in ("absorbed", "expanded"))
        ratio = f"{expanded / absorbed:.1f} times"
        print(f"{length:6,} tokens: absorbed {absorbed:7.3f} ms, expanded {expanded:8.3f} ms: {ratio}")


if __name__ == "__main__":
    main()
