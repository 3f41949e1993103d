"""The parts of a forward's time on this CPU: linear layers, attention, the rest; and how close they are to its limits.

    python -m benchmarks.engine.step_profile MODEL --threads 1

Times are CPU time of the computing thread (of the first, if several), so other processes disturb them less than wall
time. "Machine" is what the same process achieves with a large matrix product in the same dtype (prefill), and when
reading memory (decode). The parts are those of layers that are called one by one; an engine runs the layers of a few
rows in one call, if it can, which is the time "fused".
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
import typer

from baton.engine.attention.base import AttnBatch
from baton.engine.attention.registry import get_backend
from baton.models.layer_cache import AttnRows, KVLayerSpec, KVRegion, KVRegions
from baton.models.layers.linear import Linear
from baton.models.loading.loader import load_model
from benchmarks.engine.decode import rates

PAGE = 16
CONTEXT = 512
# Name, requests, position of the first row, rows of each, repetitions.
CASES = (
    ("prefill, 512 rows", 1, 0, CONTEXT, 5),
    ("decode, batch 1", 1, CONTEXT, 1, 25),
    ("verification, 4 rows", 1, CONTEXT, 4, 15),
    ("decode, batch 8", 8, CONTEXT, 1, 12),
    ("decode, batch 32", 32, CONTEXT, 1, 6),
)


class Pages:
    """The keys and values of a forward's rows, for layers in one call."""

    def __init__(self, kv: torch.Tensor, batch: AttnBatch) -> None:
        self._kv, self._batch = kv, batch

    def regions(self) -> KVRegions:
        batch, layers = self._batch, np.array([(0, layer, 0) for layer in range(self._kv.shape[1])])
        return KVRegions(batch.query_start, batch.positions, (KVRegion(self._kv, batch.page_table),), layers)


class Clock:
    """Seconds of CPU time spent in the wrapped functions, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that its time is added under `name`."""

        def timed(*arguments: Any) -> Any:
            started = time.thread_time()
            result = function(*arguments)
            self.spent[name] = self.spent.get(name, 0.0) + time.thread_time() - started
            return result

        return timed


def _best(function: Callable[[], object], repeat: int) -> float:
    spent = []
    for _ in range(repeat):
        started = time.thread_time()
        function()
        spent.append(time.thread_time() - started)
    return min(spent)


@torch.inference_mode()
def main(
    model: str,
    dtype: str = "bfloat16",
    threads: Annotated[int, typer.Option(help="of torch")] = 1,
    batch_invariant: bool = False,
) -> None:
    """Print a line for each kind of forward."""
    torch.set_num_threads(threads)
    target = load_model(model, dtype, batch_invariant=batch_invariant)
    spec, num_layers, kind = target.kv_layers[0], len(target.kv_layers), target.build.dtype
    assert isinstance(spec, KVLayerSpec), "a model without other kinds of layers"
    machine = rates(dtype)
    print(f"machine: {machine['GFLOP/s']:.0f} GFLOP/s, {machine['GB/s']:.1f} GB/s; {dtype}, {threads} threads")
    clock, backend = Clock(), get_backend("paged_cpu", "cpu")
    attend = clock.around("attention", backend.write_and_attend)
    layers = [layer for layer in target.modules() if isinstance(layer, Linear)]
    for layer in layers:
        layer.forward = clock.around("linears", layer.forward)  # type: ignore[method-assign]
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    head = target.vocab_size * target.hidden_size
    for name, requests, start, rows, repeat in CASES:
        num_pages = -(-(CONTEXT + rows) // PAGE)
        shape = (1 + requests * num_pages, num_layers, 2, PAGE, spec.num_kv_heads, spec.head_dim)
        kv = torch.zeros(shape, dtype=kind)
        table = np.arange(1, 1 + requests * num_pages, dtype=np.int32).reshape(requests, num_pages)
        positions = np.tile(np.arange(start, start + rows), requests)
        batch = AttnBatch(np.arange(0, requests * rows + 1, rows, dtype=np.int32), positions, table)
        ids, at = torch.zeros(requests * rows, dtype=torch.int64), torch.from_numpy(positions)

        def attend_layer(layer: int, rows: AttnRows, kv: Any = kv, batch: Any = batch) -> Any:
            return attend(kv, layer, rows, batch, None)

        def forward(cache: Any, rows: int = rows, requests: int = requests, ids: Any = ids, at: Any = at) -> float:
            began = time.thread_time()
            hidden, _ = target(ids, at, cache)
            target.compute_logits(hidden.view(requests, rows, -1)[:, -1])
            return time.thread_time() - began

        parts: list[tuple[float, float, float]] = []
        for _ in range(repeat + 1):
            clock.spent.clear()
            parts.append((forward(attend_layer), clock.spent["linears"], clock.spent["attention"]))
        pages: Any = Pages(kv, batch)
        is_fused = target.model.fused is not None and target.model.fused.regions(len(ids), pages)
        fused = [forward(pages) for _ in range(repeat + 1)][1:] if is_fused else []
        total, linears, attention = (statistics.median(column) * 1e3 for column in zip(*parts[1:], strict=True))
        work = 2 * ((numbers - head) * requests * rows + head * requests)
        used = (
            f"{work / linears / 1e6 / machine['GFLOP/s']:.0%} of the machine's products"
            if rows == CONTEXT
            else f"{numbers * kind.itemsize / linears / 1e6 / machine['GB/s']:.0%} of its bandwidth"
        )
        print(
            f"{name:22} {total:8.1f} ms: linears {linears:7.1f} ({used}), attention {attention:6.1f}, "
            f"rest {total - linears - attention:5.1f}"
            + (f"; fused {statistics.median(fused) * 1e3:8.1f} ms" if fused else ""),
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
