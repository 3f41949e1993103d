"""The facts of an engine that must be equal on P and D, by name, as HELLO and routers compare them.

They cover every setting that may change a token or the end of an output. Page sizes do not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import binding  # type: ignore[import-untyped]
from numba.core import config as untyped_config

from baton.comparison import PROCESSOR
from baton.drafters.base import Drafter
from baton.engine.attention.base import AttentionBackend
from baton.engine.config import EngineConfig
from baton.engine.memory.group_memory import GroupMemory
from baton.engine.runner import ModelRunner
from baton.engine.sampling.noise import gumbel
from baton.engine.step_plans import one_request
from baton.kv.spec import GroupSpec
from baton.models.base import CausalLM
from baton.models.loading.checkpoint_digests import fingerprint, tokenizer_hash
from baton.structured import LIBRARY

# Raise this when a request may get other tokens than before.
SAMPLER_VERSION = "2"
_config: Any = untyped_config
# A hypervisor may hide them.
_BF16_PRODUCTS = ("avx512bf16", "amx-bf16", "bf16")
# Limits on the instructions of oneDNN's and MKL's kernels.
_KERNEL_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
# More than one tile of keys, and not a whole number of pages.
PROBE_TOKENS = 75
# Logarithms may differ at few values.
_PROBE_NOISE = 1 << 17


def engine_facts(
    config: EngineConfig,
    hf_config: dict[str, object],
    whole: Sequence[GroupSpec],
    groups: Sequence[GroupSpec],
    model: CausalLM,
    drafter: Drafter | None,
    backend: AttentionBackend,
    eos_token_ids: Sequence[int],
) -> dict[str, str]:
    """`whole`: the groups over all ranks; `groups`: this rank's.

    All ranks compute `numerics.probe` together.
    """
    spec = config.speculative_config
    facts = {
        "model.type": str(hf_config.get("model_type")),
        "model.dtype": str(model.build.dtype).removeprefix("torch."),
        "model.quantization": config.quantization or "none",
        "model.weights": fingerprint(config.model),
        "model.rope": repr(
            (hf_config.get("rope_theta"), hf_config.get("rope_scaling"), hf_config.get("rope_parameters"))
        ),
        "model.tokenizer": tokenizer_hash(Path(config.model)),
        "output.eos_token_ids": repr(sorted(set(eos_token_ids))),
        "output.sampling_defaults": config.sampling_defaults().describe(),
        "output.grammars": "none" if config.skip_tokenizer_init else LIBRARY,
        "sampler.version": SAMPLER_VERSION,
        "sampler.batch_invariant": str(config.batch_invariant),
        "drafter.method": spec.method if spec else "none",
    }
    for group in whole:
        planes = [(plane.name, plane.dtype, plane.num_heads, plane.head_dim) for plane in group.planes]
        facts[f"group.{group.name}"] = repr((group.kind, planes, group.window, group.rate, group.layer_ids))
    if spec is not None and drafter is not None:
        facts["drafter.num_speculative_tokens"] = str(spec.num_speculative_tokens)
        facts["drafter.kv"] = spec.draft_kv
        facts["drafter.verifier"] = spec.verifier
        facts["drafter.weights"] = "none" if spec.model is None else fingerprint(spec.model)
        facts["drafter.options"] = repr(sorted(spec.options.items()))
        facts["drafter.aux_layers"] = repr(tuple(drafter.aux_layers))
    if config.batch_invariant:
        facts["numerics.probe"] = numeric_probe(model, groups, backend, model.build.device)
    else:
        facts[PROCESSOR] = processor(model.build.device)
    return facts


def processor(device: torch.device) -> str:
    """What kernels are chosen by."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = _config.CPU_NAME or binding.get_host_cpu_name()
    return cpu_fact(name, torch.backends.cpu.get_cpu_capability(), binding.get_host_cpu_features(), os.environ)


def cpu_fact(name: str, capability: str, features: Mapping[str, bool], environment: Mapping[str, str]) -> str:
    products = (feature for feature in _BF16_PRODUCTS if features.get(feature))
    limits = (f"{limit}={environment[limit].upper()}" for limit in _KERNEL_LIMITS if environment.get(limit))
    return " ".join([name, capability, *products, *limits])


@torch.inference_mode()
def numeric_probe(model: CausalLM, groups: Sequence[GroupSpec], backend: AttentionBackend, device: torch.device) -> str:
    """16 hex digits over the bits of a fixed prompt's logits and of sampling noise (docs/lifecycle.md, "Equality")."""
    targets = [group for group in groups if group.owner == "target"]
    kv = {}
    pages = {}
    ids = [(7 * i + 1) % model.vocab_size for i in range(min(PROBE_TOKENS, model.max_position))]
    for group in targets:
        num_pages = 1 + group.rules.num_pages(len(ids), group.page_size)
        kv[group.name] = GroupMemory.zeros(group, num_pages, device)
        pages[group.name] = range(1, num_pages)
    runner = ModelRunner(model, None, targets, kv, backend, device)
    output = runner.forward(one_request(ids, pages, runner.spec.state_groups))
    if model.build.ranks.stage.index > 0:
        return ""  # stage 0 has the logits
    logits = runner.logits(output, np.array([0, len(ids) // 2, len(ids) - 1])).float().cpu().numpy()
    noise = gumbel(1, 0, len(ids), _PROBE_NOISE)
    digest = hashlib.blake2b(digest_size=8)
    for numbers in (logits, noise, np.exp(noise)):
        digest.update(np.ascontiguousarray(numbers).tobytes())
    return digest.hexdigest()
