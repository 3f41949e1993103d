"""Speed of delta nets, sparse latents and block drafts, each beside what it replaces, in turns in one process.

    python -m benchmarks.engine.kinds [delta] [sparse] [blocks] [--threads 1] [--rounds 5]

delta: three delta nets and a layer of attention, beside four of attention, of half Qwen3.5's sizes. sparse: two
layers of latents of DeepSeek's size, of which a row attends to 512, beside all. Random weights, bfloat16, one request.
blocks: baton-demo-llama with its DFlash and EAGLE-3 heads, over no drafter.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from baton.bench.engine import speculative_over_plain
from baton.engine.llm import LLM
from baton.engine.request_checks import make_request
from baton.sampling_params import SamplingParams
from baton.wire import GenerateRequest
from testkit.checkpoints.moe import make_moe_checkpoint
from testkit.checkpoints.qwen_hybrid import make_qwen_hybrid

MODELS = Path(__file__).resolve().parents[2] / "models"
LENGTHS = (128, 2048, 8192)
STEPS, MAX_LEN = 24, 8320
_DELTA: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": MAX_LEN,
}
_KINDS = {
    "delta nets and attention": ["linear_attention"] * 3 + ["full_attention"],
    "attention": ["full_attention"] * 4,
}
_LATENTS: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": MAX_LEN,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
}
_INDEXER: dict[str, Any] = {"index_topk": 512, "index_n_heads": 8, "index_head_dim": 128}
_DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3, 3 drafts": {"method": "eagle3", "model": "baton-demo-eagle3", "num_speculative_tokens": 3},
    "dflash, 3 drafts": {"method": "dflash", "model": "baton-demo-dflash", "num_speculative_tokens": 3},
    "dflash, 7 drafts": {"method": "dflash", "model": "baton-demo-dflash", "num_speculative_tokens": 7},
}


def one_request(llm: LLM, length: int, name: str) -> tuple[float, float]:
    """Seconds to the first token, and the median of the decode steps after it."""
    core, params = llm._engine.core, SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    turn = sum(name.encode())
    prompt = [(7 * i + i * i // 3 + 31 * turn) % 250 + 3 for i in range(length)]
    wire = GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params)
    llm._chunks[name] = []
    core.add(make_request(llm._engine, wire))
    began = time.perf_counter()
    while not llm._chunks[name]:
        core.step()
    first, times = time.perf_counter() - began, []
    while core.scheduler.running:
        began = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - began)
    return first, statistics.median(times)


def beside(models: Mapping[str, Path], rounds: int) -> None:
    """Print two models' speed, with the ratios of seconds of the first over the second."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    settings |= {"kv_cache_memory": 1 << 28, "max_model_len": MAX_LEN}
    engines = {name: LLM(str(path), **settings) for name, path in models.items()}
    for length in LENGTHS:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for turn in range(rounds + 1):
            for name, llm in engines.items():
                times = one_request(llm, length, f"{length}-{turn}")
                if turn:  # the first warms up
                    found[name].append(times)
        seconds = {name: [times[0] for times in of] for name, of in found.items()}
        rates = {name: f"{length / statistics.median(of):,.0f}" for name, of in seconds.items()}
        print(f"{length:6,} tokens, prompt, tokens/s: {_line(rates, seconds)}", flush=True)
        seconds = {name: [times[1] for times in of] for name, of in found.items()}
        steps = {name: f"{1e3 * statistics.median(of):.2f}" for name, of in seconds.items()}
        print(f"{length:6,} tokens, decode step, ms: {_line(steps, seconds)}", flush=True)
    for llm in engines.values():
        llm.close()


def _line(shown: Mapping[str, str], seconds: Mapping[str, list[float]]) -> str:
    """With the median, least and greatest of the rounds' ratios."""
    one, other = seconds.values()
    ratios = sorted(a / b for a, b in zip(one, other, strict=True))
    ratio = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    return f"{', '.join(f'{name} {of}' for name, of in shown.items())}; ratio of seconds {ratio}"


def delta(folder: Path, rounds: int) -> None:
    models = {
        name: make_qwen_hybrid(folder / f"delta{i}", dtype=torch.bfloat16, layer_types=kinds, **_DELTA)
        for i, (name, kinds) in enumerate(_KINDS.items())
    }
    beside(models, rounds)


def sparse(folder: Path, rounds: int) -> None:
    models = {
        "512 chosen": make_moe_checkpoint(folder / "sparse", "deepseek_v32", **_LATENTS, **_INDEXER),
        "all": make_moe_checkpoint(folder / "dense", "deepseek_v3", **_LATENTS, n_group=1, topk_group=1),
    }
    beside(models, rounds)


def blocks(folder: Path, rounds: int) -> None:
    for name, config in _DRAFTERS.items():
        spec = {**config, "model": str(MODELS / config["model"])}
        ratio, fast, slow = speculative_over_plain(str(MODELS / "baton-demo-llama"), spec)
        print(f"{name}: {fast:,.0f} tokens/s, plain {slow:,.0f}: {ratio:.3f}", flush=True)


PARTS = {"delta": delta, "sparse": sparse, "blocks": blocks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts or PARTS:
            print(f"{part}:", flush=True)
            PARTS[part](Path(folder), options.rounds)


if __name__ == "__main__":
    main()
