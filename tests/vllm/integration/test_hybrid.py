"""Models with other caches than full attention: sliding windows, states (Mamba-2, gated delta nets), latents (MLA),
FP8, with drafters of another kind of cache. One uses a shared directory, the others NIXL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from testkit.vllm.checkpoints import (
    MLA,
    MTP,
    deepseek,
    gemma3,
    gpt_oss,
    mamba2,
    qwen3_5,
    qwen3_next,
    scaled,
    windowed,
)
from testkit.vllm.checks import check_all_are_handed_over
from testkit.vllm.no_images import servers_without_images
from testkit.vllm.servers import (
    EAGLE3,
    Mode,
    Pair,
    demo_prompts,
    serve_pair,
)

pytestmark = pytest.mark.timeout(1800)

DELTA_NETS = ["--dtype", "bfloat16", "--mamba-ssm-cache-dtype", "float32", "--no-enable-prefix-caching"]
Arguments = dict[str, Any]
CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path], Arguments]]] = {
    "sliding window": (gemma3, lambda folder: {"prefill": ["--max-num-batched-tokens", "256"]}),
    "sliding window with eagle3, over files": (
        windowed,
        lambda folder: {
            "spec": EAGLE3,
            "prefill": ["--max-num-batched-tokens", "256"],
            "extra": {"kv_transport": f"file://{folder}/kv"},
        },
    ),
    "gpt-oss with eagle3": (gpt_oss, lambda folder: {"spec": EAGLE3 | {"model": str(folder / "model" / "eagle3")}}),
    "mamba-2": (mamba2, lambda folder: {"both": ["--no-enable-prefix-caching"]}),
    "gated delta nets with mtp": (
        qwen3_next,
        lambda folder: {"spec": {"method": "mtp", "num_speculative_tokens": 3}, "both": DELTA_NETS},
    ),
    "qwen3.5 with mtp": (
        qwen3_5,
        lambda folder: {"spec": {"method": "mtp", "num_speculative_tokens": 3}, "both": DELTA_NETS},
    ),
    "fp8 with scales, with eagle3": (
        scaled,
        lambda folder: {"spec": EAGLE3, "both": ["--kv-cache-dtype", "fp8", "--max-num-batched-tokens", "256"]},
    ),
    "mla with mtp": (deepseek, lambda folder: {"spec": MTP, "both": ["--attention-backend", MLA]}),
}


def skip_without_fp8() -> None:
    try:
        _get_attn_isa(torch.float32, 32, kv_cache_dtype="fp8")
    except NotImplementedError as error:
        pytest.skip(f"vLLM: {error}")


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    make, arguments_in = CASES[request.param]
    if make is scaled:
        skip_without_fp8()
    if make is qwen3_5 and "amx_tile" in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM: a prompt of one token ends the engine (causal_conv1d_fwd_cpu: expect x to be transposed)")
    folder = tmp_path_factory.mktemp("hybrid")
    make(folder / "model")
    arguments = arguments_in(folder)
    images = servers_without_images(folder / "names") if make is qwen3_5 else contextlib.nullcontext()
    with images, serve_pair(folder, model=folder / "model", **arguments) as found:
        yield found


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_greedy_tokens_and_acceptance_are_those_of_one_vllm(pair: Pair, mode: Mode) -> None:
    # A prompt of 2 tokens hands over 1.
    lengths = [2, 3, *range(15, 18), 31, 32, 33, *range(62, 100, 2), 95, 97, 300, 700]
    if (multiple := pair.prefill.identity["prefill_multiple"]) > 1:
        lengths = [multiple + length for length in lengths[::2]]  # shorter ones are not handed off
    check_all_are_handed_over(pair, demo_prompts(lengths, seed=61), 24, mode)
