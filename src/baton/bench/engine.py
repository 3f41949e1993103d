"""Two ratios of medians: engine step time over bare model forward, and speculative over plain decode speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from baton.bench.progress_bar import with_progress
from baton.engine.attention.base import AttnBatch
from baton.engine.attention.paged_cache import PagedCache
from baton.engine.core import EngineCore
from baton.engine.executor import LocalExecutor
from baton.engine.llm import LLM
from baton.engine.request_checks import make_request
from baton.engine.runner import ModelRunner
from baton.sampling_params import SamplingParams
from baton.verify.observe import make_cases
from baton.wire import GenerateRequest

STEPS = 60
ROUNDS = 5


def step_over_forward(model: str, batch: int) -> tuple[float, float, float]:
    """(ratio, engine step ms, bare forward ms) of plain greedy decode, context of about 128 tokens.

    The bare forward has the same model, rows, pages and attention kernel, and argmax of the logits.
    """
    with LLM(model, max_num_seqs=batch) as llm:
        core, runner = _decoding(llm, batch)
        group = runner._target_layers[0][0].memory.spec
        running = list(core.scheduler.running)

        def bare() -> Callable[[], None]:
            positions = [r.num_computed for r in running]
            tables = [r.kv.tables[group.name] for r in running]
            table = np.zeros((batch, max(t.size for t in tables)), dtype=np.int32)
            for row, ids in enumerate(tables):
                table[row, : ids.size] = ids
            attn = AttnBatch(
                query_start=np.arange(batch + 1, dtype=np.int32),
                positions=np.asarray(positions, dtype=np.int64),
                page_table=table,
            )
            ids_T = torch.tensor([r.token_ids[-1] for r in running])
            positions_T = torch.tensor(positions)

            cache = PagedCache(runner.backend, runner._target_layers, {group.name: attn}, {})

            def run() -> None:
                with torch.inference_mode():
                    hidden, _ = runner.model(ids_T, positions_T, cache)
                    runner.model.compute_logits(hidden).argmax(dim=-1).tolist()

            return run

        step_s, bare_s = [], []
        for _ in range(STEPS):
            forward = bare()
            # Exclude steps that allocate pages.
            if all(r.num_computed % group.page_size for r in running):
                started = time.perf_counter()
                forward()
                bare_s.append(time.perf_counter() - started)
            started = time.perf_counter()
            core.step()
            step_s.append(time.perf_counter() - started)
    step, plain = statistics.median(step_s) * 1e3, statistics.median(bare_s) * 1e3
    return step / plain, step, plain


def _decoding(llm: LLM, batch: int) -> tuple[EngineCore, ModelRunner]:
    """The prompts of `batch` requests are computed."""
    engine = llm._engine
    core = engine.core
    assert isinstance(core.executor, LocalExecutor)
    params = SamplingParams(max_tokens=4 * STEPS, temperature=0.0, ignore_eos=True)
    cases = make_cases(engine.tokenizer, [128 + i for i in range(batch)], params)
    for index, case in enumerate(cases):
        prompt = list(case.prompt_token_ids)
        wire = GenerateRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params)
        llm._chunks[str(index)] = []
        core.add(make_request(engine, wire))
    while any(r.is_prefilling for r in core.scheduler.running) or len(core.scheduler.running) < batch:
        core.step()
    return core, core.executor.runner


def speculative_over_plain(model: str, speculative_config: dict[str, Any]) -> tuple[float, float, float]:
    """Ratio, and tokens per second of greedy decode at batch 1: medians of alternating rounds."""
    params = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True)
    with (
        LLM(model, enable_prefix_caching=False) as plain,
        LLM(model, enable_prefix_caching=False, speculative_config=speculative_config) as speculative,
    ):
        cases = make_cases(plain._engine.tokenizer, [64] * (ROUNDS * 4), params)
        rates: dict[str, list[float]] = {"plain": [], "speculative": []}
        for warm_up, case in enumerate(with_progress([cases[0], *cases], "pair")):
            for name, llm in (("plain", plain), ("speculative", speculative)):
                started = time.perf_counter()
                result = llm.generate([list(case.prompt_token_ids)], params)[0]
                if warm_up:
                    rates[name].append(len(result.outputs[0].token_ids) / (time.perf_counter() - started))
    fast, slow = statistics.median(rates["speculative"]), statistics.median(rates["plain"])
    return fast / slow, fast, slow
