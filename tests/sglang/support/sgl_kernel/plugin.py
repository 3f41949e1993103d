"""A plug-in for SGLang: `torch_native` stands for `intel_amx`, whose attention kernels `attention` replaces.

SGLang's own `torch_native` has no path for drafts, and a CPU without AMX cannot choose `intel_amx`. While the file that
`BATON_TEST_FAULT` names exists, a decode server does not ask for the drafter's entry of the last prompt token, which
depends on the first output token: a defect on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register() -> None:
    """The entry point. Does nothing for a server without speculation and faults."""
    import os
    import sys

    if (fault := os.environ.get("BATON_TEST_FAULT")) is not None:
        _leave_boundary_out(fault)
    if "mooncake_tcp" in sys.argv:
        _without_cuda_events()
    if "nixl" in sys.argv:
        _in_host_memory()
    if any("deepseek" in word for word in sys.argv):
        _attend_to_latents()
    if not any(word.startswith("--speculative") for word in sys.argv):
        return
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    native = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(native, IntelAMXAttnBackend, HookType.REPLACE)
    drafts = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    HookRegistry.register(drafts, _create, HookType.AROUND)


def _attend_to_latents() -> None:
    """SGLang's handler of MLA for attention that it does not know expands the latents of a new prompt to K and V, which
    attention in PyTorch would then look for in the cache."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in ("torch_native", "triton"):  # "triton" for names that have no handler, such as the drafter's
        AttentionBackendRegistry.register(name, lambda attn, batch: AttnForwardMethod.MLA)

    def made(original: Callable[..., Any], *args: Any) -> Any:
        # On a CPU SGLang knows DeepSeek's scaling alone. The last argument is the device.
        return original(*args) if args[5] is not None else get_rope(*args[:-1])

    HookRegistry.register("sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", made, HookType.AROUND)
    # SGLang's own waits for a CUDA device.
    share = "sglang.srt.models.deepseek_v2.DeepseekV2ForCausalLM.set_embed_and_head"
    HookRegistry.register(share, _share, HookType.REPLACE)


def _share(model: Any, embed: Any, head: Any) -> None:
    """MTP's module uses the target's embeddings and head."""
    model.model.embed_tokens.weight, model.lm_head.weight = embed, head


def _create(
    original: Callable[..., Any], factory: Any, name: str, backends: dict[str, Any], *rest: Any, **more: Any
) -> Any:
    return original(factory, name, {**backends, "torch_native": backends["intel_amx"]}, *rest, **more)


def _without_cuda_events() -> None:
    """SGLang's `mooncake_tcp` lets the scheduler record a CUDA event for each chunk."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def made(result: None, sender: Any, *args: Any, **kwargs: Any) -> None:
        sender.supports_host_tensor_indices = False

    name = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVSender.__init__"
    HookRegistry.register(name, made, HookType.AFTER)


def _in_host_memory() -> None:
    """SGLang's `nixl` registers every KV pool as memory of a GPU."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def made(original: Callable[..., None], manager: Any, pools: Any, *args: Any, **kwargs: Any) -> None:
        pools.kv_data_mem_kinds = ["DRAM"] * len(pools.kv_data_ptrs)
        original(manager, pools, *args, **kwargs)

    HookRegistry.register("sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__", made, HookType.AROUND)


def _leave_boundary_out(while_exists: str) -> None:
    import os

    from baton.kv.interval import Interval
    from baton.sglang.geometry import BufferLayout

    complete = BufferLayout.wanted

    def wanted(layout: BufferLayout, num_tokens: int, hit: int) -> dict[str, Interval]:
        found = complete(layout, num_tokens, hit)
        if not os.path.exists(while_exists):
            return found
        cut = {name: Interval(tokens.start, tokens.stop - 1) for name, tokens in found.items() if "draft" in name}
        return {**found, **cut}

    BufferLayout.wanted = wanted  # type: ignore[method-assign]
