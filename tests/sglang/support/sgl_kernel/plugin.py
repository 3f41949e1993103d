"""A plug-in for SGLang: `torch_native` stands for `intel_amx`, whose attention kernels `attention` replaces.

SGLang's own `torch_native` has no path for drafts, and a CPU without AMX cannot choose `intel_amx`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register() -> None:
    """The entry point. Does nothing for a server without speculation."""
    import sys

    if not any(word.startswith("--speculative") for word in sys.argv):
        return
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    native = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(native, IntelAMXAttnBackend, HookType.REPLACE)
    drafts = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    HookRegistry.register(drafts, _create, HookType.AROUND)


def _create(
    original: Callable[..., Any], factory: Any, name: str, backends: dict[str, Any], *rest: Any, **more: Any
) -> Any:
    return original(factory, name, {**backends, "torch_native": backends["intel_amx"]}, *rest, **more)
