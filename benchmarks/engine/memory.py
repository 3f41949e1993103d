"""`python -m benchmarks.engine.memory`: memory of engines, as Markdown. Each figure is from its own process.

The first table compares peaks (`VmHWM`) of engines that start with random bfloat16 weights and compute a prompt with
the necessary parts: weights, pool, and a process with Python, PyTorch and this package before loading. The second gives
the KV of one prompt in caches of several kinds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MIB = 1 << 20
PROMPT = 4096
CHUNK = 512
TOKENS = 8192
_POOL = 256 * MIB
_WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 64000,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 8192,
}
_PEAKS: Mapping[str, dict[str, Any]] = {
    "0.4 billion weights": {"num_hidden_layers": 24},
    "0.6 billion weights": {"num_hidden_layers": 40},
    "1.0 billion weights": {"hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128, "num_hidden_layers": 16},
    "0.3 billion weights, head tied to the embedding": {"num_hidden_layers": 24, "tie_word_embeddings": True},
}
_THIN = {"hidden_size": 64, "intermediate_size": 64, "torch_dtype": "bfloat16", "max_position_embeddings": 8192}
_LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 6}
_WINDOWS = {"sliding_window": 512, "layer_types": ["full_attention"] + ["sliding_attention"] * 5}
# With the bytes per token over all layers.
_KINDS: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "latents of 512 + 64, 16 heads, 4 layers": (
        "deepseek_v2",
        4 * (512 + 64) * 2,
        {**_THIN, **_LATENTS, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 4},
    ),
    "the same expanded (K of 192, V of 128 a head)": (
        "llama",
        4 * 16 * (192 + 128) * 2,
        {**_THIN, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 160, "num_hidden_layers": 4},
    ),
    "5 windows of 512 to 1 full, 4 heads of 128": (
        "qwen3",
        6 * 4 * 2 * 128 * 2,
        {**_THIN, **_HEADS, "use_sliding_window": True, **_WINDOWS},
    ),
    "the same, all 6 full": ("qwen3", 6 * 4 * 2 * 128 * 2, {**_THIN, **_HEADS}),
}


def status(name: str) -> int:
    """Bytes, from a line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def measure(path: str, pool: int) -> dict[str, int]:
    """Start an engine over a checkpoint, with a pool of `pool` bytes, and compute a prompt."""
    import torch

    from baton.engine.build import build_engine
    from baton.engine.config import EngineConfig
    from baton.engine.request_checks import make_request
    from baton.sampling_params import SamplingParams
    from baton.wire import GenerateRequest

    torch.set_num_threads(1)
    before = status("VmHWM")
    config = EngineConfig(
        model=path,
        kv_cache_memory=pool,
        max_num_batched_tokens=CHUNK,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    engine = build_engine(config, lambda chunk, last: None)
    cache, memories = engine.core.cache, engine.core.executor.runner.kv  # type: ignore[attr-defined]
    held = 0
    greedy = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    prompt = [3 + (7 * i + i * i) % 200 for i in range(PROMPT)]
    wire = GenerateRequest(request_id="r", prompt_token_ids=prompt, sampling_params=greedy)
    engine.core.add(make_request(engine, wire))
    while engine.core.step():
        held = max(held, sum(p.num_referenced * memories[name].spec.page_bytes for name, p in cache.pools.items()))
    sizes = {name: pool.page_size for name, pool in cache.pools.items()}
    return {
        "before": before,
        "weights": sum(file.stat().st_size for file in Path(path).glob("*.safetensors")),
        "peak": status("VmHWM"),
        "token": sum(memory.spec.page_bytes // sizes[name] for name, memory in memories.items()),
        "held": held,
    }


def _of(model_type: str, fields: dict[str, Any], pool: int) -> dict[str, int]:
    from testkit.checkpoints.common import make_checkpoint
    from testkit.checkpoints.moe import make_moe_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        make = make_moe_checkpoint if model_type == "deepseek_v2" else make_checkpoint
        path = make(Path(folder), model_type, **fields)
        command = [sys.executable, "-m", "benchmarks.engine.memory", str(path), str(pool)]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, int] = json.loads(run.stdout)
    return found


def main() -> int:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
        return 0
    print("| engine | weights, MiB | pool, MiB | before loading, MiB | peak, MiB | peak over weights + pool + before |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, fields in _PEAKS.items():
        found = _of("qwen3", {**_WIDE, **fields}, _POOL)
        sizes = [found["weights"], _POOL, found["before"]]
        row = [name, *(f"{size / MIB:.0f}" for size in (*sizes, found["peak"])), f"{found['peak'] / sum(sizes):.2f}"]
        print("|", " | ".join(row), "|")
    print(
        f"\n| cache | bytes a token | pool of {TOKENS:,} tokens | held by a prompt of {PROMPT:,} | peak over before |"
    )
    print("| --- | --- | --- | --- | --- |")
    for name, (model_type, token, fields) in _KINDS.items():
        found = _of(model_type, fields, token * TOKENS)
        assert found["token"] == token, f"{name}: {found['token']} bytes"
        kept = token * TOKENS, found["held"], found["peak"] - found["before"]
        print(f"| {name} | {token:,} |", " | ".join(f"{size / MIB:.0f} MiB" for size in kept), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
