"""A stand-in for SGLang's kernels, of which PyPI has builds for CUDA only. SGLang imports names from it at start.

The small kernels of speculation are here, in PyTorch, and two of attention. Each other name is a function that raises,
so a kernel that is needed is reported by name. Without speculation the servers of the tests run SGLang's own paths in
PyTorch (`--attention-backend torch_native`), which need none.
"""

from __future__ import annotations

from typing import Any

from sgl_kernel.attention import build_draft_decode_metadata_cpu
from sgl_kernel.speculation import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    missing.__name__ = name
    return missing
