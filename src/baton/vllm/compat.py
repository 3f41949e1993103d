"""Everything that depends on vLLM's version, and every question to its configuration: one file to read for a new one.

0.32 is tested in full, 0.30 and 0.31 as smoke tests; others are refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.models.loader import fingerprint
from baton.vllm.geometry import KernelLayout
from baton.vllm.groups import CacheTable

SUPPORTED = ((0, 30), (0, 31), (0, 32))
DRAFT_METHODS = ("eagle", "eagle3", "mtp", "draft_model", "ngram")
# Kernels whose pages are known in full.
_K_BY_DIMENSION = ("vec", "vec16")


def check_version() -> str:
    """`major.minor` of the vLLM that is installed. Raises `ConfigError` for one that is not supported."""
    import vllm

    version = vllm.__version__
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        major = minor = -1
    if (major, minor) not in SUPPORTED:
        known = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise ConfigError("vllm", f"BatonConnector supports vLLM {known}, this is {version}")
    return f"{major}.{minor}"


def check_config(config: Any) -> None:
    """Raise `ConfigError` for what the connector cannot hand off, by name."""
    parallel, speculative = config.parallel_config, config.speculative_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ConfigError(name, f"BatonConnector hands off between single ranks, got {getattr(parallel, name)}")
    if getattr(parallel, "decode_context_parallel_size", 1) != 1:
        raise ConfigError("decode_context_parallel_size", "BatonConnector does not share a context among ranks")
    if config.device_config.device_type != "cpu":
        raise ConfigError("device", f"BatonConnector moves host memory, got {config.device_config.device_type}")
    if speculative is not None and speculative.method not in DRAFT_METHODS:
        known = ", ".join(DRAFT_METHODS)
        raise ConfigError("speculative_config", f"BatonConnector knows {known}, got {speculative.method!r}")


def num_target_layers(config: Any) -> int:
    """Layers of the target model; a drafter's are numbered from there."""
    return int(config.model_config.get_num_layers(config.parallel_config))


def cache_tables(kv_cache_config: Any) -> list[CacheTable]:
    """vLLM's cache groups. Raises `ConfigError` for a kind of cache that is not known."""
    from vllm.v1 import kv_cache_interface as kv

    tables = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, kv.UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        layers = tuple(group.layer_names)
        if isinstance(spec, kv.MambaSpec):
            if spec.mamba_cache_mode != "none":
                raise ConfigError("mamba_cache_mode", f"BatonConnector knows 'none', got {spec.mamba_cache_mode!r}")
            tables.append(CacheTable("state", None, 1, layers))
        elif type(spec) is kv.SlidingWindowSpec:
            tables.append(CacheTable("sliding_window", spec.sliding_window, spec.block_size, layers))
        elif type(spec) is kv.MLAAttentionSpec:
            tables.append(CacheTable("mla", None, spec.block_size, layers))
        elif type(spec) is kv.FullAttentionSpec:
            # A window here is one that vLLM computes with but does not free by.
            tables.append(CacheTable("full", None, spec.block_size, layers))
        else:
            raise ConfigError("model", f"BatonConnector does not know a cache of {type(spec).__name__}")
    return tables


def kernel_layout(config: Any, layer: str) -> KernelLayout:
    """How a layer's attention kernel stores its pages. Kernels that say nothing of it store token after token."""
    isa = getattr(config.compilation_config.static_forward_context[layer], "isa", None)
    return "tokens" if isa is None else "k_by_dimension" if isa in _K_BY_DIMENSION else "unknown"


def layout_name(config: Any, layer: str) -> str:
    """What stores a layer's cache; equal on two engines whose pages mean the same."""
    module = config.compilation_config.static_forward_context[layer]
    return f"{type(module).__name__}/{getattr(module, 'isa', 'plain')}"


def eos_token_ids(config: Any) -> list[int]:
    """The tokens that end a request by themselves, as the checkpoint's configuration says."""
    found = config.model_config.try_get_generation_config().get("eos_token_id")
    if found is None:
        found = getattr(config.model_config.hf_text_config, "eos_token_id", None)
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def num_speculative_tokens(config: Any) -> int:
    """Drafts per step; 0 without speculation."""
    return 0 if config.speculative_config is None else int(config.speculative_config.num_speculative_tokens)


def facts(config: Any, version: str) -> dict[str, str]:
    """What must be equal on two engines, by name; geometry is added by the agent."""
    model, speculative = config.model_config, config.speculative_config
    known = {
        "engine": f"vllm {version}",
        "model.weights": _weights(model.model, model.revision),
        "model.dtype": str(model.dtype).removeprefix("torch."),
        "model.rope": repr(getattr(model.hf_text_config, "rope_parameters", None)),
        "model.quantization": str(model.quantization),
        "cache.dtype": str(config.cache_config.cache_dtype),
        "drafter.method": "none" if speculative is None else speculative.method,
    }
    if speculative is not None and speculative.draft_model_config is not None:
        draft = speculative.draft_model_config
        known["drafter.weights"] = _weights(draft.model, draft.revision)
    return known


def _weights(model: str, revision: str | None) -> str:
    return fingerprint(Path(model)) if os.path.isdir(model) else f"{model}@{revision}"
