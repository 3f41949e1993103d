"""Which vLLM is supported, and for what (docs/vllm.md). Others are refused."""

from __future__ import annotations

from typing import Any

from baton.errors import ConfigError
from baton.vllm import compat
from baton.vllm.config import FirstStep
from baton.wire import KVStream

SUPPORTED = ((0, 30), (0, 31), (0, 32), (0, 33))
WITH_RANKS = ("0.32", "0.33")
_RANKED = " and ".join(WITH_RANKS)
BY_LAYER = ("0.32",)  # versions whose hooks are tested
FIRST_DRAFTS = ("0.32",)  # versions whose scheduler output is tested
# State dtypes to which vLLM's CPU kernel rounds after each of these chunks, wherever a prompt is cut; its GPU kernel
# rounds only at the end of a step.
ROUNDED_BY_CHUNK = ("float32", "bfloat16", "float16")
FORWARD_METHODS = ("eagle", "eagle3", "mtp", "draft_model", "dflash")
DRAFT_METHODS = (*FORWARD_METHODS, "ngram")
# GPUs store these dtypes as one contiguous row per (token, head), without separate scales.
_ROWS = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
# Computed by vLLM in PyTorch on CPUs, without its own kernel.
_ROPE_IN_TORCH = ("yarn", "deepseek_yarn")


def check_version() -> str:
    """`major.minor`. Raises `ConfigError` if unsupported."""
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
    """Raise `ConfigError` for an unsupported configuration."""
    parallel, speculative = config.parallel_config, config.speculative_config
    for kind in ("prefill_context", "decode_context"):
        name = f"{kind}_parallel_size"
        if (ranks := getattr(parallel, name)) != 1:
            raise ConfigError(name, f"must be 1: BatonConnector does not hand off such ranks, got {ranks}")
    for kind in ("tensor", "pipeline", "data"):
        name = f"{kind}_parallel_size"
        if (ranks := getattr(parallel, name)) != 1 and check_version() not in WITH_RANKS:
            raise ConfigError(name, f"BatonConnector supports several ranks with vLLM {_RANKED}, got {ranks}")
    if parallel.pipeline_parallel_size != 1 and speculative is not None:
        raise ConfigError("speculative_config", "BatonConnector does not support it with pipeline stages")
    if compat.data_parallel_rank(config) is not None and check_version() not in WITH_RANKS:
        raise ConfigError("data_parallel_size", f"BatonConnector supports data-parallel ranks with vLLM {_RANKED}")
    if config.model_config.enable_sleep_mode:
        raise ConfigError("enable_sleep_mode", "the memory that peers have opened would be another's after a sleep")
    _check_device(config)
    if speculative is not None and speculative.method not in DRAFT_METHODS:
        known = ", ".join(DRAFT_METHODS)
        raise ConfigError("speculative_config", f"BatonConnector supports {known}, got {speculative.method!r}")
    if speculative is not None and speculative.use_multi_module_mtp():
        _check_modules(config)
    if speculative is not None:
        _check_states(config)
    if config.device_config.device_type == "cpu":
        _check_rotary(config)


def _check_modules(config: Any) -> None:
    """Raise `ConfigError` if later MTP modules draft. In vLLM's V1 runner only Step-3.5's do."""
    kind = getattr(config.speculative_config.draft_model_config.hf_config, "model_type", None)
    if kind == "step3p5_mtp" or config.use_v2_model_runner:
        where = "Step-3.5's proposer" if kind == "step3p5_mtp" else "vLLM's V2 model runner"
        raise ConfigError(
            "speculative_config",
            f"{where} drafts with each MTP module in turn, and entries of later ones depend on tokens after the prompt",
        )


def _check_states(config: Any) -> None:
    field, model, drafter = "speculative_config", config.model_config, config.speculative_config.draft_model_config
    if not (model.has_inner_state or (drafter is not None and drafter.has_inner_state)):
        return
    if compat.delta_nets(config) is None or config.speculative_config.method != "mtp":
        raise ConfigError(field, "a model with state layers (Mamba) cannot be handed off with speculation")
    exact = ROUNDED_BY_CHUNK if config.device_config.device_type == "cpu" else ("float32",)
    if (dtype := config.cache_config.mamba_ssm_cache_dtype) not in exact:
        raise ConfigError(
            "mamba_ssm_cache_dtype",
            f"with speculation states must be {' or '.join(exact)}: others are rounded where they are handed off, "
            f"got {dtype!r}",
        )


def stream_of(config: Any, asked: KVStream | None) -> KVStream:
    """By default "layer" if possible, else "chunk".

    "layer" needs a vLLM whose hooks are tested, and a device for which vLLM waits: only then is a layer written when
    its hook is called. Raises `ConfigError`.
    """
    device = config.device_config.device_type
    by_layer = device == "cpu" and check_version() in BY_LAYER
    if asked == "layer" and not by_layer:
        raise ConfigError("kv_stream", f"'layer' is for CPUs and vLLM {', '.join(BY_LAYER)}: off or chunk on {device}")
    return asked or ("layer" if by_layer else "chunk")


def first_step_of(config: Any, asked: FirstStep | None) -> FirstStep:
    """By default "verify" if possible. Raises `ConfigError`."""
    why = _why_not_verified(config)
    if asked == "verify" and why is not None:
        raise ConfigError("first_step", f"'verify' {why}")
    return asked or ("verify" if why is None else "recompute")


def _why_not_verified(config: Any) -> str | None:
    """Why the first token cannot be a draft. Asynchronous workers take no drafts from the scheduler."""
    if (version := check_version()) not in FIRST_DRAFTS:
        return f"is for vLLM {', '.join(FIRST_DRAFTS)}, this is {version}"
    if config.speculative_config is None:
        return "needs speculation: without it vLLM verifies nothing"
    if config.use_v2_model_runner or config.scheduler_config.async_scheduling:
        return "is for vLLM's V1 model runner without asynchronous scheduling"
    if config.model_config.has_inner_state:
        return "is for models without states, which decode servers compute from before the prompt's end"
    return None


def may_skip_drafts(config: Any) -> bool:
    """Whether a step may propose no drafts, as in vLLM's dynamic speculation: the drafter only computes its KV."""
    drafter = config.speculative_config
    if drafter is None or drafter.method not in FORWARD_METHODS or check_version() not in FIRST_DRAFTS:
        return False
    return compat.steps_alone(config) and not (config.use_v2_model_runner or config.scheduler_config.async_scheduling)


def sleeps_when_idle(config: Any) -> bool:
    """Whether the engine core sleeps after a step of no tokens, and reads this after `update_connector_output`."""
    if check_version() not in FIRST_DRAFTS or not compat.steps_alone(config) or compat.num_stages(config) != 1:
        return False
    return not (config.use_v2_model_runner or config.scheduler_config.async_scheduling)


def steps_in_turn(config: Any) -> bool:
    """Whether one worker's step begins after vLLM has handled the last one's results."""
    return sleeps_when_idle(config) and int(config.parallel_config.world_size) == 1


def _check_rotary(config: Any) -> None:
    """Raise `ConfigError` if vLLM would compute RoPE wrongly (docs/reference/vllm-design.md, "Geometry on CPU")."""
    model, rotary = config.model_config, "rotary_embedding"
    if not model.use_mla or not config.compilation_config.is_custom_op_enabled(rotary):
        return
    kind = (getattr(model.hf_text_config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _ROPE_IN_TORCH:
        raise ConfigError(
            "compilation_config",
            f"vLLM's CPU kernel for RoPE {kind!r} is wrong for MLA models: "
            'start with --compilation-config \'{"custom_ops": ["all", "-rotary_embedding"]}\'',
        )


def _check_device(config: Any) -> None:
    from vllm.platforms import current_platform

    device, dtype = config.device_config.device_type, config.cache_config.cache_dtype
    device = "rocm" if current_platform.is_rocm() else device
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise ConfigError("calculate_kv_scales", "engines that compute the scales of their FP8 KV have other scales")
    if device not in ("cpu", "cuda"):
        raise ConfigError("device", f"BatonConnector supports CPUs and CUDA devices, got {device}")
    if device == "cuda" and dtype not in _ROWS:
        raise ConfigError("kv_cache_dtype", f"BatonConnector supports {', '.join(_ROWS)} on GPUs, got {dtype!r}")
