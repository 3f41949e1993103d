"""Models with several kinds of layers: sliding windows beside full attention, Mamba-2 states beside it."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import torch
from servers import MODEL, TOKENIZER, Mode, Pair, handoff, reference, same, serve_pair, wait_idle

pytestmark = pytest.mark.timeout(900)

COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def gemma3() -> Any:
    """Windows of 64 tokens, every third layer without."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **COMMON, num_hidden_layers=6, head_dim=32, sliding_window=64, layer_types=layers, query_pre_attn_scalar=32
    )
    return Gemma3ForCausalLM(config)


def mamba2() -> Any:
    """Mamba-2 and attention in turns."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    sizes = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32, "mamba_chunk_size": 64}
    config = GraniteMoeHybridConfig(
        **COMMON,
        **sizes,
        num_hidden_layers=4,
        layer_types=["mamba", "attention"] * 2,
        shared_intermediate_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_d_conv=4,
        mamba_expand=2,
        position_embedding_type="rope",
        attention_multiplier=0.18,
    )
    return GraniteMoeHybridForCausalLM(config)


CASES = {
    "sliding window": (gemma3, ["--max-num-batched-tokens", "256"]),
    "mamba-2": (mamba2, ["--no-enable-prefix-caching"]),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    make, arguments = CASES[request.param]
    folder = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.08)
    model.save_pretrained(folder / "model")
    for name in TOKENIZER:
        shutil.copy(MODEL / name, folder / "model")
    with serve_pair(folder, prefill=arguments, decode=arguments, model=folder / "model") as found:
        yield found


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_greedy_tokens_are_those_of_one_vllm(pair: Pair, mode: Mode) -> None:
    async def run() -> None:
        rng = random.Random(mode)
        async with aiohttp.ClientSession() as session:
            for length in [2, 3, 31, 32, 33, *range(62, 100, 2), 95, 97, 300, 700]:
                prompt = [rng.randrange(3, 2000) for _ in range(length)]
                want, margins = await reference(session, pair.prefill, prompt, 16)
                _, tokens = await handoff(session, pair, prompt, 16, mode)
                assert same(tokens, want, margins) is not False, f"{length} tokens: {tokens} instead of {want}"

    asyncio.run(run())
    wait_idle(pair)
