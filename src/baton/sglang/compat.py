"""All code that depends on SGLang's version or reads its objects, besides `hooks`, `conn` and `pools`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from baton.errors import ConfigError
from baton.kv.spec import Owner
from baton.plugin_base.model_facts import override_facts, tokenizer_fact, weights_fact
from baton.plugin_base.regions import cuda_region, host_region
from baton.sglang.geometry import RequestPages
from baton.sglang.pools import RankPools
from baton.sglang.seeds import MetadataRows
from baton.transports.base import Region

SUPPORTED = ("0.5.23",)
# As SGLang resolves them: NEXTN (MTP) is EAGLE.
DRAFT_METHODS = ("EAGLE", "EAGLE3")


def check_version() -> str:
    """Raises `ConfigError` for an unsupported version."""
    from sglang.version import __version__ as version

    if version not in SUPPORTED:
        raise ConfigError("sglang", f"the plug-in supports SGLang {', '.join(SUPPORTED)}, this is {version}")
    return str(version)


def resolved(server_args: Any) -> Any:
    """The arguments as SGLang resolved them: the record keeps the given ones, such as no device."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def check_server(server: Any, parallel: Any) -> None:
    """`server`: resolved. Raise `ConfigError` for unsupported settings."""
    # `dp_size` counts copies of the whole server, and `attn_dp_size` data-parallel ranks of attention.
    for name in ("pp_size", "attn_cp_size", "attn_dcp_size", "dp_size"):
        if (size := int(getattr(parallel, name, 1) or 1)) != 1:
            raise ConfigError(name, f"the plug-in hands off between servers without ranks of this kind, got {size}")
    if server.device not in ("cpu", "cuda"):
        raise ConfigError("device", f"the plug-in supports CPUs and CUDA devices, got {server.device}")
    if (method := server.speculative_algorithm) not in (None, *DRAFT_METHODS):
        raise ConfigError("speculative_algorithm", f"the plug-in supports {', '.join(DRAFT_METHODS)}, got {method}")
    if server.enable_multi_layer_eagle:
        raise ConfigError("enable_multi_layer_eagle", "the plug-in supports drafters of one module")
    if server.enable_pd_role_switch:
        raise ConfigError("enable_pd_role_switch", "a ticket names the role in which a server was registered")
    if server.disaggregation_decode_allocation_policy != "early":
        raise ConfigError("disaggregation_decode_allocation_policy", "the plug-in decides when D allocates: use early")
    if (device := server.disaggregation_ib_device) is not None:
        instead = "nixl:// has UCX_NET_DEVICES, and mooncake:// its device"
        raise ConfigError("disaggregation_ib_device", f"the plug-in would ignore it: {instead}, got {device!r}")


def pools_of(queue: Any) -> RankPools:
    scheduler, draft = queue.scheduler, queue.draft_token_to_kv_pool
    heads: dict[Owner, int] = {"target": int(scheduler.model_config.get_total_num_kv_heads())}
    if draft is not None:
        heads["draft"] = int(_draft_config(scheduler.server_args).get_total_num_kv_heads())
    return RankPools(queue.token_to_kv_pool, draft, *tensor_rank(), heads, scheduler.sliding_window_size)


def _draft_config(server_args: Any) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    server = resolved(server_args)
    path, revision = server.speculative_draft_model_path, server.speculative_draft_model_revision
    return ModelConfig.from_server_args(server_args, model_path=path, model_revision=revision, is_draft_model=True)


def tensor_rank() -> tuple[int, int]:
    """This process's attention tensor rank, and their number."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.attn_tp_rank), int(parallel.attn_tp_size)


def data_rank() -> int | None:
    """This process's data-parallel rank of attention, each an engine of its own. None for a single rank."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.attn_dp_rank) if int(parallel.attn_dp_size) > 1 else None


def all_reduce_min(values: list[int], group: Any) -> list[int]:
    """Collective over `group`."""
    import torch
    import torch.distributed as dist

    reduced = torch.tensor(values, dtype=torch.uint8)
    dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=group)
    return [int(value) for value in reduced.tolist()]


def gather_ranks(queue: Any, own: bytes) -> list[bytes]:
    """Each rank's bytes, by attention tensor rank. Collective."""
    if tensor_rank()[1] == 1:
        return [own]
    from baton.plugin_base.ranks import gather_bytes

    return gather_bytes(own, queue.scheduler.attn_tp_cpu_group)


def region_maker(server: Any, args: Any) -> Callable[[int, int], Region]:
    if server.device == "cpu":
        return host_region
    return lambda address, nbytes: cuda_region(address, nbytes, int(args.gpu_id))


def request_pages(args: Any, pages: Any, states: Any) -> RequestPages:
    """A request's pages by SGLang's numbers. `states`: per entry of `KVArgs.state_types`, or None."""
    window: list[int] = []
    slots: list[int] = []
    for kind, found in zip(args.state_types, states or (), strict=bool(states)):
        if kind.value in ("swa", "mamba"):
            own = window if kind.value == "swa" else slots
            own.extend(int(page) for page in found)
    return RequestPages([int(page) for page in pages], window, slots)


def metadata_rows(args: Any) -> MetadataRows:
    return MetadataRows(tuple(args.aux_data_ptrs), tuple(args.aux_item_lens), tuple(args.aux_data_lens))


def synchronizer(server: Any) -> Callable[[], None]:
    """Waits until the device has finished its queued work."""
    if server.device == "cpu":
        return lambda: None

    def synchronize() -> None:
        import torch

        torch.cuda.synchronize()

    return synchronize


def facts(scheduler: Any, args: Any, version: str) -> dict[str, str]:
    server, model = resolved(scheduler.server_args), scheduler.model_config
    known = {
        "engine": f"sglang {version}",
        "model.weights": weights_fact(server.model_path, model.hf_config, server.revision),
        "model.dtype": str(model.dtype).removeprefix("torch."),
        "model.rope": repr(getattr(model.hf_text_config, "rope_parameters", None)),
        "model.quantization": str(server.quantization),
        "model.tokenizer": tokenizer_fact(server.tokenizer_path or server.model_path, server.revision),
        "cache.dtype": str(args.kv_cache_dtype_str),
        "cache.metadata": repr(list(args.aux_item_lens)),
        "output.eos_token_ids": repr(eos_token_ids(model)),
        "drafter.method": "none" if server.speculative_algorithm is None else str(server.speculative_algorithm),
        **override_facts(json.loads(server.json_model_override_args)),
    }
    if (path := server.speculative_draft_model_path) not in (None, server.model_path):
        config = _draft_config(scheduler.server_args).hf_config
        known["drafter.weights"] = weights_fact(path, config, server.speculative_draft_model_revision)
    return known


def eos_token_ids(model: Any) -> list[int]:
    return sorted(model.hf_eos_token_id or ())


def num_speculative_tokens(server: Any) -> int:
    return 0 if server.speculative_algorithm is None else int(server.speculative_num_draft_tokens or 1) - 1


def prompt_of(request: Any) -> Sequence[int]:
    return list(request.origin_input_ids)


def ticket_of(request: Any) -> str | None:
    """The ticket comes as `bootstrap_host`, which nothing else uses with this backend. None also if the KV depends on
    more than token ids.
    """
    plain = request.multimodal_inputs is None and request.lora_id is None and request.input_embeds is None
    return request.bootstrap_host if plain else None
