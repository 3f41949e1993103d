"""`make bench`: measure every ratio of the README in one run. Run it on an idle machine."""

from __future__ import annotations

import os
import platform

from baton.bench import engine, serve, transport
from baton.deployment import Deployment
from benchmarks.demo import SPECULATIVE, TARGET


def _ratio(figures: serve.ServeFigures) -> str:
    low, high = figures.ttft_ratio_quartiles
    return (
        f"{figures.ttft_ratio:.3f} (quartiles {low:.3f} to {high:.3f}, {figures.num_pairs} pairs; "
        f"{figures.ttft_ms:.1f} over {figures.reference_ttft_ms:.1f} ms)"
    )


def integrity_cost() -> serve.ServeFigures:
    """P/D with `--integrity full` over P/D with `off`."""
    flags, router = serve.deployment_flags(SPECULATIVE), ["--kv-mode", "push"]
    with (
        Deployment(TARGET, engine_flags=[*flags, "--integrity", "off"], router_flags=router) as off,
        Deployment(TARGET, engine_flags=[*flags, "--integrity", "full"], router_flags=router) as full,
    ):
        return serve.alternate(TARGET, off.url, full.url, prompt_tokens=2048, num_pairs=30, max_tokens=8)


def main() -> None:
    print(f"{platform.machine()}, {os.cpu_count()} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}")
    for mode in ("push", "pull"):
        figures = serve.measure_deployments(TARGET, SPECULATIVE, mode=mode)
        print(f"TTFT P/D ({mode}) over single, 512 tokens: {_ratio(figures)}", flush=True)
    figures = integrity_cost()
    print(f"TTFT P/D (push) integrity full over off, 2,048 tokens: {_ratio(figures)}", flush=True)
    for copies in transport.measure_copies("shm", [transport.COPY_BYTES]):
        print(copies, flush=True)
    for name, value in transport.measure_planning().items():
        print(f"{name}: {value}", flush=True)
    for batch in (1, 8):
        ratio, step, bare = engine.step_over_forward(TARGET, batch)
        print(f"engine step over bare forward, batch {batch}: {ratio:.3f} ({step:.2f} over {bare:.2f} ms)", flush=True)
    ratio, fast, slow = engine.speculative_over_plain(TARGET, SPECULATIVE)
    print(f"speculative over plain decode: {ratio:.3f} ({fast:.0f} over {slow:.0f} tokens/s)")


if __name__ == "__main__":
    main()
