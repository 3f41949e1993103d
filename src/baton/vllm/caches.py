"""How vLLM stores a model's layers: its cache groups, and the layouts of attention kernels and states. Depends on
vLLM's version, as `compat` does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.errors import ConfigError
from baton.kv.interval import Kind
from baton.vllm.compat import worker_heads
from baton.vllm.memory.geometry import KernelLayout
from baton.vllm.memory.groups import CacheTable
from baton.vllm.memory.states import DeltaState, Mamba2State, StatePart

# ISAs whose pages hold K by dimension, then V by token.
_K_BY_DIMENSION = ("vec", "vec16")
_DELTA_NET = "QwenGatedDeltaNetAttention"  # by name, since vLLM moved its module


def split_cache_groups(kv_cache_config: Any) -> list[CacheTable]:
    """vLLM's cache groups, split by kind, window and block size. Raises `ConfigError`."""
    from vllm.v1 import kv_cache_interface as kv

    tables = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            raise ConfigError(
                "model", f"cache group {index} (HiSparse) has blocks of another pool, or is rebuilt from one"
            )
        spec = group.kv_cache_spec
        by_layer = spec.kv_cache_specs if isinstance(spec, kv.UniformTypeKVCacheSpecs) else {}
        layers: dict[tuple[Kind, int | None, int], list[str]] = {}
        for layer in group.layer_names:
            layers.setdefault(_kind(by_layer.get(layer, spec)), []).append(layer)
        for (kind, window, block_size), names in layers.items():
            tables.append(CacheTable(index, kind, window, block_size, tuple(names)))
    return tables


def most_blocks(config: Any, kv_cache_config: Any) -> list[int]:
    """Of the longest request, by cache group."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [-(-int(spec.max_memory_usage_bytes(config)) // int(spec.page_size_bytes)) for spec in specs]


def _kind(spec: Any) -> tuple[Kind, int | None, int]:
    """Kind, window and block size. Exact types only: a subclass's blocks may hold other tokens."""
    from vllm.v1 import kv_cache_interface as kv

    if isinstance(spec, kv.MambaSpec):
        if spec.mamba_cache_mode != "none":
            raise ConfigError("mamba_cache_mode", f"BatonConnector supports 'none', got {spec.mamba_cache_mode!r}")
        return "state", None, 1
    version = getattr(spec, "model_version", None)
    kinds: dict[type, Kind] = {
        kv.SlidingWindowSpec: "sliding_window",
        kv.MLAAttentionSpec: "mla",
        # Even for a windowed layer here, vLLM keeps all blocks.
        kv.FullAttentionSpec: "full",
    }
    if type(spec) not in kinds or version:
        name = f"{version} {type(spec).__name__}" if version else type(spec).__name__
        raise ConfigError("model", f"BatonConnector does not support a cache of {name}")
    if (tokens := getattr(spec, "tokens_per_state", 1)) != 1:
        raise ConfigError("model", f"BatonConnector supports caches of one entry a token, got one for {tokens} tokens")
    kind = kinds[type(spec)]
    return kind, spec.sliding_window if kind == "sliding_window" else None, spec.block_size


def kernel_layout(config: Any, layer: str) -> KernelLayout:
    """How a kernel stores pages: by token, unless the layer has an `isa`."""
    isa = getattr(config.compilation_config.static_forward_context[layer], "isa", None)
    return "tokens" if isa is None else "k_by_dimension" if isa in _K_BY_DIMENSION else "unknown"


def state_parts(config: Any, layers: Iterable[str]) -> dict[str, tuple[StatePart, ...]]:
    """The layout of a slot, for each of `layers` that is one of Qwen's delta nets, or Mamba-2 with only states."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    rank, layouts = worker_heads(config).rank, {}
    for layer in layers:
        module = config.compilation_config.static_forward_context[layer]
        if isinstance(module, MambaMixer2) and not module.use_replayssm:
            layouts[layer] = Mamba2State(
                rank=rank,
                shapes=module.get_state_shape(),
                dtypes=module.get_state_dtype(),
                # `module.n_groups` counts a replicated group once per rank.
                num_groups=module.norm.n_groups,
                groups_here=module.n_groups // module.tp_size,
                state_size=module.ssm_state_size,
                channels_first=is_conv_state_dim_first(),
            ).parts()
        elif type(module).__name__ == _DELTA_NET:
            layouts[layer] = DeltaState(
                rank=rank,
                shapes=module.get_state_shape(),
                dtypes=module.get_state_dtype(),
                key_channels=module.key_dim // module.tp_size,
                channels_first=is_conv_state_dim_first(),
            ).parts()
    return layouts


def layout_name(config: Any, layer: str) -> str:
    """Names the code that stores a layer's cache. Equal names mean the same layout of pages."""
    module = config.compilation_config.static_forward_context[layer]
    if hasattr(module, "get_state_shape"):
        from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

        return f"{type(module).__name__}/{get_conv_state_layout()}"
    if config.device_config.device_type == "cpu" and config.model_config.use_mla:
        # CPUs with AMX use another kernel for MLA.
        return f"{type(module).__name__}/{module.attn_backend.get_name()}"
    return f"{type(module).__name__}/{getattr(module, 'isa', 'plain')}"
