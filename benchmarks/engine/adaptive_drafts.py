"""Time per output token with k "auto", against no drafts and a fixed k, at several numbers of requests.

    python -m benchmarks.engine.adaptive_drafts [MODEL DRAFTER] [--batches 1,4,8,16,32]

The three engines are in one process and take turns. Without arguments: SmolLM2-135M-Instruct and its EAGLE-3 head. The
last column is auto over the better of the other two. CPU time of the process, which other processes disturb less, is
printed beside wall time.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import typer

from baton.engine.llm import LLM
from baton.engine.request_checks import make_request
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest
from benchmarks.smollm2 import QUESTIONS, chat_ids, smollm2

HEAD = "models/baton-smollm2-eagle3"
_MEMORY = 384 << 20


def _run(llm: LLM, batch: int, tokens: int, name: str) -> tuple[float, float, float]:
    """Wall and CPU seconds per output token of a request, and drafts per verification."""
    core, tokenizer = llm._engine.core, llm._engine.tokenizer
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        prompt = chat_ids(tokenizer, QUESTIONS[index % len(QUESTIONS)])
        wire = GenerateRequest(request_id=f"{name}-{index}", prompt_token_ids=prompt, sampling_params=params)
        llm._chunks[wire.request_id] = []
        core.add(make_request(llm._engine, wire))
    while core.scheduler.waiting or any(request.is_prefilling for request in core.scheduler.running):
        core.step()
    metrics = core.metrics
    before = metrics.num_generation_tokens, metrics.num_draft_tokens, metrics.num_drafts
    requests_rounds = 0
    wall, cpu = time.perf_counter(), time.process_time()
    while core.scheduler.running:
        requests_rounds += len(core.scheduler.running)
        core.step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    made = (metrics.num_generation_tokens - before[0]) / batch
    return wall / made, cpu / made, (metrics.num_draft_tokens - before[1]) / requests_rounds


def main(
    model: Annotated[str | None, typer.Argument()] = None,
    drafter: str = HEAD,
    k: Annotated[int, typer.Option(help="of the engine with a fixed k")] = 3,
    batches: str = "1,4,8,16,32",
    tokens: int = 64,
    rounds: int = 5,
) -> None:
    """Print a line for each number of requests."""
    torch.set_num_threads(1)
    path = model or str(smollm2())

    def spec(count: int | str) -> Mapping[str, Any]:
        return {"method": "eagle3", "model": drafter, "num_speculative_tokens": count}

    specs = {"none": None, "full": spec(k), "auto": spec("auto")}
    engines = {name: LLM(path, speculative_config=one, kv_cache_memory=_MEMORY) for name, one in specs.items()}
    print(f"{path}, {drafter}, k {k}, medians of {rounds} rounds of {tokens} tokens; wall ms (CPU ms) per token")
    for batch in (int(number) for number in batches.split(",")):
        found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for turn in range(rounds + 1):
            for name, llm in engines.items():
                measured = _run(llm, batch, tokens, f"{batch}-{turn}")
                if turn:  # the first warms up
                    found[name].append(measured)
        medians = {
            name: [statistics.median(column) for column in zip(*all_, strict=True)] for name, all_ in found.items()
        }
        cells = [f"{name} {wall * 1e3:6.1f} ({cpu * 1e3:6.1f})" for name, (wall, cpu, _) in medians.items()]
        ratios = [medians["auto"][i] / min(medians["none"][i], medians["full"][i]) for i in (0, 1)]
        drafts = medians["auto"][2]
        print(
            f"{batch:3} requests: {', '.join(cells)}; auto drafts {drafts:.2f}; ratio {ratios[0]:.3f} ({ratios[1]:.3f})"
        )
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    typer.run(main)
