"""What a step without requests writes into KV that is another request's by then: one vLLM with an EAGLE-3 drafter.
Prints the number of overwritten elements, by owner. With a key directory vLLM has `BatonConnector`, as on a
data-parallel rank that shares experts; then a second line tells the same without the connector's cure.

    python -m testkit.vllm.dummy_step [KEYS]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parents[2] / "models"
EAGLE3 = {"method": "eagle3", "model": str(MODELS / "baton-demo-eagle3"), "num_speculative_tokens": 3}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for `overwritten`
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
OTHERS = 7.0  # an element of KV that another engine has sent


def overwritten(worker: Any) -> dict[str, int]:
    """Give all blocks but vLLM's null block to another request, and run the step of a rank that has none."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        layer.kv_cache.fill_(OTHERS)
    worker.execute_dummy_batch()
    found = {"target": 0, "draft": 0}
    for name, layer in layers.items():
        owner = "target" if int(name.split(".")[2]) < worker.model_config.get_total_num_hidden_layers() else "draft"
        found[owner] += int((layer.kv_cache[1:] != OTHERS).sum())
    return found


def without_cure(worker: Any) -> None:
    """The connector does not blank the drafter's slots any more."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group()._draft_slots = None  # type: ignore[attr-defined]


def main(keys: str | None = None) -> None:
    """Compute a request, then a step without one."""
    os.environ |= ENVIRONMENT
    from vllm import LLM, SamplingParams

    transfer = {
        "kv_connector": "Shared",
        "kv_connector_module_path": f"{__package__}.shared_experts",
        "kv_role": "kv_both",
        "engine_id": "ONE",
        "kv_connector_extra_config": {"keys": keys},
    }
    llm = LLM(
        str(MODELS / "baton-demo-llama"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=16 << 20,
        speculative_config=EAGLE3,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        kv_transfer_config=transfer if keys else None,
    )
    for number in range(2 if keys else 1):
        prompt = {"prompt_token_ids": [number, *range(100, 200)]}
        llm.generate(prompt, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True), use_tqdm=False)
        print(json.dumps(llm.collective_rpc(overwritten)[0]), flush=True)
        if keys:
            llm.collective_rpc(without_cure)


if __name__ == "__main__":
    main(*sys.argv[1:])
