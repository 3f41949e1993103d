"""Time per output token with k "auto", against no drafts and a fixed k, at several numbers of requests.

    python -m benchmarks.engine.adaptive_drafts [MODEL DRAFTER] [--batches 1,4,8,16,32] [--turn 1] [--threads 1]

The engines share the weights, whose place in memory matters, and take turns step by step, there and back, since what a
step finds in the caches depends on the step before it. Steps count until the first request ends: with drafts requests
end one by one, and the last ones would be a smaller batch. With a later `--turn`, earlier questions and the model's
answers of up to 128 tokens come before the question. Without arguments: SmolLM2-135M-Instruct and its EAGLE-3 head. The
ratio is auto over the better of the other two: the rounds' median, least and most.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import torch
import typer

from baton.engine.llm import LLM
from baton.engine.request_checks import make_request
from baton.engine.runner import ModelRunner
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest
from benchmarks.smollm2 import QUESTIONS, chat_ids, smollm2

HEAD = "models/baton-smollm2-eagle3"
_MEMORY = 768 << 20
_ANSWER = 128


class _Run:
    """Decoding requests of one engine."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]], tokens: int, name: str) -> None:
        self._core, self._batch = llm._engine.core, len(prompts)
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            wire = GenerateRequest(request_id=f"{name}-{index}", prompt_token_ids=prompt, sampling_params=params)
            llm._chunks[wire.request_id] = []
            self._core.add(make_request(llm._engine, wire))
        scheduler = self._core.scheduler
        while scheduler.waiting or any(request.is_prefilling for request in scheduler.running):
            self._core.step()
        self._before = self._after = self._counters()
        self._verifications = 0
        self._wall = self._cpu = 0.0

    def _counters(self) -> tuple[int, int]:
        return self._core.metrics.num_generation_tokens, self._core.metrics.num_draft_tokens

    @property
    def is_running(self) -> bool:
        return bool(self._core.scheduler.running)

    def step(self) -> None:
        if len(self._core.scheduler.running) < self._batch:
            self._core.step()
            return
        wall, cpu = time.perf_counter(), time.process_time()
        self._core.step()
        self._wall += time.perf_counter() - wall
        self._cpu += time.process_time() - cpu
        self._verifications += self._batch
        self._after = self._counters()

    def result(self) -> tuple[float, float, float]:
        """Wall and CPU seconds per output token of a request, and drafts per verification."""
        tokens, drafted = (now - before for now, before in zip(self._after, self._before, strict=True))
        made = tokens / self._batch
        return self._wall / made, self._cpu / made, drafted / self._verifications


def _share_weights(engines: Iterable[LLM]) -> None:
    target, drafter = None, None
    for llm in engines:
        runner: ModelRunner = llm._engine.core.executor.runner  # type: ignore[attr-defined]
        target = target or (runner.model, runner._head)
        runner.model, runner._head = target
        drafter = runner.drafter = drafter or runner.drafter


def _chats(llm: LLM, turn: int) -> list[list[int]]:
    """Prompts of a chat's `turn`, from 1, one for each question."""
    tokenizer, num = llm._engine.tokenizer, len(QUESTIONS)
    answers: list[str] = []
    if turn > 1:
        params = SamplingParams(max_tokens=_ANSWER, temperature=0.0)
        asked = [chat_ids(tokenizer, one) for one in QUESTIONS]
        answers = [result.outputs[0].text for result in llm.generate(asked, params)]
    prompts = []
    for index in range(num):
        earlier: list[dict[str, str]] = []
        for before in range(index + 1, index + turn):
            earlier.append({"role": "user", "content": QUESTIONS[before % num]})
            earlier.append({"role": "assistant", "content": answers[before % num]})
        prompts.append(chat_ids(tokenizer, QUESTIONS[index], earlier))
    return prompts


def _round(
    engines: Mapping[str, LLM], prompts: Sequence[list[int]], tokens: int, name: str
) -> dict[str, tuple[float, float, float]]:
    runs = {kind: _Run(llm, prompts, tokens, name) for kind, llm in engines.items()}
    order = list(runs.values())
    while going := [run for run in order if run.is_running]:
        for run in going:
            run.step()
        order.reverse()
    return {kind: run.result() for kind, run in runs.items()}


def main(
    model: Annotated[str | None, typer.Argument()] = None,
    drafter: str = HEAD,
    k: Annotated[int, typer.Option(help="of the engine with a fixed k")] = 3,
    batches: str = "1,4,8,16,32",
    tokens: int = 64,
    rounds: int = 5,
    turn: Annotated[int, typer.Option(help="of a chat, from 1")] = 1,
    threads: int = 1,
) -> None:
    """Print a line for each number of requests."""
    torch.set_num_threads(threads)
    path = model or str(smollm2())

    def spec(count: int | str) -> Mapping[str, Any]:
        return {"method": "eagle3", "model": drafter, "num_speculative_tokens": count}

    specs = {"none": None, "full": spec(k), "auto": spec("auto")}
    engines = {name: LLM(path, speculative_config=one, kv_cache_memory=_MEMORY) for name, one in specs.items()}
    _share_weights(engines.values())
    chats = _chats(engines["none"], turn)
    context = statistics.median(map(len, chats))
    print(
        f"{path}, {drafter}, k {k}, medians of {rounds} rounds of {tokens} tokens after prompts of {context:.0f}, "
        f"{threads} threads; wall ms (CPU ms) per token"
    )
    for batch in (int(number) for number in batches.split(",")):
        # The first round warms up.
        prompts = [chats[index % len(chats)] for index in range(batch)]
        measured = [_round(engines, prompts, tokens, f"{batch}-{number}") for number in range(rounds + 1)][1:]
        medians = {
            name: [statistics.median(column) for column in zip(*(one[name] for one in measured), strict=True)]
            for name in engines
        }
        cells = [f"{name} {wall * 1e3:6.1f} ({cpu * 1e3:6.1f})" for name, (wall, cpu, _) in medians.items()]
        best = min(("none", "full"), key=lambda name: medians[name][0])
        ratios = sorted(one["auto"][0] / one[best][0] for one in measured)
        cpu_ratio = statistics.median(one["auto"][1] / one[best][1] for one in measured)
        over_none = statistics.median(one["none"][0] / one["auto"][0] for one in measured)
        print(
            f"{batch:3} requests: {', '.join(cells)}; auto drafts {medians['auto'][2]:.2f}; over {best} "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}; CPU {cpu_ratio:.3f}); "
            f"tokens per second over none {over_none:.3f}",
            flush=True,
        )
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    typer.run(main)
