"""The rows of `testkit.vllm.matrix`: models with drafters, and the ranks of the servers that hand over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from testkit.vllm.checkpoints import MLA, deepseek_experts, glm4_moe, qwen3_next, windowed
from testkit.vllm.drafters import DRAFTER
from testkit.vllm.drafters.heads import DFLASH, gemma4, qwen3_moe_with_dflash
from testkit.vllm.drafters.reshaped import demo, with_larger_draft_model, with_smaller_draft_model

# Requests grow concurrently in small pools, and are admitted regardless of their later demand.
TIGHT = ["--max-model-len", "1024", "--no-scheduler-reserve-full-isl"]
IN_CHUNKS = ["--long-prefill-token-threshold", "64"]
TENSOR = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
DATA = ["--data-parallel-size", "2", "--enable-expert-parallel"]
# vLLM's own message.
MLA_ON_CPUS = "MLA is enabled on a non-GPU platform; forcing chunked prefill and prefix caching to be disabled."
DELTA_NETS = ["--dtype", "bfloat16", "--no-enable-prefix-caching", "--num-gpu-blocks-override", "20"]


def mtp(num: int, **more: Any) -> dict[str, Any]:
    """vLLM's speculative configuration."""
    return {"method": "mtp", "num_speculative_tokens": num, **more}


def own(method: str, num: int = 3) -> dict[str, Any]:
    """vLLM's speculative configuration with the drafter in the model's folder."""
    return {"method": method, "num_speculative_tokens": num, "model": DRAFTER}


@dataclass(frozen=True, slots=True)
class Model:
    """`residues`: prompt lengths with every remainder of a block, or of what a handoff moves at once. `chunks`: lengths
    that are computed in several steps. `crowd`: lengths that together need more blocks than there are. `no_hits`,
    `no_chunks`: why there are none. `experts`: else data-parallel ranks share nothing. `primed`:
    the decode server answers a prompt of hits first. With a drafter of hidden states vLLM finds a window that was
    handed off only after an answer of a block.
    """

    make: Callable[[Path], None]
    spec: dict[str, Any]
    flags: Sequence[str]
    residues: Sequence[int]
    chunks: Sequence[int] = ()
    crowd: Sequence[int] = tuple(range(190, 610, 42))
    no_hits: str = ""
    no_chunks: str = ""
    experts: bool = True
    primed: bool = False

    def spec_in(self, folder: Path) -> dict[str, Any]:
        """The drafter's own checkpoint is named relative to the model's."""
        drafter = self.spec.get("model")
        return self.spec if drafter is None else self.spec | {"model": str(folder / drafter)}


HEADS = {
    "flags": [*TIGHT, *IN_CHUNKS, "--block-size", "32", "--num-gpu-blocks-override", "48"],
    "residues": [2, 3, *range(33, 65), 96, 97],
    "chunks": [127, 128, 129, 130, 191, 300, 511, 700],
}


def in_windows(num_blocks: int) -> dict[str, Any]:
    """Each request has several block tables. Windows stay in the prefix cache at each block's end."""
    flags = [*HEADS["flags"][:-1], str(num_blocks), "--prefix-cache-retention-interval", "64"]
    return HEADS | {"flags": flags}


def delta_nets(states: str) -> Model:
    """Gated delta nets, experts, one MTP module; `states`: the type in which states are kept."""
    return Model(
        partial(qwen3_next, experts_per_token=1),
        mtp(3),
        [*TIGHT, *DELTA_NETS, "--mamba-ssm-cache-dtype", states, "--long-prefill-token-threshold", "128"],
        [*range(66, 129), 193],
        # vLLM ends if the last chunk is one token.
        [200, 256, 258, 300, 448, 700],
        [*range(262, 286), *range(560, 590, 6)],
        no_hits="the connector refuses prefix caching of states",
    )


MODELS: dict[str, Model] = {
    "MoE + MTP": Model(glm4_moe, mtp(3), **HEADS),
    "several MTP modules": Model(partial(glm4_moe, num_modules=2), mtp(4), **HEADS),
    "MLA + MoE + MTP": Model(
        deepseek_experts,
        mtp(3, attention_backend=MLA),
        [*TIGHT, "--attention-backend", MLA, "--num-gpu-blocks-override", "72"],
        [2, 3, *range(17, 33), 48, 49, 300, 700],
        no_hits=MLA_ON_CPUS,
        no_chunks=MLA_ON_CPUS,
    ),
    "GDN + MTP": delta_nets("float32"),
    "GDN + MTP, states in bfloat16": delta_nets("bfloat16"),
    "DFlash": Model(demo, DFLASH, **HEADS, experts=False),
    "DFlash, target with windows": Model(windowed, DFLASH, **in_windows(112), experts=False, primed=True),
    "MoE + DFlash": Model(qwen3_moe_with_dflash, own("dflash"), **HEADS),
    "Gemma 4 + assistant": Model(gemma4, own("mtp"), **in_windows(72), experts=False),
    "larger draft model": Model(with_larger_draft_model, own("draft_model"), **HEADS, experts=False),
    "smaller draft model": Model(with_smaller_draft_model, own("draft_model"), **HEADS, experts=False),
}
# What vLLM itself cannot do, on any number of ranks: a case of `testkit.vllm.limits`.
LIMITS = {"Mamba-2 + draft model": "Mamba-2 with a draft model"}
RANKS: dict[str, tuple[str, str]] = {
    "one rank": ("ONE", "OTHER"),
    "TP 1 -> 2": ("ONE", "TWO"),
    "TP 2 -> 1": ("TWO", "ONE"),
    "DP 2 EP": ("ZERO", "FIRST"),
}
