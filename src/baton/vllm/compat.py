"""Reads vLLM's configuration."""

from __future__ import annotations

import inspect
import queue
from typing import Any

import msgspec

from baton.errors import ConfigError
from baton.kv.spec import Owner
from baton.plugin_base.model_facts import override_facts, tokenizer_fact, weights_fact
from baton.plugin_base.ranks import gather_bytes
from baton.sampling_params import SamplingDefaults
from baton.vllm.memory.geometry import WorkerHeads

# Models of gated delta nets, and the chunk size of their kernel: only a prompt split at a multiple has the bits of a
# whole one.
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
DELTA_CHUNK = 64


def delta_nets(config: Any) -> str | None:
    kind = getattr(getattr(config.model_config, "hf_text_config", None), "model_type", None)
    return kind if kind in DELTA_NETS else None


def request_queue() -> queue.Queue[Any] | None:
    """The request queue of the engine core that is being made; None if there is none."""
    from vllm.v1.engine.core import EngineCoreProc

    frame = inspect.currentframe()
    while frame is not None:
        core = frame.f_locals.get("self")
        if isinstance(core, EngineCoreProc):
            found = vars(core).get("input_queue")
            return found if isinstance(found, queue.Queue) else None
        frame = frame.f_back
    return None


def num_target_layers(config: Any) -> int:
    """The index of the drafter's first layer."""
    return int(config.model_config.get_total_num_hidden_layers())


def draft_module(config: Any) -> int | None:
    """The drafter's `Rules.module`. DFlash's entries are projections of the target's hidden states."""
    speculative = config.speculative_config
    return None if speculative is not None and speculative.method in ("draft_model", "dflash") else 1


def num_stages(config: Any) -> int:
    return int(config.parallel_config.pipeline_parallel_size)


def worker_number(config: Any) -> int:
    """This worker's rank in its engine: by pipeline stage, then by tensor rank."""
    return int(config.parallel_config.rank % config.parallel_config.world_size)


def steps_alone(config: Any) -> bool:
    """Whether no other engine waits for this one's steps. Data-parallel ranks of a model with experts wait; without
    experts vLLM resets their number to 1."""
    return int(config.parallel_config.data_parallel_size) == 1


def data_parallel_rank(config: Any) -> int | None:
    """This engine's rank, if several share one address; None if it has its own."""
    parallel = config.parallel_config
    # Without experts vLLM resets the sizes to 1, and only the engine id contains the rank.
    rank = int(getattr(parallel, "data_parallel_index", 0))
    several = str(config.kv_transfer_config.engine_id).endswith(f"_dp{rank}")
    return rank if several and not getattr(parallel, "data_parallel_external_lb", False) else None


def gather_workers(config: Any, own: bytes) -> list[bytes]:
    """`own` of every worker of this engine, by `worker_number`. Collective."""
    if config.parallel_config.world_size == 1:
        return [own]
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    stage = msgspec.msgpack.encode(gather_bytes(own, get_tp_group().cpu_group))
    stages = gather_bytes(stage, get_pp_group().cpu_group)
    return [each for found in stages for each in msgspec.msgpack.decode(found, type=list[bytes])]


def worker_heads(config: Any) -> WorkerHeads:
    parallel, speculative = config.parallel_config, config.speculative_config
    heads: dict[Owner, int] = dict.fromkeys(("target", "draft"), config.model_config.get_total_num_kv_heads())
    if speculative is not None and speculative.draft_model_config is not None:
        heads["draft"] = speculative.draft_model_config.get_total_num_kv_heads()
    return WorkerHeads(parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size, heads)


def eos_token_ids(config: Any) -> list[int]:
    """The ids of the generation config, else of the model's."""
    ids = config.model_config.try_get_generation_config().get("eos_token_id")
    if ids is None:
        ids = getattr(config.model_config.hf_text_config, "eos_token_id", None)
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def num_speculative_tokens(config: Any) -> int:
    return 0 if config.speculative_config is None else int(config.speculative_config.num_speculative_tokens)


def sampling_defaults(config: Any) -> SamplingDefaults:
    """The defaults of vLLM's API.

    Raises `ConfigError`.
    """
    model = config.model_config
    defaults = model.get_diff_sampling_param()
    # As in vLLM's `get_max_tokens`: an operator's `max_tokens` limits every request.
    own = model.generation_config not in ("auto", "vllm")
    limit = defaults.get("max_tokens") if own else model.override_generation_config.get("max_new_tokens")
    try:
        return msgspec.convert({**defaults, "limit": limit}, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError("generation_config", str(error)) from None


def facts(config: Any, version: str) -> dict[str, str]:
    """What must be equal on P and D, besides geometries."""
    model, speculative = config.model_config, config.speculative_config
    known = {
        "engine": f"vllm {version}",
        "model.weights": weights_fact(model.model, model.hf_config, model.revision),
        "model.dtype": str(model.dtype).removeprefix("torch."),
        "model.rope": repr(getattr(model.hf_text_config, "rope_parameters", None)),
        "model.quantization": str(model.quantization),
        "cache.dtype": str(config.cache_config.cache_dtype),
        "model.tokenizer": tokenizer_fact(model.tokenizer, model.tokenizer_revision or model.revision),
        "output.eos_token_ids": repr(sorted(set(eos_token_ids(config)))),
        "output.grammars": str(config.structured_outputs_config.backend),
        "output.sampling_defaults": sampling_defaults(config).describe(),
        "drafter.method": "none" if speculative is None else speculative.method,
        **override_facts(model.hf_overrides, model.hf_config_path),
    }
    if speculative is not None and (draft := speculative.draft_model_config) is not None:
        known["drafter.weights"] = weights_fact(draft.model, draft.hf_config, draft.revision)
    return known


def zeroes_before_preemptions(config: Any) -> bool:
    """Whether the model runner zeroes and copies blocks before it reports preemptions to the connector, as vLLM's V2
    runner does."""
    return bool(config.use_v2_model_runner)


def has_prefix_cache(config: Any) -> bool:
    return bool(config.cache_config.enable_prefix_caching)


def drops_last_block(config: Any) -> bool:
    """Whether vLLM computes a prefix hit's last block again."""
    speculative = config.speculative_config
    return speculative is not None and bool(getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)())


def prefill_multiple(config: Any) -> int:
    return 1 if delta_nets(config) is None else DELTA_CHUNK


def slot_mappings() -> Any:
    """Slot mappings of the running forward pass, by layer."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().slot_mapping


def wait_for_device(config: Any) -> None:
    """On a CPU, queued work is finished already."""
    if config.device_config.device_type == "cuda":
        import torch

        torch.cuda.current_stream().synchronize()
